"""What perf_trampoline.pth imports when the command line or the environment may ask for a trampoline.

That line is compiled at every start of every program: it takes a cheap look at all names of options and variables.
"""

import os
import stat
import sys

import perf_trampoline

SWITCHES = (
    ("perf_elf", "PYTHON_PERF_ELF_SUPPORT"), ("perf_jit", "PYTHON_PERF_JIT_SUPPORT"), ("perf", "PYTHONPERFSUPPORT"))


def wanted():
    """The backend that is asked for, or None.  An option goes before a variable, the richer backend before the map."""
    if perf_trampoline.native_is_wanted():
        return None
    by_option = [backend for backend, _ in SWITCHES if backend in sys._xoptions]
    by_variable = [backend for backend, variable in SWITCHES if perf_trampoline.is_set(variable)]
    return next(iter(by_option + by_variable), None)


def begin_map_anew():
    """The interpreter's own trampoline has begun its map behind what an earlier process of this number may have left."""
    if not perf_trampoline._native_is_active():
        return
    try:
        fd = os.open(f"/tmp/perf-{os.getpid()}.map", os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with open(fd, "wb", 0):
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_nlink == 1:
            os.ftruncate(fd, 0)


if (backend := wanted()) is not None:
    try:
        begin_map_anew()
        perf_trampoline.activate(backend)
    except Exception as error:      # the program starts, whatever becomes of its profile
        perf_trampoline._core.fail(str(error).encode("utf-8", "backslashreplace"))
