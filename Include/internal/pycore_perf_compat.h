/* The only file that knows CPython versions (3.11 ... 3.15), and whether this is an extension or CPython's own build.

   Everything the perf trampoline reads of the interpreter goes through the names below. What is private to a version
   (the code object of a frame, the array of code extras) is verified against the public calls before the first
   activation: see _PyPerfTrampoline_Verify(). */

#ifndef Py_INTERNAL_PERF_COMPAT_H
#define Py_INTERNAL_PERF_COMPAT_H

/* CPython's own build says so on the command line. */
#ifdef Py_BUILD_CORE
#  define _PyPerf_IN_CPYTHON 1
#elif !defined(Py_BUILD_CORE_BUILTIN) && !defined(Py_BUILD_CORE_MODULE)
#  define Py_BUILD_CORE_MODULE 1
#endif
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE 1
#endif

/* The evaluator runs at every call: without the assertions of the interpreter's inline functions, unless it has them. */
#include "pyconfig.h"
#if !defined(Py_DEBUG) && !defined(NDEBUG) && !defined(_PyPerf_IN_CPYTHON)
#  define NDEBUG 1
#endif

#include "Python.h"

/* CPython's configure found no trampoline: its entry points are there, and do nothing; on Darwin it has found its own,
   which has them. The reason for which an extension has none is told at run time. */
#ifdef _PyPerf_IN_CPYTHON
#  ifndef PY_HAVE_PERF_TRAMPOLINE
#    define _PyPerf_STUBS 1
#  elif defined(__APPLE__)
#    define _PyPerf_STUBS 1
#    define _PyPerf_CPYTHONS_OWN 1
#  endif
#endif

#ifdef _PyPerf_IN_CPYTHON
#  include "pycore_ceval.h"         /* _PyPerf_Callbacks */
#  include "pycore_interp.h"        /* _PyInterpreterState_GetConfig() */
#  if PY_VERSION_HEX >= 0x030f0000
#    define _PyPerf_HAVE_JIT_CODE 1
typedef size_t _PyPerf_CallbackSize;
#  else
typedef unsigned int _PyPerf_CallbackSize;
#  endif
#endif

#if PY_VERSION_HEX >= 0x030e0000
#  include "pycore_interpframe.h"
#else
#  include "pycore_frame.h"
#endif

#if PY_VERSION_HEX < 0x030c0000
#  define PyUnstable_Code_GetExtra _PyCode_GetExtra
#  define PyUnstable_Code_SetExtra _PyCode_SetExtra
#  define PyUnstable_Eval_RequestCodeExtraIndex _PyEval_RequestCodeExtraIndex
#endif

PyAPI_FUNC(PyObject *) _PyEval_EvalFrameDefault(PyThreadState *, struct _PyInterpreterFrame *, int);

/* The code object that `frame` executes, borrowed. */
static inline PyCodeObject *
_PyPerf_FrameCode(struct _PyInterpreterFrame *frame)
{
#if PY_VERSION_HEX >= 0x030e0000
    return (PyCodeObject *)PyStackRef_AsPyObjectBorrow(frame->f_executable);
#elif PY_VERSION_HEX >= 0x030d0000
    return (PyCodeObject *)frame->f_executable;
#else
    return frame->f_code;
#endif
}

/* Its globals, borrowed. */
static inline PyObject *
_PyPerf_FrameGlobals(struct _PyInterpreterFrame *frame)
{
    return frame->f_globals;
}

/* What code objects' co_extra points to, the same in all versions. */
struct _PyPerf_CodeExtra {
    Py_ssize_t ce_size;
    void *ce_extras[1];
};

#ifndef Py_GIL_DISABLED
#  define _PyPerf_LOAD(place) (place)
#else
#  define _PyPerf_LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#endif

static inline void *
_PyPerf_CodeExtraAt(PyCodeObject *code, Py_ssize_t index)
{
    const struct _PyPerf_CodeExtra *extra = _PyPerf_LOAD(code->co_extra);
    return extra != NULL && index < extra->ce_size ? _PyPerf_LOAD(extra->ce_extras[index]) : NULL;
}

/* PyUnstable_Code_SetExtra() for an extra that is NULL, called under the trampolines' lock; -1 perhaps with an exception.
   Without a GIL others read while we write, and the public call would move the array from under them: then a larger one
   takes its place, and the former is left to whoever may still be reading it. There is room in each for a few more. */
static inline int
_PyPerf_SetCodeExtra(PyCodeObject *code, Py_ssize_t index, void *value)
{
#ifndef Py_GIL_DISABLED
    return PyUnstable_Code_SetExtra((PyObject *)code, index, value);
#else
    enum {MAX_EXTRAS = 254, ROOM = 8};
    struct _PyPerf_CodeExtra *former = code->co_extra;
    if (former != NULL && index < former->ce_size) {
        __atomic_store_n(&former->ce_extras[index], value, __ATOMIC_RELEASE);
        return 0;
    }
    Py_ssize_t count = Py_MIN(index + ROOM, MAX_EXTRAS);
    struct _PyPerf_CodeExtra *extra = PyMem_Calloc(1, sizeof(*extra) + (count - 1) * sizeof(extra->ce_extras[0]));
    if (extra == NULL || index >= count) {
        PyMem_Free(extra);
        return -1;
    }
    for (Py_ssize_t i = 0; former != NULL && i < former->ce_size; i++) {
        extra->ce_extras[i] = former->ce_extras[i];
    }
    extra->ce_extras[index] = value;
    extra->ce_size = count;
    __atomic_store_n(&code->co_extra, (void *)extra, __ATOMIC_RELEASE);
    return 0;
#endif
}

/* Before 3.14 nested evaluators spend a budget of their own; a hook that stays until it is spent would raise a
   RecursionError that the program does not get without us. 3.11 counts all calls alike, 3.14 looks at the stack. */
static inline int
_PyPerf_RecursionBudgetLow(PyThreadState *ts)
{
#if PY_VERSION_HEX >= 0x030e0000 || PY_VERSION_HEX < 0x030c0000
    (void)ts;
    return 0;
#elif PY_VERSION_HEX >= 0x030d0000
    return ts->c_recursion_remaining < Py_C_RECURSION_LIMIT / 2;
#else
    return ts->c_recursion_remaining < C_RECURSION_LIMIT / 2;
#endif
}

#endif
