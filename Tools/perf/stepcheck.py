#!/usr/bin/env python3
"""Run each trampoline one instruction at a time and judge its CFI rows by what the processor did.

    stepcheck.py                  every architecture of the table
    stepcheck.py --arch riscv64   one; may be repeated
    stepcheck.py --mutants        also judge what is slightly wrong, see stepmutants.py
    stepcheck.py --calls N        of the ABI check, a million by default

stepcheck.c calls a copy of the trampoline and has jit_unwind.c make the unwind data for it.  It runs under qemu-user,
stepped through its gdb stub; on this machine's own architecture by ptrace(2) too.

No architecture is known here.  The stub names its registers, the assembler says which DWARF number a name has, pc is
the one that moves; the rest is in the table.  Callee-saved registers and the stack below hold random bits on entry, so
that nothing is right by accident.  At each address, and once more as seen from inside the evaluator, the row must be

    true      it gives the CFA, the return address, the callee-saved registers and sp of the caller, out of registers
              and of what lies above sp, for a profiler copies no more;
    exact     it names a slot from behind the save to the end of the restoring instruction, and the CFA by sp.  For an
              instruction or two another row is just as true here, but not in every evaluator and unwinder.

The frame chain, which perf record -g follows, must lead out of the evaluator.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import gen_eh_frame as gen      # first, for it says what is missing
import archs
import eh_frame
import roots
from elftools.elf.elffile import ELFFile

WORD = 8
WINDOW = 512        # bytes of stack to record, below sp and above
MAX_STEPS = 64
TIMEOUT = 60        # seconds
DW_CFA_UNDEFINED = 7


class Lost(Exception):
    """The program did not do what could be judged."""


# ---- Programs ----

class Program:
    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            elf = ELFFile(file)
            self.byteorder = "little" if elf.little_endian else "big"
            self.symbols = {symbol.name: symbol["st_value"]
                            for symbol in elf.get_section_by_name(".symtab").iter_symbols()}


def headers(tree):
    return [f"-I{tree / 'Include/internal'}", "-include", HERE / "stepcheck.h"]


class Build:
    """What the programs of one architecture are made of and run by."""

    def __init__(self, arch, scratch):
        self.arch, self.scratch = arch, pathlib.Path(scratch)
        self.gcc = shutil.which(arch.prefix + "gcc")
        libc = self.gcc and subprocess.check_output([self.gcc, "-print-file-name=libc.so.6"], text=True).strip()
        if not libc or not os.path.isabs(libc):
            raise roots.Unavailable(f"{arch.prefix}gcc or its C library is missing: install "
                                    f"gcc-{arch.triplet.replace('_', '-')} libc6-dev-{arch.debian}-cross")
        self.qemu = [roots.qemu(arch.name), "-L", str(pathlib.Path(libc).parents[1])]
        registers = " ".join(f"R({name})" for name, dwarf in arch.callee_saved.items()
                             if dwarf not in (arch.sp.dwarf, arch.fp and arch.fp.dwarf))
        self.cflags = ["-std=gnu11", "-O2", "-Wall", *arch.chain_cflags, f"-DREGISTERS={registers}",
                       f"-DFRAME={'__builtin_frame_address(0)' if arch.fp else 'NULL'}"]
        self.evaluator, self.caller = self.scratch / "libevaluator.so", self.scratch / "stepcheck.o"
        common = [self.gcc, *self.cflags, HERE / "stepcheck.c", *headers(gen.ROOT)]
        gen.run([*common, "-DEVALUATOR", "-fPIC", "-shared", "-o", self.evaluator])
        gen.run([*common, "-fno-pie", "-c", "-o", self.caller])

    def program(self, tree=gen.ROOT):
        """The program with the trampoline and the generated header of another source tree."""
        path = self.scratch / f"stepcheck-{tree.name}"
        gen.run([self.gcc, *self.cflags, "-no-pie", "-fno-pie", self.caller, gen.ROOT / "Python/jit_unwind.c",
                 tree / self.arch.source, *headers(tree), self.evaluator, f"-Wl,-rpath,{self.scratch}", "-o", path])
        return Program(path)

    def entry_hint(self):
        """The code of TRAMPOLINE_ENTRY_HINT, b"" if the architecture has none."""
        source, found = self.scratch / "hint.S", self.scratch / "hint.o"
        source.write_text('#include "pycore_asm_trampoline.h"\n.text\n#ifdef TRAMPOLINE_ENTRY_HINT\n'
                          "TRAMPOLINE_ENTRY_HINT\n#endif\n")
        gen.run([self.gcc, f"-I{gen.ROOT / 'Include/internal'}", "-c", source, "-o", found])
        with open(found, "rb") as file:
            return ELFFile(file).get_section_by_name(".text").data()


@functools.cache
def dwarf_numbers(assembler, names):
    """{name: DWARF number} of those names that the assembler takes for registers."""
    with tempfile.TemporaryDirectory() as scratch:
        source, found = pathlib.Path(scratch, "names.s"), pathlib.Path(scratch, "names.o")
        while True:
            source.write_text("\n".join([".cfi_startproc", *(f".cfi_undefined {name}" for name in names),
                                         ".cfi_endproc", ""]))
            done = subprocess.run([assembler, source, "-o", found], capture_output=True, text=True)
            if done.returncode == 0:
                break
            unknown = {int(line) for line in re.findall(r"^\S+:(\d+): Error", done.stderr, re.M)}
            if not unknown:
                raise Lost(done.stderr)
            names = [name for line, name in enumerate(names, 2) if line not in unknown]
        with open(found, "rb") as file:
            entries = ELFFile(file).get_dwarf_info(relocate_dwarf_sections=False).EH_CFI_entries()
            numbers = [instruction.args[0] for entry in entries for instruction in entry.instructions
                       if instruction.opcode == DW_CFA_UNDEFINED]
    return dict(zip(names, numbers, strict=True))


# ---- Two ways of stepping a program: registers by DWARF number, and "pc" ----

class Stub:
    """A program under qemu-user, in gdb's remote protocol (GDB manual, appendix E) on a unix socket."""

    def __init__(self, build, program):
        self.arch = build.arch
        self.byteorder = program.byteorder
        with tempfile.TemporaryDirectory() as directory:    # of a short name, for a socket's is short
            path = pathlib.Path(directory, "gdb")
            qemu, *options = build.qemu
            self.process = subprocess.Popen([qemu, "-g", path, *options, program.path], stdout=subprocess.DEVNULL)
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(TIMEOUT)
            while self.process.poll() is None and self.socket.connect_ex(str(path)):
                time.sleep(.005)
        self.file = self.socket.makefile("rb")

    def run_to_ready(self, program):
        self._ask("qSupported:xmlRegisters=i386")
        core = re.search(r'href="(.*?)"', self._describe("target.xml"))
        self.fields, at = {}, 0         # 'g' begins with the registers of the first feature, in its order
        for name, bits in re.findall(r'<reg name="(\w+)" bitsize="(\d+)"', self._describe(core[1])):
            self.fields[name] = at, int(bits) // 8
            at += int(bits) // 8
        self.dwarf = dwarf_numbers(gen.assembler(self.arch), tuple(self.fields))
        wrong = {name: number for name, number in self.arch.callee_saved.items()
                 if self.dwarf.get(name, number) != number}
        if wrong:
            raise Lost(f"callee-saved registers {wrong}: the assembler has other DWARF numbers")
        self._find_pc(program.symbols["ready"])

    def close(self):
        self.process.kill()
        self.process.wait()
        self.file.close()
        self.socket.close()

    def _ask(self, text):
        data = text.encode()
        try:
            self.socket.sendall(b"$%b#%02x" % (data, sum(data) & 0xff))
            while self.file.read(1) not in (b"$", b""):
                pass
            reply = bytearray()
            while (byte := self.file.read(1)) not in (b"#", b""):
                reply += byte
            self.file.read(2)
            self.socket.sendall(b"+")
        except OSError as error:
            raise Lost(f"the stub does not answer {text[:8]!r}: {error}") from None
        return reply.decode("latin-1")

    def _describe(self, name):
        text = ""
        while True:
            reply = self._ask(f"qXfer:features:read:{name}:{len(text):x},800")
            text += reply[1:]
            if not reply.startswith("m"):
                return text

    def _find_pc(self, address):
        """pc is the register that holds the breakpoint's address, and no longer after a step."""
        self.run_to(address)
        held = {name for name, value in self._values().items() if value == address}
        self.step()
        held -= {name for name, value in self._values().items() if value == address}
        (self.pc_name,) = held

    def _values(self):
        data = bytes.fromhex(self._ask("g"))
        return {name: int.from_bytes(data[at:at + size], self.byteorder) for name, (at, size) in self.fields.items()}

    def _resume(self, action):
        reply = self._ask(action)
        if not reply.startswith("T05"):
            raise Lost(f"it stopped with {reply!r}")

    def registers(self):
        values = self._values()
        return {number: values[name] for name, number in self.dwarf.items()} | {"pc": values[self.pc_name]}

    def set_registers(self, changes):
        data = bytearray.fromhex(self._ask("g"))
        for name, number in self.dwarf.items():
            if number in changes:
                at, size = self.fields[name]
                data[at:at + size] = changes[number].to_bytes(size, self.byteorder)
        self._ask("G" + data.hex())

    def read(self, address, size):
        return bytes.fromhex(self._ask(f"m{address:x},{size:x}"))

    def write(self, address, data):
        self._ask(f"M{address:x},{len(data):x}:{data.hex()}")

    def step(self):
        self._resume("s")

    def run_to(self, address):
        self._ask(f"Z0,{address:x},1")
        self._resume("c")
        self._ask(f"z0,{address:x},1")


class Ptrace:
    """A program of this machine; of its registers those that the table finds in NT_PRSTATUS."""

    TRACEME, SINGLESTEP, GETREGSET, SETREGSET, NT_PRSTATUS = 0, 9, 0x4204, 0x4205, 1

    class _Iovec(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    def __init__(self, build, program):
        arch = build.arch
        self.byteorder = program.byteorder
        self.offsets = {"pc": arch.pc} | {register.dwarf: register.offset
                                          for register in (arch.sp, arch.fp, arch.ra) if register}
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
        self._ptrace.restype = ctypes.c_long
        self.buffer = ctypes.create_string_buffer(1024)
        self.process = subprocess.Popen([program.path], preexec_fn=lambda: self._ptrace(self.TRACEME, 0, None, None))
        self.memory = open(f"/proc/{self.process.pid}/mem", "r+b", buffering=0)

    def run_to_ready(self, program):
        self._wait()
        self.run_to(program.symbols["ready"])

    def close(self):
        self.memory.close()
        self.process.kill()
        self.process.wait()

    def _call(self, request, address=None, data=None):
        if self._ptrace(request, self.process.pid, address, data) < 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    def _wait(self):
        _, status = os.waitpid(self.process.pid, 0)
        if not os.WIFSTOPPED(status):
            self.process.returncode = status
        if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGTRAP:
            raise Lost(f"it stopped with status {status:#x}")

    def _fetch(self):
        area = self._Iovec(ctypes.addressof(self.buffer), len(self.buffer))
        self._call(self.GETREGSET, self.NT_PRSTATUS, ctypes.addressof(area))
        return area

    def registers(self):
        self._fetch()
        return {number: int.from_bytes(self.buffer[at:at + WORD], self.byteorder)
                for number, at in self.offsets.items()}

    def set_registers(self, changes):
        area = self._fetch()
        for number, at in self.offsets.items():
            if number in changes:
                self.buffer[at:at + WORD] = changes[number].to_bytes(WORD, self.byteorder)
        self._call(self.SETREGSET, self.NT_PRSTATUS, ctypes.addressof(area))

    def read(self, address, size):
        return os.pread(self.memory.fileno(), size, address)

    def write(self, address, data):
        os.pwrite(self.memory.fileno(), data, address)

    def step(self):
        self._call(self.SINGLESTEP)
        self._wait()

    def run_to(self, address):
        """Without a breakpoint, for that would be an instruction of some architecture."""
        while self.registers()["pc"] != address:
            self.step()


# ---- The trace ----

@dataclasses.dataclass(frozen=True)
class Moment:
    registers: dict
    low: int            # address of `stack`
    stack: bytes
    byteorder: str

    @property
    def pc(self):
        return self.registers["pc"]

    @functools.cached_property
    def words(self):
        """The stack as (address, word) pairs."""
        return {(self.low + at, int.from_bytes(self.stack[at:at + WORD], self.byteorder))
                for at in range(0, len(self.stack), WORD)}

    def word(self, address):
        at = address - self.low
        if 0 <= at <= len(self.stack) - WORD:
            return int.from_bytes(self.stack[at:at + WORD], self.byteorder)


@dataclasses.dataclass(frozen=True)
class Frame:
    """An FDE and its CIE, as unwinders use them."""
    start: int
    size: int
    ra_column: int
    rows: list

    def row(self, pc):
        if self.start <= pc < self.start + self.size:
            return next((row for row in reversed(self.rows) if row.offset <= pc - self.start), None)


@dataclasses.dataclass(frozen=True)
class Trace:
    start: int
    size: int
    frame: Frame        # what jit_unwind.c made of the header
    steps: list         # Moments inside the trampoline
    evaluator: Moment   # at the evaluator's first instruction
    call_end: int       # where the evaluator returns to
    after: Moment       # back in the caller
    cfa: int
    ra: int
    caller: dict        # callee-saved registers as on entry


def return_address(arch, moment):
    return moment.registers[arch.ra.dwarf] if arch.ra else moment.word(moment.registers[arch.sp.dwarf])


def entry_cfa(arch, moment):
    register, offset = map(int, re.findall(r"\d+", arch.entry_cfa))
    return moment.registers[register] + offset


def record(target, arch, program, trampoline):
    size, order = len(trampoline.code), target.byteorder

    def pointer(name):
        return int.from_bytes(target.read(program.symbols[name], WORD), order)

    start, evaluator, data = pointer("slot"), pointer("evaluator"), pointer("eh_frame")
    target.run_to(start)
    sp = target.registers()[arch.sp.dwarf]
    noise = random.Random(arch.name)
    target.write(sp - WINDOW, noise.randbytes(WINDOW))
    target.set_registers({register: noise.getrandbits(64) for register in arch.callee_saved.values()
                          if register != arch.sp.dwarf})

    def moment():
        return Moment(target.registers(), sp - WINDOW, target.read(sp - WINDOW, 2 * WINDOW), order)

    entry = now = moment()
    ra, steps, inside, call_end = return_address(arch, entry), [], None, None
    while now.pc != ra:
        if start <= now.pc < start + size and len(steps) < MAX_STEPS:
            steps.append(now)
            target.step()
        elif now.pc == evaluator and not inside:
            inside, call_end = now, return_address(arch, now)
            if call_end is None:
                raise Lost("sp is out of sight in the evaluator")
            target.run_to(call_end)
        else:
            raise Lost(f"it went to +{now.pc - start:#x}")
        now = moment()
    if not inside:
        raise Lost("it did not call the evaluator")
    template = target.read(data, len(trampoline.eh_frame.template))
    caller = {register: entry.registers[register] for register in arch.callee_saved.values()
              if register in entry.registers}
    return Trace(start, size, patched(template, data, size, order), steps, inside, call_end, now,
                 entry_cfa(arch, entry), ra, caller)


def patched(data, address, code_size, byteorder):
    frame = eh_frame.decode(data, code_size, byteorder)
    at = frame.initial_location_offset
    start = address + at + int.from_bytes(data[at:at + 4], byteorder, signed=True)
    return Frame(start, frame.address_range, frame.ra_column, frame.rows)


# ---- The judgement ----

def judge(arch, trace, frame):
    """What is wrong with the rows of `frame`, as sentences."""
    if (frame.start, frame.size) != (trace.start, trace.size):
        yield f"the FDE covers {frame.size} bytes at {frame.start - trace.start:+}, not {trace.size} at +0"
    boundaries = {moment.pc - frame.start for moment in trace.steps}
    for row in frame.rows:
        if row.offset not in boundaries:
            yield f"+{row.offset:#04x}: a row begins where no instruction does"
    for index, moment in enumerate(trace.steps):
        row = frame.row(moment.pc)
        where = f"+{moment.pc - trace.start:#04x}: "
        problems = untruths(arch, trace, frame, row, moment) if row else ["no row"]
        yield from map(where.__add__, problems or inexactness(arch, trace, frame, row, index))
    yield from map("in the evaluator: ".__add__, seen_from_evaluator(arch, trace, frame))
    yield from map("after the return: ".__add__, not_kept(arch, trace))


def untruths(arch, trace, frame, row, moment):
    register, offset = row.cfa
    cfa = moment.registers.get(register, 0) + offset
    if cfa != trace.cfa:
        return [f"CFA=r{register}{offset:+} is {cfa - trace.cfa:+} off"]

    def rule(register, default):
        if register not in row.registers:
            return default
        slot = cfa + row.registers[register]
        return moment.word(slot) if slot >= moment.registers[arch.sp.dwarf] else None

    problems = []
    if rule(frame.ra_column, moment.registers.get(frame.ra_column)) != trace.ra:
        problems.append(f"no return address in {place(row, frame.ra_column)}")
    for register, value in trace.caller.items():
        if rule(register, moment.registers[register]) != value:
            problems.append(f"the caller's r{register} is not in {place(row, register)}")
    # An unwinder takes the CFA for the caller's sp, unless the ABI has the callee save it.
    sp = arch.sp.dwarf
    if sp not in trace.caller and rule(sp, cfa) != trace.after.registers[sp]:
        problems.append("the caller's sp is not the CFA")
    return problems


def place(row, register):
    return f"[CFA{row.registers[register]:+}]" if register in row.registers else f"r{register}"


def inexactness(arch, trace, frame, row, index):
    """Why a true row is not the one for this instruction."""
    entry, moment = trace.steps[0], trace.steps[index]
    for register, value in (trace.caller | {frame.ra_column: trace.ra}).items():
        spoilt = any(later.registers.get(register) != value for later in trace.steps[index:])
        words = moment.words
        if entry.registers.get(register) == value and register not in row.registers:
            words = words - entry.words     # an old copy in the caller's frame need not be a slot
        saved = any(word == value for _, word in words)
        if (register in row.registers) != (spoilt and saved):
            yield f"r{register} is still said to be in {place(row, register)}"
    unknown = set(row.registers) - set(trace.caller) - {frame.ra_column}
    if unknown and len(trace.caller) == len(arch.callee_saved):
        yield f"rules for {unknown}, which the caller does not expect back"
    if row.cfa[0] != arch.sp.dwarf:
        yield f"CFA=r{row.cfa[0]}, not by sp: while the evaluator returns, no other register is sure"


def seen_from_evaluator(arch, trace, frame):
    """The trampoline one level up: return address minus 1 finds the row, and so does the kernel without one."""
    moment, sp = trace.evaluator, arch.sp.dwarf
    if row := frame.row(trace.call_end - 1):
        registers = dict(moment.registers)
        if sp not in arch.callee_saved.values():
            registers[sp] = entry_cfa(arch, moment)
        registers.pop(arch.ra_column, None)
        yield from untruths(arch, trace, frame, row, dataclasses.replace(moment, registers=registers))
    else:
        yield "no row for the call"
    base = (arch.fp or arch.sp).dwarf
    at = moment.registers[base]
    following = moment.word(at + arch.chain.next)
    if following != trace.steps[0].registers[base]:
        yield "the chain does not lead to the caller's frame"
    elif moment.word((following if arch.chain.ra_in_next else at) + arch.chain.ra) != trace.ra:
        yield "the chain does not lead to the return address"


def not_kept(arch, trace):
    sp = arch.sp.dwarf
    expected = {sp: trace.cfa} | trace.caller
    for register, value in expected.items():
        if trace.after.registers[register] != value:
            yield f"r{register} was not kept"


# ---- All of it ----

def step(how, build, program, trampoline):
    """The trace and what is wrong with it."""
    with contextlib.closing(how(build, program)) as target:
        target.run_to_ready(program)
        trace = record(target, build.arch, program, trampoline)
    return trace, list(judge(build.arch, trace, trace.frame))


def abi_problem(build, program, calls):
    try:
        done = subprocess.run([*build.qemu, program.path, str(calls)], capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "calls do not return"
    return done.stdout.strip() or (f"ended with status {done.returncode}" if done.returncode else None)


@dataclasses.dataclass
class Result:
    arch: archs.Arch
    skipped: str = ""
    stepped_by: list = dataclasses.field(default_factory=list)
    steps: int = 0
    problems: list = dataclasses.field(default_factory=list)
    calls: int = 0
    kills: collections.Counter = None
    survivors: list = dataclasses.field(default_factory=list)

    @property
    def passed(self):
        return not (self.skipped or self.problems or self.survivors)

    def __str__(self):
        if self.skipped:
            return f"{self.arch.name:<8} SKIPPED: {self.skipped}"
        line = (f"{self.arch.name:<8} {self.steps:2} addresses stepped by {', '.join(self.stepped_by)}; "
                f"{self.calls} calls")
        if self.kills is not None:
            dead = self.kills.total() - self.kills["same"] - self.kills["survived"]
            line += (f"; {dead} of {dead + self.kills['survived']} mutants killed ("
                     + ", ".join(f"{self.kills[kind]} {kind}" for kind in ("refused", "judged", "called"))
                     + f"), {self.kills['same']} no change")
        details = self.problems + [f"survived: {what}" for what in self.survivors]
        return "\n    ".join([line + ("" if self.passed else "  FAILED"), *details])


def check(arch, mutants=False, calls=1_000_000):
    result = Result(arch)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            build = Build(arch, scratch)
            trampoline = gen.build(arch)
            program = build.program()
            if not trampoline.code.startswith(build.entry_hint()):
                result.problems.append("the code does not begin with the entry hint")
            for how in [Stub] + [Ptrace] * (arch == archs.host()):
                trace, problems = step(how, build, program, trampoline)
                result.stepped_by.append(arch.qemu_user if how is Stub else "ptrace")
                result.problems += problems
                if how is Stub:
                    full = trace
            result.steps = len(full.steps)
            if problem := abi_problem(build, program, calls):
                result.problems.append(f"ABI: {problem}")
            result.calls = calls
            if mutants and not result.problems:
                import stepmutants
                result.kills, result.survivors = stepmutants.mutate(build, full, trampoline)
    except (roots.Unavailable, archs.Refusal) as error:
        if isinstance(error, archs.Refusal) and error.number != 5:
            result.problems.append(str(error))
        else:
            result.skipped = str(error)
    except Lost as error:
        result.problems.append(f"lost: {error}")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="default: all")
    parser.add_argument("--mutants", action="store_true", help="check the check")
    parser.add_argument("--calls", type=int, default=1_000_000, help="of the ABI check, default %(default)s")
    options = parser.parse_args()
    try:
        chosen = [archs.get(name) for name in options.arch or archs.load()]
    except archs.Refusal as error:
        sys.exit(f"stepcheck.py: {error}")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = []
        for result in pool.map(lambda arch: check(arch, options.mutants, options.calls), chosen):
            print(result, flush=True)
            results.append(result)
    return int(not all(result.passed or result.skipped for result in results))


if __name__ == "__main__":
    import stepcheck            # stepmutants does, and there should be one Lost
    sys.exit(stepcheck.main())
