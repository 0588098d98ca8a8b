"""Names and unwind data for Python functions, for perf, gdb and every other native profiler.

    python -X perf_jit prog.py
    sys.activate_stack_trampoline("perf_jit")

The functions here are those of sys of the same kind, on every interpreter from CPython 3.11 on; importing this package
puts them in place in sys.  PYTHON_PERF_NATIVE=1 or -X perf_native leaves the interpreter's own there.

Doc/howto/perf_profiling.rst is the way from here to a profile.
"""

import os
import sys

from . import _perf_trampoline as _core

__all__ = ["BACKENDS", "activate", "deactivate", "is_active", "status"]

BACKENDS = ("perf", "perf_jit", "perf_elf")
"""perf: /tmp/perf-PID.map; perf_jit: /tmp/jit-PID.dump, for perf inject --jit; perf_elf: shared objects, for all."""


def activate(backend="perf"):
    """Call functions through named trampolines from their next call on, until deactivate().

    When the files of *backend* cannot be made the program runs on without: one line on stderr and status() tell why.
    ValueError: *backend* is none of BACKENDS, or there can be no trampoline here.
    """
    if not isinstance(backend, str):
        raise TypeError(f"activate_stack_trampoline() argument must be str, not {type(backend).__name__}")
    if backend not in BACKENDS:
        raise ValueError(f"invalid backend: {backend}")
    if reason := _core.unavailable():
        raise ValueError(f"perf trampoline not available: {reason}")
    if (jit := getattr(sys, "_jit", None)) is not None and jit.is_enabled():
        raise ValueError("Cannot activate the perf trampoline if the JIT is active")
    if backend == "perf_elf":
        from . import images
        _core.set_directories(":".join(images.directories()))
        images.purge(images.KEPT_SECONDS)
    _take_over()
    _core.activate(backend)


def deactivate():
    """Go back to the evaluator that was there before.  Calls under way return through their trampolines."""
    if (native := _native("deactivate_stack_trampoline")) and _native("is_stack_trampoline_active")():
        native()
    _core.deactivate()


def is_active():
    """Are functions of this interpreter called through trampolines?"""
    status = _core.status()
    return status["active"] and not status["displaced"]


def status():
    """What is on, in this interpreter and process, as a dict.

    active        bool
    backend       str, one of BACKENDS; None when not active
    architecture  str as in Tools/perf/archs.txt; None when it has no trampoline
    unavailable   str, why there can be no trampoline; None when there can
    files         list of str, paths written by this process
    functions     int, functions named in them
    slots         int, trampolines of functions that are alive
    displaced     bool, another frame evaluator took our place: is_active() is false
    chained       bool, another one was there before us, and runs inside our trampolines
    failure       str, why the last activation or registration did not succeed; None when it did
    """
    return _core.status() | {"unavailable": _core.unavailable()}


def is_set(variable):
    """Is this environment variable a number that is not 0?  So CPython reads them; never under -E or -I."""
    try:
        return not sys.flags.ignore_environment and int(os.environ.get(variable, "0")) != 0
    except ValueError:
        return False


def native_is_wanted():
    """Is the interpreter's own trampoline to be left in place?"""
    return "perf_native" in sys._xoptions or is_set("PYTHON_PERF_NATIVE")


def _native(name):
    """The interpreter's own function of that name in sys, or None."""
    return sys._native_stack_trampoline.get(name)


def _take_over():
    """Switch the interpreter's own trampoline off.

    It keeps its dump open and writes what it has buffered at exit.  Ours has the same name: its file must lose it.
    """
    is_native_active = _native("is_stack_trampoline_active")
    if is_native_active is not None and is_native_active():
        _native("deactivate_stack_trampoline")()
        dump = f"/tmp/jit-{os.getpid()}.dump"
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            if any(line.rstrip().endswith(dump) for line in maps):
                os.unlink(dump)


def sys_function(name):
    """What sys has under *name*: ours, or with PYTHON_PERF_NATIVE the interpreter's own."""
    function = _in_sys[name]
    if function is None:
        raise AttributeError(f"this interpreter has no sys.{name}() of its own")
    return function


_OURS = {
    "activate_stack_trampoline": activate,
    "deactivate_stack_trampoline": deactivate,
    "is_stack_trampoline_active": is_active,
}

def _native_function(function):
    """What the start-up line has put a function of its own before; it may have been read more than once."""
    while function is not None and "_n" in (getattr(function, "__kwdefaults__", None) or ()):
        function = function.__kwdefaults__["_n"]
    return function


# A second import must not take ours for them.
if not hasattr(sys, "_native_stack_trampoline"):
    sys._native_stack_trampoline = {name: _native_function(getattr(sys, name, None)) for name in _OURS}

_in_sys = sys._native_stack_trampoline if native_is_wanted() else _OURS
for _name, _function in _in_sys.items():
    if _function is not None:
        setattr(sys, _name, _function)
    elif hasattr(sys, _name):
        delattr(sys, _name)

os.register_at_fork(after_in_child=_core.after_fork_child)
