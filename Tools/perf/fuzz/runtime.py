"""Targets: the names that the runtime writes, and its filter."""

import contextlib
import itertools
import operator
import os
import re
import sys

from hypothesis import strategies as st

from common import in_child, target, write
import oracle
from oracle import Unsound, demand

import jitdump
import perf_trampoline

LETTERS = st.characters(blacklist_categories=()) | st.sampled_from("\n\0\r;\\:x/ \x7f\x85\u2028\ud800\udc80\udcff")
LONG = st.builds(operator.mul, st.text(LETTERS, max_size=8), st.sampled_from([1] * 6 + [500, 700, 2000, 9000]))
FUNCTIONS = st.lists(st.tuples(LONG, LONG | st.sampled_from(["\udcff", "", "/x.py"]), st.integers(0, 1 << 17) | st.sampled_from([0x7fffffff])), min_size=1, max_size=12)


def letters(text):
    """The text's characters, each as a name shows it."""
    for letter in text:
        number = ord(letter)
        if 0xdc80 <= number <= 0xdcff:
            yield f"\\x{number - 0xdc00:02x}"
        elif number < 0x20 or number == 0x7f or letter in ";\\":
            yield f"\\x{number:02x}"
        elif number < 0xa0 and number > 0x7f or number in (0x2028, 0x2029) or 0xd800 <= number <= 0xdfff:
            yield f"\\u{number:04x}"
        else:
            yield letter


CERTAIN = 4000      # bytes of either half are never left out


def stands_for(name, qualname, filename):
    """Is it py::QUALNAME:FILE, of which a long QUALNAME lacks its end and a long FILE its beginning?"""
    if not name.startswith("py::") or len(name.encode()) > 8192:
        return False
    heads, tails = list(letters(qualname)), list(letters(filename))
    head, tail = "".join(heads), "".join(tails)
    head_ends = {0, *itertools.accumulate(map(len, heads))}
    tail_sizes = {0, *itertools.accumulate(map(len, reversed(tails)))}
    for match in re.finditer(":", name[4:]):
        first, last = name[4:4 + match.start()], name[4 + match.end():]
        if (len(first) in head_ends and len(last) in tail_sizes and head.startswith(first) and tail.endswith(last)
                and (first == head or len(first.encode()) >= CERTAIN) and (last == tail or len(last.encode()) >= CERTAIN)):
            return True
    return False


@target(st.tuples(st.sampled_from(["perf", "perf_jit", "perf_elf"]), FUNCTIONS), 20)
def names(example):
    backend, functions = example
    status, data = in_child(backend, functions)
    demand(status == 0, f"status {status}")
    functions = list(dict.fromkeys(functions))
    if backend == "perf":
        demand(data.endswith(b"\n"), "the last line has no end")
        lines = [line for line in data.decode().split("\n") if line]
        demand(all(re.fullmatch(r"[0-9a-f]+ [0-9a-f]+ [^\0- \x7f-\x9f;\u2028\u2029]( *[^\0-\x1f\x7f-\x9f;\u2028\u2029])*", line)
                   for line in lines), "a line that is none")
        found = [line.split(" ", 2)[2] for line in lines]
    elif backend == "perf_jit":
        header, records = jitdump.read(write("real.dump", data))
        oracle.check_dump(data, header, records)
        demand([type(record).__name__ for record in records] == ["CodeUnwindingInfo", "CodeDebugInfo", "CodeLoad"] * len(functions),
               "records")
        found = [record.name for record in records[2::3]]
        for record, unwinding, (_, filename, line) in zip(records[1::3], records[::3], functions):
            demand(record.entries[0].lineno == line, f"line {record.entries[0].lineno}, not {line}")
            check_path(record.entries[0].name, filename)
            oracle.cfi(unwinding.eh_frame, sys.byteorder)
    else:
        found = [name.decode() for _, name in sorted(oracle.symbols(data).items())]
    demand(len(found) == len(functions), f"{len(found)} names of {len(functions)} functions")
    for name, (qualname, filename, _) in zip(found, functions):
        demand(stands_for(name, qualname, filename), f"{name!r} of {qualname!r} in {filename!r}")
    return True


def check_path(path, filename):
    """The path is that of the file system, where there can be such a file."""
    try:
        raw = os.fsencode(filename)
    except UnicodeEncodeError:
        return
    if b"\0" not in raw and len(raw) < CERTAIN and raw != b"\xff":
        demand(path.encode("utf-8", "surrogateescape") == raw, f"path {path!r} of {filename!r}")


PATTERN = st.text(st.sampled_from("ab.*?[]!^-\\/,: \t") | st.characters(min_codepoint=1, blacklist_categories=["Cs"]), max_size=10) | st.sampled_from(
    ["app", "!app.tests", "/srv/app", "*/views.py", "[!a]*", "l?b", "[[:alpha:]]*", "\\[a", "[\\]]*", "[\\]", "[]a]pp", "[]", "a" * 9000, "[a b]"])
MODULES = [("app", "/srv/app/__init__.py"), ("app.views", "/srv/app/views.py"), ("application", "/srv/application.py"), ("b", "/a"),
           ("a.b", "b/a"), ("lib", "/usr/lib/x/lib.py"), ("a", "a"), ("[a", "[/]"), ("ab]", "/a-b^!")]


@target(st.tuples(st.lists(PATTERN, max_size=4).map(",".join), st.sampled_from([False] * 9 + [True])), 100)
def filter(example):
    patterns, is_used = example
    try:
        oracle.wellformed(patterns)
    except Unsound as unsound:
        try:
            perf_trampoline.set_filter(patterns)
        except ValueError as error:
            demand(not re.search(r"[\0-\x1f\x7f]", str(error)), "not one line")
            return False
        raise unsound
    perf_trampoline.set_filter(patterns)
    if is_used:
        functions = [(f"number_{i}", path, 1, module) for i, (module, path) in enumerate(MODULES)]
        status, data = in_child("perf", functions, patterns)
        demand(status == 0, f"status {status}")
        found = {int(number) for number in re.findall(r"py::number_(\d+):", data.decode())}
        with contextlib.suppress(re.error):     # a range that is none
            wanted = {i for i, (module, path) in enumerate(MODULES) if oracle.wants(patterns, module, path)}
            demand(found == wanted, f"{found}, not {wanted}")
    return True
