/* The least that a frame evaluator can do: what a call costs with this one, any perf trampoline must pay.

   From the moment one is installed the interpreter makes a C call for every Python call; this adds a jump to it. */

#include "pycore_perf_compat.h"

static PyObject *
floor_evaluator(PyThreadState *ts, struct _PyInterpreterFrame *frame, int throwflag)
{
    return _PyEval_EvalFrameDefault(ts, frame, throwflag);
}

static PyObject *
floor_install(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), floor_evaluator);
    Py_RETURN_NONE;
}

static PyMethodDef floor_methods[] = {
    {"install", floor_install, METH_NOARGS, "install()\n--\n\nFrom now on, in this interpreter."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef floor_module = {
    PyModuleDef_HEAD_INIT, .m_name = "floor", .m_methods = floor_methods,
};

PyMODINIT_FUNC
PyInit_floor(void)
{
    return PyModule_Create(&floor_module);
}
