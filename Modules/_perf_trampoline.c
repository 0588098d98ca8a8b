/* The core as an extension module, for interpreters that were built without it. What is said to users, and the
   switches, are in Lib/perf_trampoline. */

#include "pycore_perf_trampoline.h"

#include <string.h>

static const _PyPerf_Backend *const backends[] = {&_PyPerf_map_backend, &_PyPerf_jitdump_backend, &_PyPerf_elf_backend};

PyDoc_STRVAR(unavailable_doc,
"unavailable()\n--\n\n"
"Why no trampoline can be used here, one sentence; None when one can.");

static PyObject *
perf_unavailable(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    const char *reason = NULL;
    if (_PyPerf_GetTemplate(&reason) == NULL) {
        return PyUnicode_FromString(reason);
    }
    int verified = _PyPerfTrampoline_Verify();
    if (verified < 0) {
        return NULL;
    }
    if (!verified) {
        return PyUnicode_FromFormat("this interpreter (%s) keeps frames or code objects in a way that this build for %s "
                                    "does not know", Py_GetVersion(), PY_VERSION);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(activate_doc,
"activate(backend)\n--\n\n"
"Switch the trampoline of this interpreter on. False when the files could not be made: status() tells why.");

static PyObject *
perf_activate(PyObject *Py_UNUSED(module), PyObject *name)
{
    for (size_t i = 0; i < Py_ARRAY_LENGTH(backends); i++) {
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, backends[i]->name) == 0) {
            return PyBool_FromLong(_PyPerfTrampoline_Activate(backends[i]) == 0);
        }
    }
    return PyErr_Format(PyExc_ValueError, "invalid backend: %S", name);
}

PyDoc_STRVAR(set_directories_doc,
"set_directories(colon_separated)\n--\n\n"
"Where ELF images are made: the first of them that can hold one.");

static PyObject *
perf_set_directories(PyObject *Py_UNUSED(module), PyObject *colon_separated)
{
    PyObject *encoded = PyUnicode_EncodeFSDefault(colon_separated);
    if (encoded == NULL) {
        return NULL;
    }
    _PyPerfElf_SetDirectories(PyBytes_AS_STRING(encoded));
    Py_DECREF(encoded);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(deactivate_doc,
"deactivate()\n--\n\n"
"Switch the trampoline of this interpreter off. Frames under way keep theirs.");

static PyObject *
perf_deactivate(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    _PyPerfTrampoline_Deactivate();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(after_fork_child_doc,
"after_fork_child()\n--\n\n"
"In a forked child: name functions anew, in files of the child's own.");

static PyObject *
perf_after_fork_child(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    _PyPerfTrampoline_AfterForkChild();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(status_doc,
"status()\n--\n\n"
"A dict: see perf_trampoline.status().");

static PyObject *
perf_status(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    _PyPerf_Status status;
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    _PyPerfTrampoline_GetStatus(&status);

    PyObject *files = PyList_New(0);
    for (size_t i = 0; i < Py_ARRAY_LENGTH(backends); i++) {
        const char *path;
        for (size_t j = 0; files != NULL && (path = backends[i]->path(j)) != NULL; j++) {
            PyObject *decoded = PyUnicode_DecodeFSDefault(path);
            if (decoded == NULL || PyList_Insert(files, 0, decoded) < 0) {     /* the newest comes first */
                Py_CLEAR(files);
            }
            Py_XDECREF(decoded);
        }
    }
    if (files == NULL) {
        return NULL;
    }
    /* A path in it need not be UTF-8, and a long one may be cut. */
    PyObject *failure = status.failure[0] == '\0' ? Py_NewRef(Py_None) : PyUnicode_DecodeFSDefault(status.failure);
    if (failure == NULL) {
        Py_DECREF(files);
        return NULL;
    }
    return Py_BuildValue("{s:O, s:z, s:z, s:N, s:n, s:n, s:O, s:O, s:N}",
                         "active", status.backend != NULL ? Py_True : Py_False,
                         "backend", status.backend != NULL ? status.backend->name : NULL,
                         "architecture", template != NULL ? template->arch : NULL,
                         "files", files,
                         "functions", (Py_ssize_t)status.num_functions,
                         "slots", (Py_ssize_t)status.num_slots,
                         "displaced", status.displaced ? Py_True : Py_False,
                         "chained", status.chained ? Py_True : Py_False,
                         "failure", failure);
}

static PyMethodDef perf_methods[] = {
    {"unavailable", perf_unavailable, METH_NOARGS, unavailable_doc},
    {"activate", perf_activate, METH_O, activate_doc},
    {"set_directories", perf_set_directories, METH_O, set_directories_doc},
    {"deactivate", perf_deactivate, METH_NOARGS, deactivate_doc},
    {"after_fork_child", perf_after_fork_child, METH_NOARGS, after_fork_child_doc},
    {"status", perf_status, METH_NOARGS, status_doc},
    {NULL, NULL, 0, NULL},
};

static void
forget_interpreter(PyObject *capsule)
{
    _PyPerfTrampoline_ForgetInterpreter(PyCapsule_GetPointer(capsule, NULL));
}

/* A module may be dropped and imported again; only the interpreter's own dictionary lives as long as it. */
static int
perf_exec(PyObject *Py_UNUSED(module))
{
    PyInterpreterState *interp = PyInterpreterState_Get();
    PyObject *dict = PyInterpreterState_GetDict(interp);
    const char *key = "_perf_trampoline";
    if (dict == NULL || PyDict_GetItemString(dict, key) != NULL) {
        return 0;
    }
    PyObject *capsule = PyCapsule_New(interp, NULL, forget_interpreter);
    int status = capsule == NULL ? -1 : PyDict_SetItemString(dict, key, capsule);
    Py_XDECREF(capsule);
    return status;
}

static PyModuleDef_Slot perf_slots[] = {
    {Py_mod_exec, perf_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef perf_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_perf_trampoline",
    .m_doc = "The core of perf_trampoline.",
    .m_methods = perf_methods,
    .m_slots = perf_slots,
};

PyMODINIT_FUNC
PyInit__perf_trampoline(void)
{
    return PyModuleDef_Init(&perf_module);
}
