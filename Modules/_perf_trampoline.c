/* The core as an extension module, for interpreters that were built without it. What is said to users, and the
   switches, are in Lib/perf_trampoline. */

#include "pycore_perf_trampoline.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

PyDoc_STRVAR(fail_doc,
"fail(sentence)\n--\n\n"
"Report a failure, bytes, on stderr and in status().");

static PyObject *
perf_fail(PyObject *Py_UNUSED(module), PyObject *sentence)
{
    const char *text = PyBytes_AsString(sentence);
    if (text == NULL) {
        return NULL;
    }
    _PyPerf_Fail("%s", text);
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

PyDoc_STRVAR(name_existing_doc,
"name_existing()\n--\n\n"
"Name all functions that exist; return the number of those that have a name now.");

static PyObject *
perf_name_existing(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    Py_ssize_t num_named = _PyPerfTrampoline_NameExisting();
    return num_named < 0 ? NULL : PyLong_FromSsize_t(num_named);
}

PyDoc_STRVAR(set_filter_doc,
"set_filter(patterns)\n--\n\n"
"Which functions get slots. ValueError: the patterns are not well formed.");

static PyObject *
perf_set_filter(PyObject *Py_UNUSED(module), PyObject *patterns)
{
    char room[512];
    PyObject *encoded = PyUnicode_EncodeFSDefault(patterns);
    if (encoded == NULL) {
        return NULL;
    }
    const char *wrong = _PyPerfFilter_Check(PyBytes_AS_STRING(encoded), room, sizeof(room));
    if (wrong != NULL) {
        PyObject *sentence = PyUnicode_DecodeFSDefault(wrong);
        PyErr_SetObject(PyExc_ValueError, sentence);
        Py_XDECREF(sentence);
    }
    else {
        _PyPerfTrampoline_SetFilter(PyBytes_AS_STRING(encoded));
    }
    Py_DECREF(encoded);
    return wrong != NULL ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(get_filter_doc,
"get_filter()\n--\n\n"
"The patterns as they were set, '' for none.");

static PyObject *
perf_get_filter(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    return PyUnicode_DecodeFSDefault(_PyPerfFilter_Get());
}

/* --- Code that is brought into a running process: see Lib/perf_trampoline/attach.py ---

   It must not run in the thread that is interrupted for it. The program's signal handlers are Python code of the main
   thread: one that raises would raise in our code. So a thread of our own runs it while that one waits. The wait has an
   end, since the code imports modules, and the main thread may be under way in an import that must go on first. */

#define WAIT_MS 500

static void *
run_text(void *text)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *globals = PyDict_New();
    PyObject *result = NULL;
    if (globals != NULL && PyDict_SetItemString(globals, "__builtins__", PyEval_GetBuiltins()) == 0) {
        result = PyRun_String(text, Py_file_input, globals, globals);
    }
    Py_XDECREF(result);
    PyErr_Clear();
    Py_XDECREF(globals);
    PyGILState_Release(state);
    free(text);
    return NULL;
}

/* Takes `text` over. The program's signals are for its own threads. */
static int
start_thread(pthread_t *out_thread, char *text)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(out_thread, NULL, run_text, text);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) {
        free(text);
    }
    return status == 0 ? 0 : -1;
}

/* A pending call. */
static int
run_apart(void *text)
{
    pthread_t thread;
    struct timespec end;
    PyThreadState *ts = PyEval_SaveThread();
    if (start_thread(&thread, text) == 0) {
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_nsec += WAIT_MS * 1000000L;
        end.tv_sec += end.tv_nsec / 1000000000L;
        end.tv_nsec %= 1000000000L;
        if (pthread_timedjoin_np(thread, NULL, &end) != 0) {
            pthread_detach(thread);
        }
    }
    PyEval_RestoreThread(ts);
    return 0;
}

/* A debugger calls this, where a thread may load libraries and allocate memory: have `text` run when that place is left,
   while the main thread waits, or at once beside all threads. Returns 0, or -1 when it will not run. */
__attribute__((visibility("default"))) int
perf_trampoline_run(const char *text, int at_once)
{
    pthread_t thread;
    char *copy = strdup(text);
    if (copy == NULL) {
        return -1;
    }
    if (at_once) {
        return start_thread(&thread, copy) < 0 ? -1 : pthread_detach(thread);
    }
    if (Py_AddPendingCall(run_apart, copy) < 0) {
        free(copy);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(run_doc,
"run(text)\n--\n\n"
"Run Python code in a thread of its own and wait, but no longer than half a second.");

static PyObject *
perf_run(PyObject *Py_UNUSED(module), PyObject *text)
{
    const char *utf8 = PyUnicode_AsUTF8(text);
    char *copy = utf8 == NULL ? NULL : strdup(utf8);
    if (copy == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    run_apart(copy);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(raise_later_doc,
"raise_later(exception)\n--\n\n"
"Raise it in the main thread when the caller has returned, as a signal handler would.");

static PyCodeObject *caller;

/* Or in something that it has been interrupted by, another handler? */
static bool
is_in_caller(void)
{
    bool found = false;
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef(PyEval_GetFrame());
    while (frame != NULL && !found) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        found = code == caller;
        Py_DECREF(code);
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    return found;
}

static int
raise_now(void *exception)
{
    if (is_in_caller() && Py_AddPendingCall(raise_now, exception) == 0) {
        return 0;
    }
    PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_DECREF((PyObject *)exception);
    return -1;
}

static PyObject *
perf_raise_later(PyObject *Py_UNUSED(module), PyObject *exception)
{
    if (!PyExceptionInstance_Check(exception)) {
        return PyErr_Format(PyExc_TypeError, "not an exception: %R", exception);
    }
    PyFrameObject *frame = PyEval_GetFrame();
    PyCodeObject *code = frame == NULL ? NULL : PyFrame_GetCode(frame);
    Py_XSETREF(caller, code);
    if (Py_AddPendingCall(raise_now, Py_NewRef(exception)) < 0) {
        Py_DECREF(exception);
    }
    Py_RETURN_NONE;
}

static PyMethodDef perf_methods[] = {
    {"unavailable", perf_unavailable, METH_NOARGS, unavailable_doc},
    {"activate", perf_activate, METH_O, activate_doc},
    {"set_directories", perf_set_directories, METH_O, set_directories_doc},
    {"deactivate", perf_deactivate, METH_NOARGS, deactivate_doc},
    {"fail", perf_fail, METH_O, fail_doc},
    {"status", perf_status, METH_NOARGS, status_doc},
    {"name_existing", perf_name_existing, METH_NOARGS, name_existing_doc},
    {"set_filter", perf_set_filter, METH_O, set_filter_doc},
    {"get_filter", perf_get_filter, METH_NOARGS, get_filter_doc},
    {"run", perf_run, METH_O, run_doc},
    {"raise_later", perf_raise_later, METH_O, raise_later_doc},
    {NULL, NULL, 0, NULL},
};

static int
perf_exec(PyObject *Py_UNUSED(module))
{
    return _PyPerfTrampoline_WatchInterpreter();
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
