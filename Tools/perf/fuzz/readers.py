"""Targets: what reads files, other programs and other processes."""

import collections
import contextlib
import functools
import gzip
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import types
import unittest.mock
from pathlib import Path

from hypothesis import strategies as st

from common import damage, damage_text, in_child, one_of, scratch, target, write
import oracle
from oracle import demand

import archs
import jitdump
from perf_trampoline import _clean, _command_line, _flamegraph, _interpreter, attaching, images, perf_script

# --- Jitdumps ---

@functools.cache
def dumps():
    """One that this machine writes, and one with each record there is, of the other byte order."""
    real = in_child("perf_jit", [("f", "/x.py", 3), ("größe\n", "\udcff", 70000)])[1]
    other = [struct.pack(">IIIIIIQQ", 0x4A695444, 1, 40, 22, 0, 1000, 5, 0)]
    for id, body in ((4, struct.pack(">QQQ", 14, 6, 16) + b"eh_frameheader\0\0"),
                     (2, struct.pack(">QQQII", 0x7000, 2, 0x7000, 3, 0) + b"/x.py\0" + struct.pack(">QII", 0x7001, 4, 0) + b"\xff\0"),
                     (0, struct.pack(">IIQQQQ", 1000, 1001, 0x7000, 0x7000, 4, 9) + b"py::\xff\0code"),
                     (1, struct.pack(">IIQQQQQ", 1000, 1001, 0x7000, 0x7000, 0x8000, 4, 9)), (3, b"")):
        other.append(struct.pack(">IIQ", id, 16 + len(body), 7) + body)
    found = []
    for data in real.rstrip(b"\0") + bytes(-len(real.rstrip(b"\0")) % 8), b"".join(other):
        places = [*range(0, 40, 4)]
        for record in jitdump.read(write("good.dump", data))[1]:
            places += [*range(record.offset, record.offset + 64, 4), record.offset + record.total_size - 1]
        found.append((data, [place for place in places if place < len(data)]))
    return found


@st.composite
def damaged_dumps(draw):
    return damage(draw, *one_of(draw, dumps()))


@target(damaged_dumps())
def dump(data):
    path = write("damaged.dump", data)
    try:
        header, records = jitdump.read(path)
    except jitdump.JitdumpError:
        return False
    oracle.check_dump(data, header, records)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(archs.Refusal):
        jitdump.main(path)
    return True


# --- The command line ---

LINE = st.text(st.characters(min_codepoint=1, blacklist_characters="\t\n", blacklist_categories=["Cs"])
               | st.sampled_from("\r\udcff()"), max_size=12).map(str.strip)
SYMBOL = st.sampled_from(["py::f:/x/app.py", "py::le;af:/a b/(c)/__init__.py", "_PyEval_EvalFrameDefault", "main", "_start", "[unknown]",
                          "operator()(int) const", "a (b) (c", "py::"]) | LINE
FILE = st.sampled_from(["/usr/lib/libc.so.6", "/usr/bin/python3.11", "[kernel.kallsyms]", "[unknown]", "/tmp/x (deleted)",
                        "/a (1)/b", "/tmp/python-perf-0/1-1-0.so"])
SAMPLES = st.lists(st.tuples(
    st.sampled_from(["python", "py th", "a;b", "", "x 1/2 y:"]) | LINE,
    st.integers(-1, 1 << 22), st.integers(-1, 1 << 22), st.integers(0, 1 << 62), st.integers(0, (1 << 63) - 1),
    st.sampled_from(["cpu-clock:u", "cycles"]),
    st.lists(st.tuples(st.integers(0, (1 << 64) - 1), SYMBOL, FILE), max_size=6)), min_size=1, max_size=5)


def printed(samples):
    """As perf script prints them."""
    text = ""
    for comm, pid, tid, time_ns, period, event, stack in samples:
        text += f"{comm:>16} {pid:5}/{tid:<5} {time_ns // 10 ** 9:5}.{time_ns % 10 ** 9:09}: {period:10} {event}: "
        text += "\n" + "".join(f"\t{ip:16x} {sym} ({dso})\n" for ip, sym, dso in stack) + "\n" * bool(stack)
    return text.encode("utf-8", "surrogateescape")


COMMANDS = st.sampled_from([
    ["report"], ["report", "--by", "function"], ["report", "--by", "file", "--sort", "total"], ["report", "--by", "module"],
    ["report", "--json"], ["report", "--diff"], ["report", "--interpreter", "--min", "0"], ["report", "--no-native", "--min", "0"],
    *(["flamegraph", "-o-", "--format", form] for form in ("folded", "speedscope", "firefox", "pprof", "html"))])


def run_cli(arguments):
    """Status, standard output as bytes, and what it says."""
    out, said = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        status = _command_line.main(arguments)
    return status, out.buffer.getvalue(), said.buffer.getvalue().decode()


def varints(data):
    reader = oracle.Bytes(data, "little")
    while reader.at < len(data):
        yield reader.leb()


def proto(data):
    """The fields of a protocol buffer's message: {number: [integers and bytes]}."""
    found, reader = collections.defaultdict(list), oracle.Bytes(data, "little")
    while reader.at < len(data):
        key, value = reader.leb(), reader.leb()
        if key & 7 == 2:
            reader.at += value
            demand(reader.at <= len(data), "cut short")
            value = data[reader.at - value:reader.at]
        found[key >> 3].append(value)
    return found


def check_output(form, data, weight):
    """The output is whole by its own format, and all the weight is in it, if that is known."""
    if form in ("report", "html"):
        text = data.decode()
        if form == "report":
            demand(all(letter.isprintable() or letter == "\n" for letter in text), "what moves the terminal")
            return
        page = re.search(r'(?s)<script id="profile"[^>]*>([^<]*)</script>', text)
        demand(page, "no data in the page")
        found = json.loads(page[1])["tree"][1]
    elif form == "json":
        json.loads(data)
        return
    elif form == "folded":
        lines = data.decode("utf-8", "surrogateescape").splitlines()
        demand(all(re.fullmatch(r"[^;]+(;[^;]*)+ \d+", line) for line in lines), "a line that is no stack")
        found = sum(int(line.rpartition(" ")[2]) for line in lines)
    elif form == "speedscope":
        profile = json.loads(data)
        frames = len(profile["shared"]["frames"])
        for one in profile["profiles"]:
            demand(len(one["samples"]) == len(one["weights"]), "weights")
            demand(all(frame < frames for stack in one["samples"] for frame in stack), "frames")
        found = sum(sum(one["weights"]) for one in profile["profiles"])
    elif form == "firefox":
        for thread in json.loads(data)["threads"]:
            for prefix, frame in thread["stackTable"]["data"]:
                demand(frame < len(thread["frameTable"]["data"]), "frames")
            demand(all(row[0] < len(thread["stringTable"]) for row in thread["frameTable"]["data"]), "strings")
        return
    elif form == "pprof":
        profile = proto(gzip.decompress(data))
        strings = [text.decode() for text in profile[6]]
        demand(strings[0] == "", "strings")
        found = 0
        for sample in map(proto, profile[2]):
            values = list(varints(sample[2][0]))
            demand(len(values) == 2 == len(profile[1]), "values")
            found += values[1]
            for label in map(proto, sample[3]):
                demand(max(label[1] + label[2]) < len(strings), "labels")
    demand(weight in (None, found), f"weighs {found}, not {weight}")


@functools.cache
def perf():
    """A perf that prints what we want."""
    path = write("perf", f"#!/bin/sh\ncase $1 in evlist) echo STACK_USER;; *) cat {scratch()}/printed;; esac\n".encode())
    path.chmod(0o755)
    write("perf.data", b"")
    return str(path)


@st.composite
def damaged_scripts(draw):
    samples = draw(SAMPLES)
    return draw(COMMANDS), samples, damage(draw, printed(samples)) if draw(st.booleans()) else None


@target(damaged_scripts(), 20)
def script(example):
    command, samples, data = example
    write("printed", printed(samples) if data is None else data)
    if data is None:
        found = [(sample.comm, *sample[:3], sample.period, sample.event, [tuple(frame) for frame in sample.stack])
                 for sample in perf_script.samples("perf.data", [perf()])]
        demand(found == [(*sample[:6], list(sample[6])) for sample in samples], f"read as {found}")
    form = command[-1] if command[0] == "flamegraph" else "json" if "--json" in command else "report"
    recording = str(scratch() / "perf.data")
    if "--diff" in command:
        command = [*command, recording, recording]
    else:
        command = [*command, "-i", recording]
    viewer = {name: "" for name in _flamegraph.VIEWER}
    with unittest.mock.patch.object(_flamegraph, "viewer", lambda: viewer):
        status, out, said = run_cli([*command, "--perf", perf()])
    if status == 1:
        demand("has no samples" in said and said.count("\n") == 1, said)
        return False
    demand((status, said) == (0, ""), said)
    is_known = data is None and len({sample[5] for sample in samples}) == 1
    check_output(form, out, sum(sample[4] for sample in samples) if is_known else None)
    return True


NUMBER = st.sampled_from(["4194305", "4194306", "1", "٣", "007", "-4194305", "9" * 60, "", "4194305 ", "+4194305"])
NAME = st.builds(str.format, st.sampled_from(
    ["perf-{}.map", "jit-{}.dump", "jitted-{}-1.so", "{}-1-18ec.so", "{}-2-0.new"] * 4
    + ["perf-{}.map\n", "Perf-{}.map", "{}-1-18EC.so", "{}-١-1.so", "jitted-{}-١.so", "jitted-{}.so", "{}-1.so", "{}-1-1.so.new"]),
    st.just("4194305") | NUMBER)
CONTENT = st.builds("".join, st.tuples(
    st.sampled_from(["", "\x7fELF", "DTiJ", "JiTD", "7f00 20 ", "\0" * 64]), st.sampled_from(["", "x", "\0", "." * (1 << 16)]),
    st.sampled_from(["", "py::f:/x.py\n", "LazyCompile:~f\n"]))).map(str.encode)
FILES = st.dictionaries(st.tuples(st.sampled_from(["", "images/"]), NAME),
                        st.tuples(st.sampled_from(["file"] * 5 + ["link", "pipe", "directory"]), CONTENT), max_size=5)


def is_ours(folder, name, kind, data):
    """Did a process that has ended leave it, and may it go?"""
    match = re.fullmatch(r"perf-(?P<map>[0-9]+)\.map|jit-(?P<dump>[0-9]+)\.dump|jitted-(?P<so>[0-9]+)-[0-9]+\.so"
                         if not folder else r"(?P<image>[0-9]+)-[0-9]+-[0-9a-f]+\.(?:so|new)", name)
    if kind != "file" or not match:
        return False
    which, number = match.lastgroup, match[match.lastgroup]
    if number == "1" or number != str(int(number)):
        return False
    if folder:
        return data.startswith(b"\x7fELF") or not data.strip(b"\0")
    magic = {"map": b"", "dump": b"DTiJ" if sys.byteorder == "little" else b"JiTD", "so": b"\x7fELF"}[which]
    return data.startswith(magic) and b"py::" in data[:1 << 16]


mapped_files = functools.cache(images.mapped_files)


@target(FILES)
def files(example):
    tmp = scratch() / "tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    (tmp / "images").mkdir(parents=True)
    expected = set()
    for (folder, name), (kind, data) in example.items():
        path = f"{tmp}/{folder}{name}"
        if kind == "link":
            Path(f"{tmp}/../linked").write_bytes(data)
            os.symlink("../linked", path)
        else:
            {"file": Path.write_bytes, "pipe": os.mkfifo, "directory": os.mkdir}[kind](Path(path), *[data] * (kind == "file"))
        if is_ours(folder, name, kind, data):
            expected.add(path)
    with unittest.mock.patch.dict(os.environ, {"PERF_TRAMPOLINE_DIR": str(tmp / "images")}), \
         unittest.mock.patch.object(images, "mapped_files", mapped_files):
        removed = _clean.remove(_clean.left(os.geteuid(), tmp=str(tmp)))
    demand({file["path"] for file in removed} == expected, f"removed {removed}")
    demand(len(os.listdir(tmp)) + len(os.listdir(tmp / "images")) == 1 + len(example) - len(expected), "what is left")
    return bool(expected)


# --- What other processes say ---

ANSWER = {"error": None, "named": 3, "status": {"active": True, "backend": "perf_elf", "files": ["/x"], "failure": None}}
DESCRIPTION = ("cpython", (3, 12), ".cpython-312-x86_64-linux-gnu.so", "/x")
FACTS = {"executable": "/x", "version": "3.12.1", "implementation": "cpython", "suffix": ".so", "architecture": "x86_64",
         "flags": "", "free_threaded": False, "status": {"active": True, "unavailable": None, "failure": None, "files": []}}
LITERALS = ["None", "True", "[]", "{}", "()", "''", "3", "1e999", "-1", "9" * 5000, "(" * 300, "[" * 100_000, "{'a'}", "\\ud800",
            "'", "null", "true", "{", "-" * 50_000]


@st.composite
def damaged_answers(draw):
    kind, text = one_of(draw, [("reply", repr(ANSWER)), ("description", repr(DESCRIPTION)), ("facts", json.dumps(FACTS))])
    return kind, damage_text(draw, one_of(draw, [text] * 9 + LITERALS), LITERALS)


@target(damaged_answers())
def answers(example):
    kind, data = example
    text = data.decode(errors="replace")
    done = subprocess.CompletedProcess([], 0, text, "")
    if kind == "reply":
        try:
            answer = attaching._read(types.SimpleNamespace(pid=1), write("reply", data))
        except attaching.AttachError:
            return False
        demand(answer["error"] is None and isinstance(answer["named"], int) and "backend" in answer["status"], "answer")
    elif kind == "description":
        process = attaching._Target.__new__(attaching._Target)
        process.pid, process.command, process.program = 1, ["python"], "/usr/bin/python3.12"
        try:
            with unittest.mock.patch.object(attaching._Target, "run", lambda *_: done):
                process._ask_interpreter()
        except attaching.AttachError:
            return False
        demand(process.version >= (3, 11) and isinstance(process.suffix, str), "version")
        demand(process.found is None or isinstance(process.found, str), "found")
        return process.command is not None
    else:
        try:
            with unittest.mock.patch("subprocess.run", lambda *_, **__: done), unittest.mock.patch("os.unlink"):
                facts, _ = _interpreter._probe("/x", {})
        except _interpreter.Unusable:
            return False
        demand(set(FACTS) <= set(facts), "facts")
        for name, value in FACTS.items():
            demand(isinstance(facts[name], type(value)) or name == "status" and facts[name] is None, name)
    return True


@functools.cache
def program():
    with open("/proc/self/exe", "rb") as file:
        return file.read(1024)


@st.composite
def damaged_programs(draw):
    return damage(draw, program(), [*range(64), *range(64, 400, 8)])


@target(damaged_programs())
def segments(data):
    write("program", data)
    process = attaching._Target.__new__(attaching._Target)
    process.proc, process.program, process.base = str(scratch()), "/program", 1 << 40
    (scratch() / "root").exists() or (scratch() / "root").symlink_to(".")
    try:
        bias = process.bias()
    except attaching.AttachError:
        return False
    demand(data[:5] == b"\x7fELF\2" and data[5] in (1, 2), "no ELF of 64 bits")
    order = "<" if data[5] == 1 else ">"
    start, = struct.unpack_from(order + "Q", data, 32)
    size, count = struct.unpack_from(order + "HH", data, 54)
    demand(size == 56, "size of a program header")
    for at in range(start, start + size * count, size):
        kind, _, offset, address = struct.unpack_from(order + "IIQQ", data, at)
        if (kind, offset) == (1, 0):
            break
    demand((kind, offset) == (1, 0) and bias == (1 << 40) - address, "another segment")
    return True
