"""A recording seen from Python: what each sample of perf was doing, as a path of functions.

The interpreter's own frames are folded into the Python function they run. Frames of the C library, of extension
modules and of the kernel stay below it. What led to the first Python function, from the start of the process or
thread, is left out, unless it is a program of its own that embeds Python.
"""

import collections
import itertools
import os
import re

from perf_trampoline import perf_script

PYTHON, NATIVE, KERNEL, INTERPRETER, OTHER = KINDS = "python", "native", "kernel", "interpreter", "other"

Function = collections.namedtuple("Function", "kind name file")
"""`file` is the source file of a Python function, else the program, library or kernel module it is in."""

Path = collections.namedtuple("Path", "sample functions whole")
"""The functions of one sample, the outermost first; `whole`: perf has walked its stack to the start."""

INCOMPLETE = Function(OTHER, "[incomplete stack]", "")
BARE = Function(OTHER, "[interpreter outside Python functions]", "")
NOTHING = Function(OTHER, "[no stack]", "")

_INTERPRETER = re.compile(r"(lib)?python(\d+(\.\d+)?)?[a-z]{0,2}(\.so[.\d]*)?|_perf_trampoline\..*\.so")
_MAIN = re.compile(r"main|Py_(Bytes)?Main|pythread_wrapper")
_START = re.compile(r"_start|__libc_start_.*|start_thread|__thread_start|(__)?clone3?(@.*)?")
_OFF_KERNEL = "[vdso]", "[unknown]", "[heap]", "[stack", "[anon"
_PACKAGES = re.compile(r".*/(?:site-packages|dist-packages|python\d+\.\d+|python3/dist-packages)/(.+)")


class Profile:
    """All samples of a recording.

    hide       kinds of functions that are left out
    unfold     keep the interpreter's own frames
    progress   is called with the number of samples read so far
    """

    def __init__(self, data, perf=("perf",), *, hide=(), unfold=False, progress=None):
        self.data, self.perf, self.hide, self.unfold = os.fspath(data), perf, frozenset(hide), unfold
        if not os.path.exists(self.data):
            raise perf_script.PerfError(f"there is no {self.data}: record one, or name it with -i")
        attributes = perf_script.attributes(data, perf)
        self.mode = "dwarf" if "STACK_USER" in attributes else "fp"
        self._functions = {}
        self.paths = []
        for sample in perf_script.samples(data, perf):
            self.paths.append(self._path(sample))
            if progress and len(self.paths) % 250 == 0:
                progress(len(self.paths))
        # perf mixes the events of a recording; their periods have no common unit.
        events = collections.Counter(path.sample.event for path in self.paths)
        self.event = events.most_common(1)[0][0] if events else ""
        if len(events) > 1:
            self.paths = [path for path in self.paths if path.sample.event == self.event]
        self.weight = sum(path.sample.period for path in self.paths)
        self.whole = sum(path.whole for path in self.paths)
        self.processes = len({path.sample.pid for path in self.paths})

    def _function(self, frame):
        if (function := self._functions.get(frame)) is None:
            dso = frame.dso.removesuffix(" (deleted)")
            if named := perf_script.python_name(frame):
                function = Function(PYTHON, *named)
            elif dso.startswith("[") and not dso.startswith(_OFF_KERNEL):
                function = Function(KERNEL, frame.sym, dso)
            elif _INTERPRETER.fullmatch(os.path.basename(dso)):
                function = Function(INTERPRETER, frame.sym, dso)
            else:
                function = Function(NATIVE, frame.sym, dso)
            self._functions[frame] = function
        return function

    def _path(self, sample):
        frames, whole = perf_script.walk(sample.stack, self.mode)
        functions = [self._function(frame) for frame in reversed(frames)]
        first, inner = (next((i for i, function in enumerate(functions) if function.kind == kind), None)
                        for kind in (PYTHON, INTERPRETER))
        # perf 6.1 may lose its way in the C library of a process that has executed another program: that is far enough.
        whole = whole or any(function.kind == INTERPRETER and _MAIN.fullmatch(function.name) for function in functions[:4])
        if functions and all(function.kind == KERNEL for function in functions):
            whole = True        # a thread of the kernel, or a process before its program starts
        if not functions:
            start = [NOTHING]
        elif not whole:
            start = [INCOMPLETE]
        elif first is not None:
            start = [function for i, function in enumerate(functions[:first])
                     if function.kind == NATIVE and not perf_script.in_libc(frames[-1 - i])]
            functions = functions[first:]
        elif inner is not None:
            start, functions = [BARE], list(itertools.dropwhile(_is_start, functions[inner:]))
        else:
            start = [Function(OTHER, f"[{sample.comm or 'no name'}]", "")]
        kept = start
        for function in functions:
            if function.kind == INTERPRETER and not self.unfold or function.kind in self.hide:
                continue
            # An unknown symbol says no more the second time.
            if function.name == "[unknown]" and kept and kept[-1] == function:
                continue
            kept.append(function)
        return Path(sample, tuple(kept), whole)

    def share(self, weight):
        """In percent of the whole recording."""
        return 100 * weight / self.weight if self.weight else 0.0

    def tree(self):
        """The Node of the whole recording."""
        root = Node()
        for path in self.paths:
            root.add(path.functions, path.sample.period)
        return root

    def table(self, key):
        """{key(function): [total, own]} in weights; functions whose key is None do not count."""
        table = collections.defaultdict(lambda: [0, 0])
        for path in self.paths:
            keys = [k for function in path.functions if (k := key(function)) is not None]
            for k in set(keys):
                table[k][0] += path.sample.period
            if keys:
                table[keys[-1]][1] += path.sample.period
        return dict(table)


class Node:
    """A function at one place of the call tree."""

    def __init__(self):
        self.total = self.own = 0
        self.callees = {}

    def add(self, functions, weight):
        node = self
        node.total += weight
        for function in functions:
            if function not in node.callees:
                node.callees[function] = Node()
            node = node.callees[function]
            node.total += weight
        node.own += weight

    def sorted(self):
        """(function, node) of the callees, the most costly first."""
        return sorted(self.callees.items(), key=lambda item: (-item[1].total, item[0]))


def _is_start(function):
    return function.kind == INTERPRETER or _START.fullmatch(function.name)


def module(function):
    """The module of a Python function, as far as its path tells it; the library of another."""
    if function.kind != PYTHON:
        return os.path.basename(function.file) or function.name
    path = function.file
    if match := _PACKAGES.match(path):
        path = match[1]
    elif not path.startswith("<"):
        path = os.path.basename(path)
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def file(function):
    return function.file or function.name


def same(function):
    return function


KEYS = {"function": same, "file": file, "module": module}


def place(function):
    """The short form of where a function is."""
    return module(function) if function.kind != OTHER else ""
