#!/usr/bin/env python3
"""Damage what our readers read and our writers are given, and see what they make of it: `make fuzz [SECONDS=600]`.

    build/python Tools/perf/fuzz/fuzz.py --seconds 60 [--seed N] [TARGET ...]

A target takes examples from Hypothesis. What a reader accepts must be what a decoder of our own, oracle.py, finds in the
same bytes, and nothing that it finds unsound. What it refuses, it refuses in its own words: another exception, no answer
for long or a gigabyte of memory is a fault. The first fault ends its target; Hypothesis has made the example small.

The targets share the time, in rounds of some dozen examples. The last lines are the numbers of examples, and of those
refused. `--seed N TARGET`, with the number beside a fault, begins with it.
"""

import argparse
import collections
import contextlib
import functools
import glob
import gzip
import io
import itertools
import json
import operator
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest.mock
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import oracle
from oracle import Unsound, demand

import archs
import eh_frame
import gen_eh_frame as gen
import jitdump
import perf_trampoline
from perf_trampoline import _clean, _command_line, _flamegraph, _interpreter, attaching, images, perf_script

MEMORY = 1 << 30
PATIENCE = 20       # seconds for one example, on a machine that has much else to do

ARCHS = archs.load()
BYTEORDER = {"<": "little", ">": "big"}
TARGETS = {}
outcomes = collections.defaultdict(collections.Counter)


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


# --- The extractor ---

Good = collections.namedtuple("Good", "arch data elf places frame found")


@functools.cache
def objects():
    """An object for each architecture, where the fields in it are that decide, and what both sides find in it."""
    good = []
    for arch in ARCHS.values():
        try:
            path = scratch() / f"{arch.name}.o"
            gen.assemble(arch, gen.ROOT, os.environ.get("CC") or "cc", None, path)
        except archs.Refusal as refusal:
            print(f"without {arch.name}: {refusal}", file=sys.stderr)
            continue
        data = path.read_bytes()
        elf = oracle.Elf(data)
        places = [5, 16, 18, 20, 40, 48, 58, 60, 62]
        for i, section in enumerate(elf.sections):
            if section.size:
                places += [elf.table + 64 * i + at for at in (0, 4, 8, 24, 32, 40, 44, 48, 56)]
            if section.name in (b".eh_frame", b".rela.eh_frame"):
                places += range(section.offset, section.offset + section.size)
            elif section.name == b".symtab":
                places += [section.offset + 24 * number + at for number, symbol in enumerate(elf.symbols(i))
                           if symbol.name.startswith(b"_Py") for at in (0, 4, 5, 6, 8, 16) * 12]
        good.append(Good(arch, data, elf, places, eh_frame.read_object(path).eh_frame, oracle.trampoline(data)))
    return good


def leb(number, signed=False, padding=0):
    out = []
    while True:
        byte, number = number & 127, number >> 7
        done = number == 0 if not signed else number == -(byte >> 6 & 1)
        out.append(byte)
        if done:
            break
    out += [0x7f if signed and out[-1] & 64 else 0] * padding
    return bytes([byte | 128 for byte in out[:-1]] + out[-1:])


LEB = st.builds(leb, st.integers(0, 40) | NUMBERS | st.just(1 << 70), st.just(False), st.integers(0, 2))
SIGNED = st.builds(leb, st.integers(-20, 20) | NUMBERS | st.just(-1 << 70), st.just(True), st.integers(0, 2))


def instruction(opcode, *operands):
    return b"".join([bytes([opcode]), *operands])


INSTRUCTIONS = st.one_of(
    st.builds(instruction, st.integers(0x40, 0x7f) | st.integers(0xc0, 0xff)),
    st.builds(instruction, st.integers(0x80, 0xbf) | st.sampled_from([2, 3, 4, 6, 7, 8, 0x0d, 0x0e, 0x0a]), LEB),
    st.builds(instruction, st.sampled_from([5, 9, 0x0c, 0x11, 0x14, 0x15]), LEB, LEB | SIGNED),
    st.binary(max_size=3))


def frames(draw, frame, address_range, order):
    """An .eh_frame from the fields of a good one: one of them another, or some instructions, or whatever; size of the CIE."""
    kind = draw(st.sampled_from(["field", "instructions", "whatever"]))
    left = draw(st.integers(0, 15))     # fields before the other one

    def this(good, other):
        nonlocal left
        left -= 1
        is_other = left == -1 if kind == "field" else kind == "whatever" and draw(st.integers(0, 7)) == 7
        return draw(other) if is_other else good

    number = functools.partial(int.to_bytes, length=4, byteorder=order)
    fields = [piece for piece, _ in frame.fields]
    at = next(i for i, (_, what) in enumerate(frame.fields) if what.startswith("FDE: length"))
    cie, fde = fields[2:at], fields[at + 2:]
    alternatives = [st.sampled_from([b"\0", b"\2", b"\3", b"\4", b"\xff"]), st.sampled_from([b"zR\0", b"\0", b"zPLR\0", b"zRS\0", b"eh\0", b"z"]),
                    LEB, SIGNED, LEB, LEB, st.sampled_from([b"\x1b", b"\0", b"\xff", b"\x1c"])]
    cie[:7] = [this(good, other) for good, other in zip(cie, alternatives)]
    fde[1:3] = number(max(address_range + this(0, st.integers(-8, 8)), 0)), this(fde[2], LEB)
    for entry, begin in (cie, 7), (fde, 3):
        for _ in range(0 if kind == "field" else draw(st.integers(0, 2))):
            where = draw(st.integers(begin, len(entry)))
            entry[where:where + draw(st.integers(0, 2))] = draw(st.lists(INSTRUCTIONS, max_size=2))
    cie, fde = b"".join(cie), b"".join(fde)
    cie += bytes(this(-len(cie) % 4, st.integers(0, 9)))
    fde += bytes(this(-len(fde) % 4, st.integers(0, 9)))
    wrong = st.integers(-8, 8)
    entries = [number(max(4 + len(cie) + this(0, wrong), 0)) + this(bytes(4), st.binary(min_size=4, max_size=4)) + cie]
    entries += [number(max(4 + len(fde) + this(0, wrong), 0)) + number(max(len(entries[0]) + 4 + this(0, wrong), 0)) + fde]
    return len(entries[0]), b"".join(this(entries, st.lists(st.sampled_from([*entries, bytes(4), number(0xffffffff)]), max_size=4)))


@st.composite
def damaged_objects(draw):
    good = one_of(draw, objects())
    data, elf = good.data, good.elf
    if draw(st.booleans()):
        cie_size, other = frames(draw, good.frame, good.found.cfi.address_range, BYTEORDER[elf.order])
        header = elf.table + 64 * elf.index(b".eh_frame", [oracle.PROGBITS]) + 24
        data = data[:header] + struct.pack(elf.order + "QQ", len(data), len(other)) + data[header + 16:] + other
        relocations = elf.sections[elf.index(b".rela.eh_frame", [oracle.RELA])]
        for at in range(relocations.offset, relocations.offset + relocations.size, 24):
            offset, = struct.unpack_from(elf.order + "Q", data, at)
            data = data[:at] + struct.pack(elf.order + "Q", offset + cie_size - good.frame.cie_size) + data[at + 8:]
        return good.arch.name, data
    return good.arch.name, damage(draw, data, good.places)


def steps(rows):
    changes = []
    for row in rows:
        oracle.step(changes, (row.offset, *row.cfa, dict(row.registers)))
    return changes


def agree(trampoline, found):
    """Does the extractor say what our own decoder says?"""
    frame = trampoline.eh_frame
    demand((trampoline.machine, trampoline.flags, trampoline.elf_class, trampoline.elf_data, trampoline.code) == found[:5],
           "header or code")
    demand((frame.ra_column, frame.initial_location_offset, frame.address_range_offset) == found.cfi[1:4], "fields")
    demand(steps(frame.rows) == found.cfi.changes, f"rows {frame.rows}, not {found.cfi.changes}")
    demand(oracle.cfi(frame.template, {1: "little", 2: "big"}[found.elf_data]) == found.cfi._replace(address_range=0), "the template says something else")
    demand(not any(frame.template[found.cfi.location_offset:found.cfi.range_offset + 4]), "the template is not zeroed")


@target(damaged_objects())
def object(example):
    arch, data = ARCHS[example[0]], example[1]
    path = write("damaged.o", data)
    try:
        trampoline = eh_frame.read_object(path)
        eh_frame.check(trampoline, arch)
        gen.header(trampoline, arch)
    except archs.Refusal:
        return False
    found = oracle.trampoline(data)
    agree(trampoline, found)
    demand((found.cfi.ra_column, "r%d%+d" % found.cfi.changes[0][1:3]) == (arch.ra_column, arch.entry_cfa), "the table")
    good = next(good.found for good in objects() if good.arch == arch)
    try:
        gen.check_header(trampoline, arch, gen.ROOT)
    except archs.Refusal:
        return True
    demand((found.machine, found.code, found.cfi.ra_column, found.cfi.changes)
           == (good.machine, good.code, good.cfi.ra_column, good.cfi.changes), "called fresh, and is another trampoline")
    return True


WORDS = ["0x14,", "0xzz,", "0x1,", "#define PERF_TRAMPOLINE_E_MACHINE 3\n", "#if 0\n", "#endif\n", "};", "//", "0x"]


def compiled(path):
    """What C makes of a header: its constants, code and CFI."""
    done = subprocess.run(["cc", "-E", "-P", "-dD", "-undef", path], capture_output=True, text=True)
    demand(done.returncode == 0, done.stderr)
    code, frame, *records = [bytes(int(byte, 16) for byte in re.findall(r"0x(..)\b", body))
                             for body in re.findall(r"\{([^}]*)\}", done.stdout)]
    constants = dict(re.findall(r"#define PERF_TRAMPOLINE_(\w+) (.*)", done.stdout))
    found = oracle.cfi(frame, {"1": "little", "2": "big"}[constants["ELF_DATA"]])
    demand([int(constants[name]) for name in ("INITIAL_LOCATION_OFFSET", "ADDRESS_RANGE_OFFSET")] == list(found[2:4]), "offsets")
    return [constants[name] for name in gen.COMPARED], code, records, found.ra_column, found.changes


@st.composite
def damaged_headers(draw):
    arch = one_of(draw, list(ARCHS.values()))
    return arch.name, damage_text(draw, (gen.ROOT / arch.header).read_text(), WORDS)


@target(damaged_headers())
def header(example):
    arch, data = ARCHS[example[0]], example[1]
    path = write("damaged.h", data)
    golden = gen.ROOT / f"Lib/test/perfdata/rows_{arch.name}.txt"
    if gen.read_header(path, arch)[1] != golden.read_text():
        return False
    demand(compiled(path) == compiled(gen.ROOT / arch.header), "called fresh, and C makes something else of it")
    return True


@st.composite
def damaged_tables(draw):
    return damage_text(draw, archs.TABLE.read_text(),
                       ["x0-x999999999=1", "=", ",", "^", "@", "r1+0", "+", "aarch64", "tested", "#"])


@target(damaged_tables())
def table(data):
    path = write("archs.txt", data)
    try:
        found = archs.load(path)
    except archs.Refusal:
        return False
    columns = list(archs.Arch.__dataclass_fields__)
    lines = oracle.table(data.decode(errors="surrogateescape"), columns)
    demand([arch.name for arch in found.values()] == [words[0] for words in lines], "lines")
    for arch, words in zip(found.values(), lines):
        demand(all(str(getattr(arch, column)) == word for column, word in zip(columns, words)
                   if isinstance(getattr(arch, column), (str, int))), "words")
    return True


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


# --- The runtime ---

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


# --- Rounds ---

def run_round(name, number):
    strategy, size, function = TARGETS[name]

    def body(example):
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            outcomes[name][function(example)] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    body.__qualname__ = body.__name__ = name
    check = given(strategy)(body)
    check = settings(max_examples=size, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                     phases=[Phase.generate, Phase.shrink])(check)
    seed(number)(check)()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", default=list(TARGETS), help=" ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()

    def hang(*_):
        raise Hang(f"no answer for {PATIENCE} seconds")

    signal.signal(signal.SIGALRM, hang)
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory + MEMORY, memory + MEMORY))
    spent, faulty = dict.fromkeys(options.targets, 0.0), []
    end = time.monotonic() + options.seconds
    print(f"seed {options.seed}", flush=True)
    for number in itertools.count(options.seed):
        going = {name: seconds for name, seconds in spent.items() if name not in faulty}
        begin = time.monotonic()
        if not going or begin >= end and all(going.values()):
            break
        name = min(going, key=going.get)        # the one that has had least
        try:
            run_round(name, number)
        except Exception:
            traceback.print_exc()
            print(f"{name}, seed {number}: a fault; what was read last is in {scratch()}", file=sys.stderr)
            faulty.append(name)
        spent[name] += time.monotonic() - begin
    if not faulty:
        shutil.rmtree(scratch())
    for name, seconds in spent.items():
        print(f"{name:10} {sum(outcomes[name].values()):8} examples  {outcomes[name][False]:8} refused  {seconds:6.1f} s"
              f"{'  A FAULT' if name in faulty else ''}")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
