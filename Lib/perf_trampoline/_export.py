"""A profile in the forms that other viewers and stores read; each function returns bytes."""

import collections
import gzip
import json

from perf_trampoline import _profile


def _label(function):
    return function.name if function.kind == _profile.OTHER else f"{function.name} ({_profile.place(function)})"


def _threads(profile):
    """{(pid, tid): its paths, oldest first}"""
    threads = collections.defaultdict(list)
    for path in profile.paths:
        threads[path.sample.pid, path.sample.tid].append(path)
    return threads


def _is_time(profile):
    """Are the weights nanoseconds?  Those of the clocks are, others count the event."""
    return "clock" in profile.event


def folded(profile, title):
    """A line for each stack: names from the outermost on, joined by semicolons, and its weight."""
    stacks = collections.Counter()
    for path in profile.paths:
        # Readers split at the semicolon; a line break, whichever, would end the stack.
        names = [path.sample.comm or "-", *map(_label, path.functions)]
        stacks[";".join(" ".join(name.replace(";", ":").splitlines()) for name in names)] += path.sample.period
    return "".join(f"{stack} {weight}\n" for stack, weight in sorted(stacks.items())).encode(errors="surrogateescape")


def speedscope(profile, title):
    """speedscope's file format, a sampled profile for each thread (its schema: speedscope.app/file-format-schema.json)."""
    numbers = {}
    profiles = []
    for (pid, tid), paths in _threads(profile).items():
        weights = [path.sample.period for path in paths]
        profiles.append({
            "type": "sampled", "name": f"{paths[0].sample.comm or 'thread'} {pid}/{tid}",
            "unit": "nanoseconds" if _is_time(profile) else "none", "startValue": 0, "endValue": sum(weights),
            "samples": [[numbers.setdefault(function, len(numbers)) for function in path.functions] for path in paths],
            "weights": weights})
    frames = [{"name": function.name, "file": function.file} if function.file else {"name": function.name}
              for function in numbers]
    return json.dumps({"$schema": "https://www.speedscope.app/file-format-schema.json", "name": title,
                       "exporter": "perf-trampoline", "activeProfileIndex": 0, "shared": {"frames": frames},
                       "profiles": profiles}).encode()


_CATEGORIES = {"python": "yellow", "native": "blue", "kernel": "orange", "interpreter": "green", "other": "grey"}


def firefox(profile, title):
    """The Firefox Profiler's Gecko profile format, version 24, as perf's own exporter uses; times in milliseconds."""
    threads = []
    start = min(path.sample.time_ns for path in profile.paths)
    categories = list(_CATEGORIES)
    for (pid, tid), paths in _threads(profile).items():
        strings, frames, stacks = {}, {}, {}
        frame_rows, stack_rows, samples = [], [], []
        for path in paths:
            prefix = None
            for function in path.functions:
                if function not in frames:
                    frames[function] = len(frames)
                    string = strings.setdefault(_label(function), len(strings))
                    frame_rows.append([string, False, 0, None, None, None, None, categories.index(function.kind), 0])
                if (prefix, function) not in stacks:
                    stacks[prefix, function] = len(stacks)
                    stack_rows.append([prefix, frames[function]])
                prefix = stacks[prefix, function]
            samples.append([prefix, path.sample.time_ns / 1e6, 0])
        threads.append({
            "tid": tid, "pid": pid, "name": paths[0].sample.comm or str(tid), "registerTime": 0, "unregisterTime": None,
            "processType": "default", "processName": paths[0].sample.comm,
            "markers": {"schema": {"name": 0, "startTime": 1, "endTime": 2, "phase": 3, "category": 4, "data": 5}, "data": []},
            "samples": {"schema": {"stack": 0, "time": 1, "responsiveness": 2}, "data": samples},
            "frameTable": {"schema": {"location": 0, "relevantForJS": 1, "innerWindowID": 2, "implementation": 3,
                                      "optimizations": 4, "line": 5, "column": 6, "category": 7, "subcategory": 8},
                           "data": frame_rows},
            "stackTable": {"schema": {"prefix": 0, "frame": 1}, "data": stack_rows}, "stringTable": list(strings)})
    meta = {"version": 24, "interval": 1, "processType": 0, "product": title, "stackwalk": 1, "debug": 0, "gcpoison": 0,
            "asyncstack": 1, "startTime": start / 1e6, "shutdownTime": None, "presymbolicated": True, "markerSchema": [],
            "categories": [{"name": name, "color": colour, "subcategories": ["Other"]}
                           for name, colour in _CATEGORIES.items()]}
    return json.dumps({"meta": meta, "libs": [], "threads": threads, "processes": [], "pausedRanges": []}).encode()


def _varint(number):
    out = bytearray()
    number &= (1 << 64) - 1
    while number > 0x7f:
        out.append(number & 0x7f | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number, value):
    """A protocol buffer's field: an integer as varint, bytes with their length, a list of integers packed."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, list):
        value = b"".join(map(_varint, value))
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def pprof(profile, title):
    """pprof's profile.proto, compressed: samples with their count and weight; labels pid, tid and thread."""
    strings = {"": 0}

    def string(text):
        return strings.setdefault(text, len(strings))

    def kind(name, unit):
        return _field(1, string(name)) + _field(2, string(unit))

    unit = kind("cpu", "nanoseconds") if _is_time(profile) else kind(profile.event, "count")
    numbers = {}
    stacks = collections.defaultdict(lambda: [0, 0])
    for path in profile.paths:
        # A location's number is not 0.  The leaf comes first.
        ids = tuple(numbers.setdefault(function, len(numbers) + 1) for function in reversed(path.functions))
        entry = stacks[ids, path.sample.pid, path.sample.tid, path.sample.comm]
        entry[0] += 1
        entry[1] += path.sample.period
    out = [_field(1, kind("samples", "count")), _field(1, unit)]
    for (ids, pid, tid, comm), values in stacks.items():
        labels = [_field(1, string("pid")) + _field(3, pid), _field(1, string("tid")) + _field(3, tid),
                  _field(1, string("thread")) + _field(2, string(comm))]
        out.append(_field(2, _field(1, list(ids)) + _field(2, values) + b"".join(_field(3, label) for label in labels)))
    for function, number in numbers.items():
        out.append(_field(4, _field(1, number) + _field(4, _field(1, number))))
        name = symbol = _label(function)
        if function.kind == _profile.PYTHON:
            # Readers demangle a name that is its own symbol: "<module>" would lose its template arguments.
            name, symbol = function.name, f"py::{function.name}:{function.file}"
        out.append(_field(5, _field(1, number) + _field(2, string(name)) + _field(3, string(symbol))
                          + _field(4, string(function.file))))
    times = [path.sample.time_ns for path in profile.paths]
    out += [_field(10, max(times) - min(times)), _field(11, unit), _field(12, profile.weight // len(profile.paths))]
    # Readers refuse a string that is no UTF-8.
    out += [_field(6, text.encode(errors="replace")) for text in strings]
    return gzip.compress(b"".join(out), mtime=0)
