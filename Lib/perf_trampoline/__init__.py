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

__all__ = ["BACKENDS", "activate", "attach", "deactivate", "detach", "is_active", "name_existing", "set_filter", "status"]

BACKENDS = ("perf", "perf_jit", "perf_elf")
"""perf: /tmp/perf-PID.map; perf_jit: /tmp/jit-PID.dump, for perf inject --jit; perf_elf: shared objects, for all."""


def activate(backend="perf", *, filter=None):
    """Call functions through named trampolines from their next call on, until deactivate().

    *filter*, patterns as for set_filter(), says which; None leaves it as it is.

    When the files of *backend* cannot be made the program runs on without: one line on stderr and status() tell why.
    ValueError: *backend* is none of BACKENDS, a pattern is not well formed, or there can be no trampoline here.
    """
    if not isinstance(backend, str):
        raise TypeError(f"activate_stack_trampoline() argument must be str, not {type(backend).__name__}")
    if backend not in BACKENDS:
        raise ValueError(f"invalid backend: {backend}")
    if reason := _core.unavailable():
        raise ValueError(f"perf trampoline not available: {reason}")
    if (jit := getattr(sys, "_jit", None)) is not None and jit.is_enabled():
        raise ValueError("Cannot activate the perf trampoline if the JIT is active")
    if filter is None:
        filter = _filter_of_environment()
    if filter is not None:
        set_filter(filter)
    if backend == "perf_elf":
        from . import images
        _core.set_directories(":".join(images.directories()))
        images.purge(images.KEPT_SECONDS)
    _take_over()
    _core.activate(backend)


def deactivate():
    """Go back to the evaluator that was there before.  Calls under way return through their trampolines."""
    if _native_is_active():
        _native("deactivate_stack_trampoline")()
    _core.deactivate()


def is_active():
    """Are functions of this interpreter called through trampolines?"""
    status = _core.status()
    return status["active"] and not status["displaced"]


def set_filter(patterns):
    """Name only some functions from now on, in this process and those that it forks; "" for all.

    *patterns*, separated by commas, are modules or, with a slash in them, paths of files; each stands for what lies below
    it too, and `*`, `?` and `[...]` are as in the shell but for matching dots and slashes. `!` leaves out; the last one
    that fits decides, and if none does, the function is left out, or named if the first pattern leaves out:

        myapp,!myapp.tests      myapp and what is in it, without its tests
        !importlib,!*/site-packages/*     all but these

    PERF_TRAMPOLINE_FILTER is the same, for a process that sets no other. ValueError: a pattern is not well formed.
    """
    global _filter_is_set
    _core.set_filter(patterns)
    _filter_is_set = True


_filter_is_set = False


def _filter_of_environment():
    if _filter_is_set or sys.flags.ignore_environment:
        return None
    return os.environ.get("PERF_TRAMPOLINE_FILTER")


def name_existing():
    """Name all functions that exist now, not each at its next call; return the number of those that have a name.

    Frames under way have no trampoline until their function is called again.
    """
    return _core.name_existing()


def attach(pid, backend="perf_elf", **options):
    """Switch the trampoline of another process on: see perf_trampoline.attaching.attach()."""
    from . import attaching
    return attaching.attach(pid, backend, **options)


def detach(pid, **options):
    """Switch it off again: see perf_trampoline.attaching.detach()."""
    from . import attaching
    return attaching.detach(pid, **options)


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
    filter        str, the patterns that say which functions are named; "" for all
    failure       str, why the last activation or registration did not succeed; None when it did
    """
    return _core.status() | {"filter": _core.get_filter(), "unavailable": _core.unavailable()}


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


def _native_is_active():
    is_active = _native("is_stack_trampoline_active")
    return is_active is not None and is_active()


def _take_over():
    """Switch the interpreter's own trampoline off.

    It keeps its dump open and writes what it has buffered at exit.  Ours has the same name: its file must lose it.
    """
    if _native_is_active():
        _native("deactivate_stack_trampoline")()
        try:
            os.unlink(f"/tmp/jit-{os.getpid()}.dump")
        except OSError:
            pass        # it has written a map


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
