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

BACKENDS = ("perf", "perf_jit")
"""perf: /tmp/perf-PID.map; perf_jit: /tmp/jit-PID.dump, for perf inject --jit."""

_SYS_NAMES = ("activate_stack_trampoline", "deactivate_stack_trampoline", "is_stack_trampoline_active")


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
    _take_over()
    _reinitialize_after_fork()
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


def _native(name):
    """The interpreter's own function of that name in sys, or None."""
    function = getattr(sys, "_native_stack_trampoline", {}).get(name)
    return None if function is None or function.__module__ == __name__ else function


def _take_over():
    """Switch the interpreter's own trampoline off, and make an end of its dump: ours has the same name."""
    native_is_active = _native("is_stack_trampoline_active")
    if native_is_active is None or not native_is_active():
        return
    dump, perf_map = f"/tmp/jit-{os.getpid()}.dump", f"/tmp/perf-{os.getpid()}.map"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        dump_is_open = any(line.rstrip().endswith(dump) for line in maps)
    if dump_is_open:
        # It closes its dump only for another backend, whose file it then creates.
        had_map = os.path.exists(perf_map)
        _native("activate_stack_trampoline")("perf")
        if not had_map and os.path.exists(perf_map) and os.path.getsize(perf_map) == 0:
            os.unlink(perf_map)
        os.unlink(dump)
    _native("deactivate_stack_trampoline")()


def _reinitialize_after_fork():
    global _reinitialize_after_fork
    os.register_at_fork(after_in_child=_core.after_fork_child)
    _reinitialize_after_fork = lambda: None


def _install():
    """Put our functions in sys, and keep the interpreter's own.  The start-up line may have kept them before."""
    if not hasattr(sys, "_native_stack_trampoline"):
        sys._native_stack_trampoline = {name: getattr(sys, name, None) for name in _SYS_NAMES}
    native = "perf_native" in sys._xoptions or (not sys.flags.ignore_environment
                                                and os.environ.get("PYTHON_PERF_NATIVE", "0") not in ("", "0"))
    ours = (activate, deactivate, is_active)
    for name, function in zip(_SYS_NAMES, sys._native_stack_trampoline.values() if native else ours):
        if function is not None:
            setattr(sys, name, function)
        elif hasattr(sys, name):
            delattr(sys, name)


_install()
