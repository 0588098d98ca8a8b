"""What the fuzzers compare with: decoders of their own, from the standards, that share nothing with the readers they judge.

    trampoline(data)            an object      -> Trampoline; Unsound unless it is one trampoline and nothing else
    cfi(eh_frame, order)        one CIE, one FDE -> Cfi
    dump(header, records)       what was read of a jitdump -> the bytes that it stands for
    symbols(image)              an ELF image   -> {address: name} of what its dynamic symbol table defines
    table_line(words)           a line of archs.txt may say this
    wellformed(filter), wants(filter, module, path)

System V ABI (ELF-64), DWARF 5 section 6.4, Linux Standard Base Core 10.6.1, perf's jitdump-specification.txt, fnmatch(3).
"""

import collections
import re
import struct

Cfi = collections.namedtuple("Cfi", "version ra_column location_offset range_offset address_range changes end")
Trampoline = collections.namedtuple("Trampoline", "machine flags elf_class elf_data code cfi")
Section = collections.namedtuple("Section", "name type flags address offset size link info align entry_size data")
Symbol = collections.namedtuple("Symbol", "name info other section value size")

PROGBITS, SYMTAB, RELA, REL, DYNSYM = 1, 2, 4, 9, 11


class Unsound(Exception):
    """Nobody should accept this."""


def demand(condition, reason):
    if not condition:
        raise Unsound(reason)


# --- DWARF ---

class Bytes:
    def __init__(self, data, order, at=0):
        self.data, self.order, self.at = data, order, at

    def number(self, size, signed=False):
        demand(self.at + size <= len(self.data), "cut short")
        self.at += size
        return int.from_bytes(self.data[self.at - size:self.at], self.order, signed=signed)

    def leb(self, signed=False):
        value = shift = 0
        while True:
            byte = self.number(1)
            value += (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if signed and byte & 64:
            value -= 1 << shift
        demand(-2 ** 63 <= value < 2 ** 63 if signed else value < 2 ** 64, "a number of more than 64 bits")
        return value


def cfi(data, order):
    """`changes`: (offset, CFA register, CFA offset, {register: offset from the CFA}) where any of them changes."""
    demand(len(data) % 4 == 0, "length")
    cie_size = Bytes(data, order).number(4)
    fde = Bytes(data, order, 4 + cie_size)
    demand(fde.number(4) == len(data) - cie_size - 8, "not one CIE and one FDE that fill the section")
    demand(fde.number(4) == cie_size + 8, "the FDE is not this CIE's")
    cie = Bytes(data[:4 + cie_size], order, 4)
    demand(cie.number(4) == 0, "no CIE first")
    version = cie.number(1)
    demand(version in (1, 3), "version")
    demand(cie.number(3) == int.from_bytes(b"zR\0", order), "augmentation")
    code_factor, data_factor = cie.leb(), cie.leb(signed=True)
    ra_column = cie.number(1) if version == 1 else cie.leb()
    demand((cie.leb(), cie.number(1)) == (1, 0x1b), "augmentation data")
    location_offset = fde.at
    fde.number(4)
    range_offset = fde.at
    address_range = fde.number(4)
    demand(fde.leb() == 0, "augmentation data of the FDE")

    state, first, pc, changes = [None, None, {}], {}, 0, []
    for entry in cie, fde:
        if entry is fde:
            first = dict(state[2])
            changes.append((0, *state[:2], dict(state[2])))
        while entry.at < len(entry.data):
            opcode = entry.number(1)
            high, low = opcode & 0xc0, opcode & 0x3f
            if high == 0x40 or opcode == 2:
                demand(entry is fde, "a row in the CIE")
                pc += (low if high else entry.number(1)) * code_factor
            elif high == 0x80:
                state[2][low] = entry.leb() * data_factor
            elif opcode in (5, 0x11):
                register = entry.leb()
                state[2][register] = entry.leb(signed=opcode == 0x11) * data_factor
            elif high == 0xc0 or opcode == 6:
                demand(entry is fde, "restored before the start")
                register = low if high else entry.leb()
                state[2].pop(register, None)
                if register in first:
                    state[2][register] = first[register]
            elif opcode == 0x0c:
                state[:2] = entry.leb(), entry.leb()
            elif opcode == 0x0d:
                state[0] = entry.leb()
                state[1] = state[1] or 0
            elif opcode == 0x0e:
                demand(state[0] is not None, "an offset from no register")
                state[1] = entry.leb()
            else:
                demand(opcode == 0, f"instruction {opcode:#x}")
            if entry is fde:
                step(changes, (pc, *state[:2], dict(state[2])))
    demand(changes[0][1] is not None, "no CFA")
    demand(changes[-1][1:] == changes[0][1:], "the end is not as the beginning")
    return Cfi(version, ra_column, location_offset, range_offset, address_range, changes, pc)


def step(changes, row):
    """Append a row to those of a function of the address, if it changes anything."""
    if changes and changes[-1][0] == row[0]:
        changes.pop()
    if not changes or changes[-1][1:] != row[1:]:
        changes.append(row)


# --- ELF ---

class Elf:
    def __init__(self, data):
        demand(data[:4] == b"\x7fELF" and len(data) >= 64, "no ELF")
        self.data, self.elf_class, self.elf_data = data, data[4], data[5]
        demand(self.elf_class == 2 and self.elf_data in (1, 2), "class or byte order")
        self.order = {1: "<", 2: ">"}[self.elf_data]
        self.type, self.machine, self.version, _, _, self.table, self.flags = self.unpack("HHIQQQI", 16)
        demand(self.version == 1, "version")
        entry_size, count, names = self.unpack("HHH", 58)
        demand(entry_size == 64, "size of a section header")
        headers = [self.unpack("IIQQQQIIQQ", self.table + 64 * i) for i in range(count)]
        demand(names < count, "no section names")
        strings = self.cut(headers[names][4], headers[names][5])
        self.sections = [Section(string(strings, header[0]), *header[1:],
                                 data[header[4]:header[4] + header[5]]) for header in headers]

    def unpack(self, layout, at):
        return struct.unpack(self.order + layout, self.cut(at, struct.calcsize("=" + layout)))

    def cut(self, at, size):
        demand(at + size <= len(self.data), "outside of the file")
        return self.data[at:at + size]

    def index(self, name, type):
        found = [i for i, section in enumerate(self.sections) if section.name == name]
        demand(len(found) == 1, f"not one {name.decode()}")
        section = self.sections[found[0]]
        demand(section.type in type, f"type of {name.decode()}")
        demand(len(section.data) == section.size, f"{name.decode()} is outside of the file")
        demand(not section.flags & 1 << 11, "compressed")
        return found[0]

    def symbols(self, index):
        section = self.sections[index]
        demand(section.entry_size == 24 and section.size % 24 == 0 and section.link < len(self.sections), "symbol table")
        strings = self.sections[section.link].data
        return [Symbol(string(strings, number), *rest) for number, *rest in struct.iter_unpack(self.order + "IBBHQQ", section.data)]

    def relocations(self, target):
        """(offset, symbol, addend) by the section that the header says they are for."""
        for section in self.sections:
            if section.type in (REL, RELA) and section.info == target:
                layout = "QQq" if section.type == RELA else "QQ"
                demand(section.entry_size == struct.calcsize(layout) and section.size % section.entry_size == 0, "relocations")
                demand(section.link == self.index(b".symtab", [SYMTAB]), "the relocations' symbols")
                symbols = self.symbols(section.link)
                for offset, info, *addend in struct.iter_unpack(self.order + layout, section.data):
                    demand(info >> 32 < len(symbols), "a relocation's symbol")
                    yield offset, symbols[info >> 32], (addend or [0])[0]


def string(table, at):
    """The name there; None if it does not end within the table."""
    end = table.find(b"\0", at)
    return table[at:end] if end >= 0 else None


def trampoline(data):
    elf = Elf(data)
    demand(elf.type == 1, "not relocatable")
    text, frame = elf.index(b".text", [PROGBITS]), elf.index(b".eh_frame", [PROGBITS, 0x70000001])
    symbols = elf.symbols(elf.index(b".symtab", [SYMTAB]))
    ends = []
    for name in b"_Py_trampoline_func_start", b"_Py_trampoline_func_end":
        found = [symbol for symbol in symbols if symbol.name == name]
        demand(len(found) == 1 and found[0].section == text, f"not one {name.decode()} in .text")
        ends += found
    size = ends[0].size
    demand((ends[0].value, ends[1].value) == (0, size) and size, "bounds of the function")
    section = elf.sections[text]
    demand(0 <= section.size - size < max(section.align, 1) <= 4096, "something else in .text")
    demand(not list(elf.relocations(text)), "relocations in the code")
    found = cfi(elf.sections[frame].data, {"<": "little", ">": "big"}[elf.order])
    demand(found.end < size, "rows behind the code")
    starts, range_ends = [], []
    for offset, symbol, addend in elf.relocations(frame):
        demand(offset in (found.location_offset, found.range_offset), "another relocation")
        demand(symbol.section == text, "a relocation to elsewhere")
        (starts if offset == found.location_offset else range_ends).append(symbol.value + addend)
    demand(starts == [0], "start of the FDE")
    demand((max(range_ends) - min(range_ends) if range_ends else found.address_range) == size, "range of the FDE")
    return Trampoline(elf.machine, elf.flags, elf.elf_class, elf.elf_data, section.data[:size], found)


def symbols(image):
    elf = Elf(image)
    table = elf.index(b".dynsym", [DYNSYM])
    text = elf.sections[elf.index(b".text", [PROGBITS])]
    found = {symbol.value: symbol.name for symbol in elf.symbols(table) if symbol.section}
    for address in found:
        demand(text.address <= address < text.address + text.size, "a symbol outside of the code")
    return found


# --- Jitdump ---

def check_dump(data, header, records):
    """Written again, what was read of a jitdump is the jitdump, up to room that begins with eight zeros."""
    order = {"little": "<", "big": ">"}[header.byteorder]

    def pack(layout, *numbers):
        return struct.pack(order + layout, *numbers)

    def name(text):
        return text.encode("utf-8", "surrogateescape") + b"\0"

    demand((header.version, header.total_size, header.pad1) == (1, 40, 0) and header.flags in (0, 1), "header")
    out = pack("IIIIIIQQ", 0x4A695444, 1, 40, header.elf_mach, 0, header.pid, header.timestamp, header.flags)
    for record in records:
        demand(record.offset == len(out), "offset")
        id = ["CodeLoad", "CodeMove", "CodeDebugInfo", "CodeClose", "CodeUnwindingInfo"].index(type(record).__name__)
        out += pack("IIQ", id, record.total_size, record.timestamp)
        if id == 0:
            demand(len(record.code) == record.code_size, "code_size")
            out += pack("IIQQQQ", record.pid, record.tid, record.vma, record.code_addr, record.code_size, record.code_index)
            out += name(record.name) + record.code
        elif id == 1:
            out += pack("IIQQQQQ", record.pid, record.tid, record.vma, record.old_code_addr, record.new_code_addr,
                        record.code_size, record.code_index)
        elif id == 2:
            demand(len(record.entries) == record.nr_entry, "nr_entry")
            out += pack("QQ", record.code_addr, record.nr_entry)
            before = None
            for entry in record.entries:
                out += pack("QII", entry.addr, entry.lineno, entry.discrim)
                same = entry.name == before and data.startswith(b"\xff\0", len(out))
                out += b"\xff\0" if same else name(entry.name)
                before = entry.name
        elif id == 4:
            demand(len(record.eh_frame) + len(record.eh_frame_hdr) == record.unwinding_size, "unwinding_size")
            demand(len(record.eh_frame_hdr) == record.eh_frame_hdr_size > 0 and record.eh_frame, "eh_frame_hdr_size")
            demand(not record.mapped_size or record.mapped_size >= record.unwinding_size, "mapped_size")
            out += pack("QQQ", record.unwinding_size, record.eh_frame_hdr_size, record.mapped_size)
            out += record.eh_frame + record.eh_frame_hdr
            padding = record.offset + record.total_size - len(out)
            demand(0 <= padding < 8, "padding")
            out += bytes(padding)
        demand(len(out) == record.offset + record.total_size, "total_size")
    demand(data.startswith(out), "the bytes say something else")
    demand(header.complete == (len(out) == len(data)), "complete")
    demand(header.complete or data.startswith(bytes(8), len(out)), "something behind the last record")


# --- The table ---

_NAMES, _NUMBER = r"[^,]+(,[^,]+)*|-", r"(0|[1-9]\d*)"
_SAVED = f"[a-z]+\\d*(-[a-z]+\\d+)?={_NUMBER}"
_COLUMNS = {
    "name": r"\w+", "cpus": _NAMES, "defines": _NAMES, "chain_cflags": _NAMES, "board": _NAMES,
    "callee_saved": f"{_SAVED}(,{_SAVED})*", "ra_column": _NUMBER, "entry_cfa": rf"r{_NUMBER}\+{_NUMBER}",
    "pc": _NUMBER, "sp": f"{_NUMBER}@{_NUMBER}", "fp": f"{_NUMBER}@{_NUMBER}|-", "ra": f"{_NUMBER}@{_NUMBER}|-", "hash_entry": "[48]",
    "chain": rf"-?{_NUMBER},\^?-?{_NUMBER}", "status": "hardware|emulated|untested"}


def table(text, columns):
    """The table's words, by line."""
    lines = [re.split(r"[ \t]+", line.strip(" \t")) for line in text.split("\n")]
    lines = [words for words in lines if words != [""] and not words[0].startswith("#")]
    for words in lines:
        demand(len(words) == len(columns), "columns")
        for column, word in zip(columns, words):
            demand(re.fullmatch(_COLUMNS.get(column, r"[!-~]+"), word, re.ASCII) and word.isascii() and word.isprintable(),
                   f"{column} {word!r}")
    names = [words[0] for words in lines]
    demand(names == sorted(set(names)), "order")
    return lines


# --- The filter ---

_TOKEN = re.compile(r"\\.|\[[!^]?(\\.|[^\\])(\\.|[^]\\])*\]|[^[\\]", re.DOTALL)


def tokens(pattern):
    found, at = [], 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        demand(match, "a [ without its ], or nothing behind a backslash")
        demand(len(match[0]) == 1 or not re.search(r"(?s).\[[:.=]", match[0]), "a class of characters")
        found.append(match[0])
        at = match.end()
    return found


def wellformed(filter):
    """The filter's patterns as (leaves out, tokens)."""
    patterns = []
    for pattern in filter.split(",") if filter else ():
        out = pattern.startswith("!")
        demand(pattern[out:], "empty")
        demand(not re.search(r"[\0- \x7f]", pattern), "a space or a control character")
        demand(len(pattern.encode()) < 8192, "long")
        patterns.append((out, tokens(pattern[out:])))
    return patterns


def wants(filter, module, path):
    wanted = filter[:1] in ("", "!")
    for out, words in wellformed(filter):
        regex, text = "", path
        if "/" not in "".join(words):
            text, words = module.replace(".", "/"), [word.replace(".", "/") for word in words]
        for word in words:
            if word in "*?":
                regex += "." + "*" * (word == "*")
            elif word[0] == "[":
                negated = word[1] in "!^"
                members = re.sub(r"\\?([^-])", lambda match: re.escape(match[1]), word[1 + negated:-1])
                regex += "[" + "^" * negated + members + "]"
            else:
                regex += re.escape(word[-1])
        if re.fullmatch(f"(?s:{regex})(/.*)?", text):
            wanted = not out
    return wanted
