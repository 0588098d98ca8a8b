/* Names for functions that exist already, before their next call.

   The collector does not track code objects. What makes them run is tracked: functions, generators and frames; and a
   code object holds those of the functions in it that are yet to be made. But for code and globals no reference is held
   while other threads may run: destructors run when and where they would without us. */

#include "pycore_perf_trampoline.h"

/* Add to the list `pairs` a code object and its globals, or a generator and None. */
static int
add(PyObject *pairs, PyObject *code, PyObject *globals)
{
    return PyList_Append(pairs, code) < 0 || PyList_Append(pairs, globals) < 0 ? -1 : 0;
}

static const char *
frame_attribute(PyObject *object)
{
    return PyGen_CheckExact(object) ? "gi_frame" : PyCoro_CheckExact(object) ? "cr_frame"
           : PyAsyncGen_CheckExact(object) ? "ag_frame" : NULL;
}

static int
visit(PyObject *object, void *pairs)
{
    int status = 0;
    if (PyFunction_Check(object)) {
        status = add(pairs, PyFunction_GET_CODE(object), PyFunction_GET_GLOBALS(object));
    }
    else if (PyFrame_Check(object)) {
        PyCodeObject *code = PyFrame_GetCode((PyFrameObject *)object);
        PyObject *globals = PyFrame_GetGlobals((PyFrameObject *)object);
        status = add(pairs, (PyObject *)code, globals);
        Py_DECREF(code);
        Py_DECREF(globals);
    }
    else if (frame_attribute(object) != NULL) {
        status = add(pairs, object, Py_None);
    }
    return status == 0;
}

#if PY_VERSION_HEX < 0x030c0000
static int
visit_tracked(PyObject *pairs)
{
    PyObject *gc = PyImport_ImportModule("gc");
    PyObject *objects = gc == NULL ? NULL : PyObject_CallMethod(gc, "get_objects", NULL);
    Py_XDECREF(gc);
    /* The list is gone before another thread can run, so nobody can make its references the last ones. */
    for (Py_ssize_t i = 0; objects != NULL && i < PyList_GET_SIZE(objects); i++) {
        if (!visit(PyList_GET_ITEM(objects, i), pairs)) {
            break;
        }
    }
    Py_XDECREF(objects);
    return PyErr_Occurred() ? -1 : 0;
}
#else
static int
visit_tracked(PyObject *pairs)
{
    PyUnstable_GC_VisitObjects(visit, pairs);
    return PyErr_Occurred() ? -1 : 0;
}
#endif

/* A generator's frame is made when it is asked for, which must not be during the visit. */
static int
visit_generators(PyObject *pairs)
{
    for (Py_ssize_t i = 0, size = PyList_GET_SIZE(pairs); i < size; i += 2) {
        PyObject *object = PyList_GET_ITEM(pairs, i);
        if (!PyCode_Check(object)) {
            PyObject *frame = PyObject_GetAttrString(object, frame_attribute(object));
            PyList_SetItem(pairs, i, Py_NewRef(Py_None));
            if (frame == NULL || (frame != Py_None && !visit(frame, pairs))) {
                Py_XDECREF(frame);
                return -1;
            }
            Py_DECREF(frame);
        }
    }
    return 0;
}

/* Frames under way are no objects until they are asked for. Without a GIL they cannot be looked at: what the code of
   those defines later is named when it is called. */
static int
visit_stacks(PyObject *pairs)
{
#ifdef Py_GIL_DISABLED
    return 0;
#endif
    for (PyThreadState *ts = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); ts != NULL;
         ts = PyThreadState_Next(ts))
    {
        for (PyFrameObject *frame = PyThreadState_GetFrame(ts), *back; frame != NULL; frame = back) {
            int stopped = !visit((PyObject *)frame, pairs);
            back = stopped ? NULL : PyFrame_GetBack(frame);
            Py_DECREF(frame);
            if (stopped) {
                return -1;
            }
        }
    }
    return 0;
}

Py_ssize_t
_PyPerfTrampoline_NameExisting(void)
{
    Py_ssize_t num_named = -1;
    PyObject *pairs = PyList_New(0), *seen = PyDict_New();
    if (pairs == NULL || seen == NULL) {
        goto done;
    }
    PyObject_GC_UnTrack(pairs);     /* nobody else is to find it */
    if (visit_stacks(pairs) < 0 || visit_tracked(pairs) < 0 || visit_generators(pairs) < 0) {
        goto done;
    }
    num_named = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pairs); i += 2) {
        if (!PyCode_Check(PyList_GET_ITEM(pairs, i))) {
            continue;
        }
        PyCodeObject *code = (PyCodeObject *)PyList_GET_ITEM(pairs, i);
        PyObject *globals = PyList_GET_ITEM(pairs, i + 1);
        PyObject *address = PyLong_FromVoidPtr(code);
        int is_old = address == NULL ? -1 : PyDict_Contains(seen, address);
        if (is_old == 0 && PyDict_SetItem(seen, address, Py_None) < 0) {
            is_old = -1;
        }
        Py_XDECREF(address);
        if (is_old < 0) {
            num_named = -1;
            break;
        }
        if (is_old) {
            continue;
        }
        num_named += _PyPerfTrampoline_NameCode(code, globals) > 0;
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(code->co_consts); j++) {
            PyObject *constant = PyTuple_GET_ITEM(code->co_consts, j);
            if (PyCode_Check(constant) && add(pairs, constant, globals) < 0) {
                num_named = -1;
                goto done;
            }
        }
    }

done:
    Py_XDECREF(seen);
    Py_XDECREF(pairs);
    return num_named;
}
