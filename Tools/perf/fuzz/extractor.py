"""Targets: the extractor of unwind data, the headers it made, and the table."""

import collections
import functools
import os
import re
import struct
import subprocess
import sys

from hypothesis import strategies as st

from common import NUMBERS, damage, damage_text, one_of, scratch, target, write
import oracle
from oracle import demand

import archs
import eh_frame
import gen_eh_frame as gen

ARCHS = archs.load()
BYTEORDER = {"<": "little", ">": "big"}

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
