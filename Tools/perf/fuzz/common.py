"""What the targets share: their table, damage, and a process to run in."""

import functools
import glob
import os
import re
import signal
import sys
import tempfile
import types
from pathlib import Path

from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[1]))

import perf_trampoline

PATIENCE = 20       # seconds for one example, on a machine that has much else to do

TARGETS = {}


class Hang(Exception):
    pass


def target(strategy, round=200):
    """Register a target: it takes an example and returns whether that was accepted."""
    def register(function):
        TARGETS[function.__name__] = strategy, round, function
        return function
    return register


@functools.cache
def scratch():
    return Path(tempfile.mkdtemp(prefix="python-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def write(name, data):
    path = scratch() / name
    path.write_bytes(data)
    return path


# --- Damage ---

NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xfffffff0,
                           0xffffffff, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])


def one_of(draw, choices):
    """As sampled_from(), whose descriptions take longer than all else where there are many."""
    return choices[draw(st.integers(0, len(choices) - 1))]


def damage(draw, data, places=(), words=()):
    """The data with some edits, half of them at one of the places; words are what may be put in."""
    data = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        at = one_of(draw, places) if places and draw(st.booleans()) else draw(st.integers(0, max(len(data) - 1, 0)))
        edit = draw(st.sampled_from(["bit", "number", "step", "remove", "repeat", "swap", "cut", "put"]))
        size = draw(st.sampled_from([1, 2, 4, 8]))
        order = draw(st.sampled_from(["little", "big"]))
        field = slice(at, at + size)
        if edit == "bit" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == "number":
            data[field] = (draw(NUMBERS) % (1 << 8 * size)).to_bytes(size, order)
        elif edit == "step":
            number = int.from_bytes(data[field], order) + draw(st.sampled_from([-8, -4, -1, 1, 4, 8, len(data)]))
            data[field] = (number % (1 << 8 * size)).to_bytes(size, order)
        elif edit == "remove":
            del data[at:at + draw(st.integers(1, 64))]
        elif edit == "repeat":
            data[at:at] = data[at:at + draw(st.integers(1, 64))]
        elif edit == "swap":
            other = draw(st.integers(0, len(data)))
            data[field], data[other:other + size] = data[other:other + size], data[field]
        elif edit == "cut":
            del data[at:]
        elif edit == "put":
            data[at:at] = one_of(draw, words) if words else draw(st.binary(min_size=1, max_size=8))
    return bytes(data)


def damage_text(draw, text, words):
    """Words, and lines one way and another, are where a text can be damaged so that it still is one."""
    text = text.encode()
    words = [word.encode() for word in [*words, "\n", "\t", " ", "", "\0", "\r", "\v", "\x85", "\u2028", "٣", "-", "_", "0",
                                        "99999999999999999999", "(", ")", "\\", "/*", "*/"]] + [b"\xff"]
    return damage(draw, text, [match.start() for match in re.finditer(rb"\b", text)], words)


# --- A process ---

def call(functions):
    for qualname, filename, line, *module in functions:
        code = call.plain.replace(co_name="f", co_qualname=qualname, co_filename=filename, co_firstlineno=line)
        types.FunctionType(code, {"__name__": module[0] if module else "fuzzed"})()


call.plain = (lambda: None).__code__


def in_child(backend, functions, filter="fuzzed"):
    """Call functions of these names in a process of its own; its status, and the file it wrote."""
    directory = scratch() / "images"
    directory.mkdir(exist_ok=True)
    os.environ["PERF_TRAMPOLINE_DIR"] = str(directory)
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        status = 3
        try:
            perf_trampoline.activate(backend, filter=filter)
            call(functions)
            status = 0 if perf_trampoline.status()["failure"] is None else 4
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    pattern = {"perf": f"/tmp/perf-{pid}.map", "perf_jit": f"/tmp/jit-{pid}.dump", "perf_elf": f"{directory}/{pid}-*.so"}[backend]
    found = glob.glob(pattern)
    data = [Path(path).read_bytes() for path in found]
    for path in found:
        os.unlink(path)
    return status, data[0] if data else b""
