"""What perf_trampoline.pth imports when the command line or the environment asks for a trampoline."""

import os
import sys

import perf_trampoline

# As CPython reads them: an option needs no value, a variable a number that is not 0.
SWITCHES = (("perf_jit", "PYTHON_PERF_JIT_SUPPORT"), ("perf", "PYTHONPERFSUPPORT"))


def wanted():
    """The backend that is asked for, or None.  An option goes before a variable, the richer backend before the map."""
    if "perf_native" in sys._xoptions or (not sys.flags.ignore_environment and _is_set("PYTHON_PERF_NATIVE")):
        return None
    for backend, _ in SWITCHES:
        if backend in sys._xoptions:
            return backend
    for backend, variable in SWITCHES:
        if not sys.flags.ignore_environment and _is_set(variable):
            return backend
    return None


def _is_set(variable):
    try:
        return int(os.environ.get(variable, "0")) != 0
    except ValueError:
        return False


def main():
    backend = wanted()
    if backend is not None:
        try:
            perf_trampoline.activate(backend)
        except Exception as error:      # a program must start whatever becomes of its profile
            print(f"perf trampoline: {error}", file=sys.stderr)


main()
