"""The architecture table, archs.txt, as objects.

    archs.load()             {name: Arch}, in the table's order
    archs.get("riscv64")     one of them
    archs.host()             the one this machine is, or None
"""

import dataclasses
import fnmatch
import pathlib
import platform
import re

TABLE = pathlib.Path(__file__).with_name("archs.txt")


class Refusal(Exception):
    """Something a person has to mend; README.rst has a cure per number."""

    def __init__(self, number, text):
        super().__init__(f"E{number:02}: {text}")
        self.number = number


@dataclasses.dataclass(frozen=True)
class Register:
    dwarf: int
    offset: int     # in NT_PRSTATUS's registers


@dataclasses.dataclass(frozen=True)
class Chain:
    next: int
    ra: int
    ra_in_next: bool


@dataclasses.dataclass(frozen=True)
class Arch:
    """One line of the table; the table's head explains the columns."""

    name: str
    triplet: str
    debian: str
    cpus: tuple
    condition: str
    defines: tuple
    prefix: str
    chain_cflags: tuple
    callee_saved: dict      # name -> DWARF number
    qemu_user: str
    qemu_system: str
    board: tuple            # machine, processor
    console: str
    kernel: str
    ra_column: int
    entry_cfa: str
    pc: int
    sp: Register
    fp: Register            # or None
    ra: Register            # or None
    hash_entry: int         # bytes
    chain: Chain
    status: str

    @property
    def source(self):
        return f"Python/asm_trampoline_{self.name}.S"

    @property
    def header(self):
        return f"Include/internal/pycore_perf_eh_frame_{self.name}_generated.h"


def _list(text):
    return () if text == "-" else tuple(text.split(","))


def _register(text):
    return None if text == "-" else Register(*map(int, text.split("@")))


def _chain(text):
    following, ra = text.split(",")
    return Chain(int(following), int(ra.removeprefix("^")), ra.startswith("^"))


def _callee_saved(text):
    registers = {}
    for item in _list(text):
        names, dwarf = item.split("=")
        first, _, last = names.partition("-")
        if not last:
            registers[first] = int(dwarf)
            continue
        letters, low = re.fullmatch(r"(\D+)(\d+)", first).groups()
        high = last.removeprefix(letters)
        for i in range(int(low), int(high) + 1):
            registers[f"{letters}{i}"] = int(dwarf) + i - int(low)
    return registers


_PARSERS = {
    "cpus": _list, "board": _list, "defines": _list, "chain_cflags": _list,
    "callee_saved": _callee_saved, "ra_column": int, "pc": int, "sp": _register,
    "fp": _register, "ra": _register, "hash_entry": int, "chain": _chain,
}

_NUMBER = r"(0|[1-9]\d{0,3})"
_LIST = r"-|[!-+.-~-]+(,[!-+.-~-]+)*"
_REGISTER = f"{_NUMBER}@{_NUMBER}"
_SAVED = rf"([a-z]+\d*|(?P<letters>[a-z]+)\d{{1,2}}-(?P=letters)\d{{1,2}})={_NUMBER}"
_FORMS = {
    "name": r"\w+", "cpus": _LIST, "board": _LIST, "defines": _LIST,
    "chain_cflags": _LIST, "callee_saved": f"({_SAVED}(,(?=[a-z])|$))+",
    "ra_column": _NUMBER, "entry_cfa": rf"r{_NUMBER}\+{_NUMBER}", "pc": _NUMBER,
    "sp": _REGISTER, "fp": f"{_REGISTER}|-", "ra": f"{_REGISTER}|-",
    "hash_entry": "[48]", "chain": rf"-?{_NUMBER},\^?-?{_NUMBER}",
    "status": "hardware|emulated|untested",
}


def load(path=TABLE):
    columns = [field.name for field in dataclasses.fields(Arch)]
    archs = {}
    previous = ""
    text = pathlib.Path(path).read_bytes().decode(errors="surrogateescape")
    for number, line in enumerate(text.split("\n"), 1):
        words = re.findall(r"[^ \t]+", line)
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}:{number}"
        if len(words) != len(columns):
            raise Refusal(2, f"{where}: {len(words)} columns, not {len(columns)}")
        values = {}
        for column, word in zip(columns, words):
            if not re.fullmatch(_FORMS.get(column, "[!-~]+"), word, re.ASCII):
                raise Refusal(2, f"{where}: {column} cannot be {word!r}")
            values[column] = _PARSERS.get(column, str)(word)
        name = values["name"]
        if name in archs:
            raise Refusal(3, f"{where}: {name} is already in the table")
        if name < previous:
            raise Refusal(2, f"{where}: {name} must come before {previous}")
        archs[name] = Arch(**values)
        previous = name
    return archs


def get(name, path=TABLE):
    archs = load(path)
    if name not in archs:
        raise Refusal(1, f"unknown architecture {name!r}; known are "
                         + ", ".join(archs))
    return archs[name]


def host(machine=None, path=TABLE):
    machine = machine or platform.machine()
    for arch in load(path).values():
        if any(fnmatch.fnmatchcase(machine, pattern) for pattern in arch.cpus):
            return arch
    return None
