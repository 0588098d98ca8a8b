"""Take a trampoline out of an object: its code and its .eh_frame template.

    read_object(path)                     -> Trampoline
    decode(eh_frame, code_size, order)    -> EhFrame
    check(trampoline, arch)               refuses what the ABI does not allow
    trampoline.listing()                  CFI rows and code as stable text

The template is the object's CIE and FDE with the FDE's initial_location and
address_range zeroed.  DWARF 5, 6.4 "Call Frame Information"; Linux Standard
Base Core, 10.6.1 "The .eh_frame section".
"""

import dataclasses
import functools
import io

from archs import Refusal

try:
    from elftools.dwarf.callframe import CallFrameInfo
    from elftools.dwarf.structs import DWARFStructs
    from elftools.elf.elffile import ELFFile
except ImportError:
    raise Refusal(4, "pyelftools is missing: install python3-pyelftools") from None

START, END = "_Py_trampoline_func_start", "_Py_trampoline_func_end"
PCREL_SDATA4 = 0x1b

# What a trampoline may use: opcode -> name and operands (u, s: LEB128; 1: a
# byte).  The first three keep an operand in their low six bits.
_OPCODES = {
    0x40: ("DW_CFA_advance_loc", ""),
    0x80: ("DW_CFA_offset", "u"),
    0xc0: ("DW_CFA_restore", ""),
    0x00: ("DW_CFA_nop", ""),
    0x02: ("DW_CFA_advance_loc1", "1"),
    0x05: ("DW_CFA_offset_extended", "uu"),
    0x06: ("DW_CFA_restore_extended", "u"),
    0x0c: ("DW_CFA_def_cfa", "uu"),
    0x0d: ("DW_CFA_def_cfa_register", "u"),
    0x0e: ("DW_CFA_def_cfa_offset", "u"),
    0x11: ("DW_CFA_offset_extended_sf", "us"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    offset: int
    cfa: tuple          # (DWARF register, offset)
    registers: dict     # DWARF register -> offset from the CFA of its slot

    def __str__(self):
        slots = " ".join(f"r{register}=[CFA{slot:+}]"
                         for register, slot in sorted(self.registers.items()))
        register, offset = self.cfa
        return f"+0x{self.offset:02x}  CFA=r{register}{offset:+}  {slots}".rstrip()


@dataclasses.dataclass(frozen=True)
class EhFrame:
    template: bytes
    fields: list        # (bytes, what they are), the template in pieces
    cie_size: int
    initial_location_offset: int
    address_range_offset: int
    address_range: int      # as the object has it
    ra_column: int
    rows: list


@dataclasses.dataclass(frozen=True)
class Trampoline:
    machine: int
    flags: int
    elf_class: int      # EI_CLASS
    elf_data: int       # EI_DATA
    code: bytes
    eh_frame: EhFrame

    def listing(self):
        lines = [f"{len(self.code)} bytes, return-address column "
                 f"{self.eh_frame.ra_column}"]
        for row, code in self.pieces():
            lines += [str(row), "           " + code.hex(" ")]
        return "\n".join(lines) + "\n"

    def pieces(self):
        """Each CFI row with the code it holds for."""
        rows = self.eh_frame.rows
        ends = [row.offset for row in rows[1:]] + [len(self.code)]
        return [(row, self.code[row.offset:end]) for row, end in zip(rows, ends)]


class _Reader:
    """Cuts an .eh_frame into fields and keeps the pieces."""

    def __init__(self, data, byteorder):
        self.data, self.byteorder = data, byteorder
        self.at = 0
        self.fields = []

    def _piece(self, end, what=None, value=None):
        if not self.at < end <= len(self.data):
            raise Refusal(11, ".eh_frame ends within a field")
        piece = self.data[self.at:end]
        self.at = end
        if what:
            self.fields.append((piece, what.format(value)))
        return piece

    def number(self, size, what=None, signed=False):
        value = int.from_bytes(self.data[self.at:self.at + size],
                               self.byteorder, signed=signed)
        self._piece(self.at + size, what, value)
        return value

    def patched(self, what):
        value = self.number(4)
        self.fields.append((bytes(4), what + ", patched"))
        return value

    def leb128(self, what=None, signed=False):
        value, shift, end, byte = 0, 0, self.at, 0x80
        while byte & 0x80:
            if end == len(self.data):
                raise Refusal(11, ".eh_frame ends within a field")
            byte = self.data[end]
            value |= (byte & 0x7f) << shift
            shift += 7
            end += 1
        if signed and byte & 0x40:
            value -= 1 << shift
        if not -1 << 63 <= value < 1 << 64 - signed:
            raise Refusal(11, "a number of .eh_frame has more than 64 bits")
        self._piece(end, what, value)
        return value

    def string(self, what):
        end = self.data.find(b"\0", self.at) + 1
        value = self.data[self.at:end - 1].decode("latin-1")
        self._piece(end, what, value)
        return value

    def instructions(self, end):
        while self.at < end:
            start = self.at
            opcode = self.number(1)
            primary = opcode & 0xc0
            name, operands = _OPCODES.get(primary or opcode, (None, ""))
            if name is None:
                raise Refusal(19, f"CFI instruction 0x{opcode:02x}: a trampoline "
                                  "needs only CFA and offset rules")
            words = [name] + ([str(opcode & 0x3f)] if primary else [])
            for operand in operands:
                words.append(str(self.number(1) if operand == "1"
                                 else self.leb128(signed=operand == "s")))
            piece = self.data[start:self.at]
            if self.fields[-1][1] == name == "DW_CFA_nop":
                piece += self.fields.pop()[0]
            self.fields.append((piece, " ".join(words)))
        if self.at != end:
            raise Refusal(11, "a CFI instruction runs past its entry")


def decode(data, code_size, byteorder):
    if len(data) % 4:
        raise Refusal(17, f".eh_frame has {len(data)} bytes, not a multiple of 4: "
                          ".eh_frame_hdr could not follow it")
    _refuse_other_than_one_cie_one_fde(data, byteorder)
    reader = _Reader(data, byteorder)

    length = reader.number(4, "CIE: length {}")
    fde_offset = reader.at + length
    reader.number(4, "CIE id")
    version = reader.number(1, "version {}")
    if version not in (1, 3):
        raise Refusal(12, f"CIE version {version}, not 1 or 3")
    augmentation = reader.string('augmentation "{}"')
    if augmentation != "zR":
        raise Refusal(13, f'augmentation "{augmentation}", not "zR": check for '
                          ".cfi_personality, .cfi_lsda, .cfi_signal_frame, "
                          ".cfi_b_key_frame")
    reader.leb128("code alignment factor {}")
    reader.leb128("data alignment factor {}", signed=True)
    ra = "return-address column {}"
    ra_column = reader.number(1, ra) if version == 1 else reader.leb128(ra)
    if reader.leb128("augmentation length {}") != 1:
        raise Refusal(13, 'the augmentation length does not fit "zR"')
    encoding = reader.number(1, "FDE pointer encoding pcrel|sdata4")
    if encoding != PCREL_SDATA4:
        raise Refusal(14, f"pointer encoding 0x{encoding:02x}, not pcrel|sdata4 "
                          "(0x1b)")
    reader.instructions(fde_offset)

    reader.number(4, "FDE: length {}")
    cie_pointer = reader.number(4, "CIE pointer")
    if cie_pointer != fde_offset + 4:
        raise Refusal(11, "the FDE's CIE pointer does not lead to the CIE")
    initial_location_offset = reader.at
    reader.patched("initial_location")
    address_range_offset = reader.at
    address_range = reader.patched("address_range")
    if reader.leb128("augmentation length {}"):
        raise Refusal(13, "the FDE has augmentation data; check for .cfi_lsda")
    reader.instructions(len(data))

    template = b"".join(piece for piece, _ in reader.fields)
    table = rows(template, byteorder)
    first, last = table[0], table[-1]
    if len(table) != 1 + sum("advance" in what for _, what in reader.fields):
        raise Refusal(16, "an advance_loc begins no row")
    if (last.cfa, last.registers) != (first.cfa, first.registers):
        raise Refusal(16, f"the last row ({last}) does not restore the first ({first})")
    if last.offset >= code_size:
        raise Refusal(16, f"the last row ({last}) lies behind the code")
    return EhFrame(template, reader.fields, fde_offset, initial_location_offset,
                   address_range_offset, address_range, ra_column, table)


def _refuse_other_than_one_cie_one_fde(data, byteorder):
    kinds, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at:at + 4], byteorder)
        pointer = int.from_bytes(data[at + 4:at + 8], byteorder)
        kinds.append("FDE" if length and pointer else "CIE" if length else "end")
        at += 4 + length
    if kinds != ["CIE", "FDE"] or at != len(data):
        raise Refusal(11, f".eh_frame holds {', '.join(kinds) or 'nothing'}, not "
                          "one CIE and one FDE")


@functools.cache
def _structs(byteorder):
    return DWARFStructs(little_endian=byteorder == "little", dwarf_format=32,
                        address_size=8)


def rows(template, byteorder):
    try:
        _, fde = CallFrameInfo(io.BytesIO(template), len(template), 0,
                               _structs(byteorder),
                               for_eh_frame=True).get_entries()
        start = fde.header["initial_location"]
        table = [Row(line["pc"] - start, (line["cfa"].reg, line["cfa"].offset),
                     {register: rule.arg for register, rule in line.items()
                      if register not in ("pc", "cfa")})
                 for line in fde.get_decoded().table]
    except Exception as error:      # pyelftools takes what it reads to be well formed
        raise Refusal(11, f"pyelftools cannot decode .eh_frame: {error!r}") from None
    if not table:
        raise Refusal(11, ".eh_frame describes nothing")
    return table


def read_object(path):
    try:
        with open(path, "rb") as file:
            return _read_elf(ELFFile(file))
    except Refusal:
        raise
    except Exception as error:      # pyelftools takes what it reads to be well formed
        raise Refusal(8, f"{path} is no ELF object: {error!r}") from None


def _read_elf(elf):
    if (elf.elfclass, elf["e_type"], elf["e_version"]) != (64, "ET_REL", "EV_CURRENT"):
        raise Refusal(8, "not a relocatable ELF object of 64 bits")
    text, eh_frame, symtab = (_section(elf, name) for name in
                              (".text", ".eh_frame", ".symtab"))
    start, end = (_symbol(elf, symtab, name, text) for name in (START, END))
    size = start["st_size"]
    padding = text.header["sh_size"] - size
    if (start["st_value"] or end["st_value"] != size
            or not 0 <= padding < text.header["sh_addralign"] <= 4096):
        raise Refusal(9, f".text holds {text.header['sh_size']} bytes, the function "
                         f"{size}: nothing else may be in .text")
    if _relocations(elf, text, symtab):
        raise Refusal(10, "the code has relocations and could not be copied; "
                          "name no symbol in it")

    byteorder = "little" if elf.little_endian else "big"
    frame = decode(eh_frame.data, size, byteorder)
    _check_range(_relocations(elf, eh_frame, symtab), text, frame, size)
    elf.stream.seek(18)     # pyelftools makes a name of e_machine
    machine = int.from_bytes(elf.stream.read(2), byteorder)
    return Trampoline(machine, elf["e_flags"], elf.elfclass // 32,
                      1 if elf.little_endian else 2, text.data[:size], frame)


@dataclasses.dataclass(frozen=True)
class _Section:
    number: int
    header: dict
    data: bytes
    symbols: list


_TYPES = {".symtab": ["SHT_SYMTAB"], ".text": ["SHT_PROGBITS"],
          ".eh_frame": ["SHT_PROGBITS", "SHT_AMD64_UNWIND"]}


def _section(elf, name):
    found = [(number, section) for number, section in enumerate(elf.iter_sections())
             if _is_named(elf, elf["e_shstrndx"], section["sh_name"], name)]
    if not found:
        raise Refusal(8, f"the object lacks {name}; is the guard of the .S true?")
    number, section = found[0]
    data = b"" if section.compressed else section.data()
    if (len(found) > 1 or section["sh_type"] not in _TYPES[name]
            or len(data) != section["sh_size"]):
        raise Refusal(8, f"the object has a second {name}, or one that is cut short, "
                         "compressed or of another type")
    symbols = list(section.iter_symbols()) if name == ".symtab" else []
    return _Section(number, section.header, data, symbols)


def _is_named(elf, table, offset, name):
    # pyelftools looks beyond the ends of tables.
    section = elf.get_section(table)
    names = section.data()
    if table >= elf.num_sections() or len(names) != section["sh_size"]:
        raise Refusal(8, f"the object has no section {table} for names")
    return names.startswith(name.encode() + b"\0", offset)


def _symbol(elf, symtab, name, text):
    found = [symbol for symbol in symtab.symbols
             if _is_named(elf, symtab.header["sh_link"], symbol["st_name"], name)]
    if len(found) != 1 or found[0]["st_shndx"] != text.number:
        raise Refusal(8, f"the object does not define {name}, once and in .text")
    return found[0]


def _relocations(elf, section, symtab):
    """(offset, symbol, addend) of each relocation for the section."""
    found = []
    for table in elf.iter_sections():
        if (table["sh_type"] in ("SHT_REL", "SHT_RELA")
                and table["sh_info"] == section.number):
            if table["sh_link"] != symtab.number:
                raise Refusal(8, f"the symbols of {table.name} are not in .symtab")
            found += [(reloc["r_offset"], symtab.symbols[reloc["r_info_sym"]],
                       reloc["r_addend"] if reloc.is_RELA() else 0)
                      for reloc in table.iter_relocations()]
    return found


def _check_range(relocations, text, frame, size):
    """The FDE must describe exactly the function.

    Where a linker may shrink code, both fields are 0 in the object and two
    relocations, end and start, stand for the range.
    """
    start, ends = [], []
    for offset, symbol, addend in relocations:
        value = symbol["st_value"] + addend
        if symbol["st_shndx"] != text.number:
            raise Refusal(15, "the FDE is for what is in another section than .text")
        if offset == frame.initial_location_offset:
            start.append(value)
        elif offset == frame.address_range_offset:
            ends.append(value)
        else:
            raise Refusal(18, f"relocation at .eh_frame+0x{offset:x}: only "
                              "initial_location and address_range may have one; "
                              "check for relaxable instructions")
    address_range = max(ends) - min(ends) if ends else frame.address_range
    if start != [0] or address_range != size:
        raise Refusal(15, f"the FDE covers {address_range} bytes from {start}, the "
                          f"function has {size} from [0]; check where "
                          ".cfi_startproc and .cfi_endproc stand")


def check(trampoline, arch):
    frame = trampoline.eh_frame
    if frame.ra_column != arch.ra_column:
        raise Refusal(20, f"return-address column {frame.ra_column}, the table "
                          f"says {arch.ra_column}")
    register, offset = frame.rows[0].cfa
    if f"r{register}{offset:+}" != arch.entry_cfa:
        raise Refusal(21, f"CFA on entry r{register}{offset:+}, the table says "
                          f"{arch.entry_cfa}")
