#!/usr/bin/env python3
"""Let the unwinders of each architecture walk a chain of five trampolines.

    unwindcheck.py                  every architecture of the table
    unwindcheck.py --arch riscv64   one; may be repeated

unwindcheck.c runs under qemu-user with the C library, libgcc, libunwind and libdw of a Debian root.  gdb, which knows
all architectures, steps through a trampoline of an ELF image and must be right about all callers at each instruction.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import gen_eh_frame as gen      # first, for it says what is missing
import archs
import roots
from stepcheck import TIMEOUT, headers

CORE = [gen.ROOT / f"Python/{name}.c" for name in ("jit_unwind", "perf_file", "perf_elf_image")]


class Chain:
    """The program, built for `arch`, and the root it runs in."""

    def __init__(self, arch, scratch):
        self.arch, self.scratch = arch, pathlib.Path(scratch)
        gcc = shutil.which(arch.prefix + "gcc")
        if not gcc:
            raise roots.Unavailable(f"{arch.prefix}gcc is missing: install gcc-{arch.triplet.replace('_', '-')}")
        self.root = roots.root("sid", arch.debian, ["libunwind-dev", "libdw-dev"], name="unwinders")
        self.qemu = roots.qemu(arch.name)
        self.gcc, self.program, self.images = gcc, self.scratch / "unwindcheck", self.scratch / "images"
        self.images.mkdir(mode=0o700)
        self.build()

    def build(self, tree=gen.ROOT):
        """Make the program, with the trampoline and the generated header of a source tree."""
        arch, chain, sp = self.arch, self.arch.chain, self.arch.sp.dwarf
        registers = dict.fromkeys([sp, *arch.callee_saved.values()])
        libraries = self.root / "usr/lib" / arch.triplet
        gen.run([self.gcc, "-std=gnu11", "-O2", "-g", "-Wall", "-no-pie", "-fno-optimize-sibling-calls",
                 "-fasynchronous-unwind-tables", *arch.chain_cflags, f"-DCHAIN_NEXT={chain.next}",
                 f"-DCHAIN_RA={chain.ra}", f"-DCHAIN_RA_IN_NEXT={int(chain.ra_in_next)}",
                 f"-DREGISTERS={' '.join(f'R({register})' for register in registers)}",
                 f"-DSP_IS_CFA={int(sp not in arch.callee_saved.values())}", HERE / "unwindcheck.c", *CORE,
                 tree / arch.source, *headers(tree), "-idirafter", self.root / "usr/include",
                 "-idirafter", self.root / "usr/include" / arch.triplet,
                 *libraries.glob("libunwind*.so.8"), libraries / "libdw.so.1", "-Wl,--allow-shlib-undefined",
                 "-o", self.program])

    def walk(self, *arguments):
        """{unwinder: whether it agrees}, and what the program printed."""
        done = subprocess.run([self.qemu, "-L", self.root, self.program, *arguments], text=True, timeout=TIMEOUT,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        found = dict(re.findall(r"^(.+?) (agrees|does not agree)", done.stdout, re.M))
        return {name: word == "agrees" for name, word in found.items()}, f"{done.stdout}status {done.returncode}"

    def step_with_gdb(self):
        """The offsets at which gdb was right, and what it printed."""
        gdb = roots.tool("gdb-multiarch", "gdb-multiarch")
        socket = self.scratch / "gdb"
        stub = subprocess.Popen([self.qemu, "-g", socket, "-L", self.root, self.program, self.images],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while stub.poll() is None and not socket.exists():
                time.sleep(.01)
            done = subprocess.run([*gdb, "-q", "-nx", "-batch", "-iex", "set auto-load no", "-iex",
                                   "set sysroot /nonexistent", "-ex", f"target remote {socket}", "-x",
                                   HERE / "unwindcheck.gdb", self.program],
                                  env=os.environ | {"PYTHONHOME": str(pathlib.Path(gdb[-1]).parents[1])},
                                  text=True, timeout=TIMEOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        finally:
            stub.kill()
            stub.wait()
        return [int(offset, 16) for offset in re.findall(r"^right at \+0x(\w+)", done.stdout, re.M)], done.stdout


@dataclasses.dataclass
class Result:
    arch: archs.Arch
    skipped: str = ""
    agreed: dict = dataclasses.field(default_factory=dict)          # where the slots were -> unwinders
    gdb_offsets: list = dataclasses.field(default_factory=list)
    problems: list = dataclasses.field(default_factory=list)

    def __str__(self):
        if self.skipped:
            return f"{self.arch.name:<8} SKIPPED: {self.skipped}"
        words = [f"{how}: {', '.join(names)}" for how, names in self.agreed.items()]
        words.append(f"gdb at {len(self.gdb_offsets)} addresses")
        return "\n".join([f"{self.arch.name:<8} {'; '.join(words)}{'  FAILED' * bool(self.problems)}", *self.problems])


def check(arch):
    result = Result(arch)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            chain = Chain(arch, scratch)
            for how, arguments in ("registered", ()), ("ELF image", (chain.images,)):
                agreed, output = chain.walk(*arguments)
                result.agreed[how] = [name for name in agreed if agreed[name]]
                if not agreed or not all(agreed.values()):
                    result.problems.append(output)
            result.gdb_offsets, output = chain.step_with_gdb()
            if result.gdb_offsets != instruction_offsets(arch, chain.program):
                result.problems.append(output)
    except roots.Unavailable as error:
        result.skipped = str(error)
    except (archs.Refusal, subprocess.TimeoutExpired) as error:
        result.problems.append(str(error))
    return result


def instruction_offsets(arch, program):
    """Where a disassembler sees instructions in the trampoline."""
    text = subprocess.check_output([arch.prefix + "objdump", "-d", "--disassemble=_Py_trampoline_func_start", program],
                                   text=True)
    addresses = [int(address, 16) for address in re.findall(r"^ +(\w+):\t", text, re.M)]
    size = len(gen.build(arch).code)
    return [address - addresses[0] for address in addresses if address - addresses[0] < size]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="default: all")
    options = parser.parse_args()
    try:
        chosen = [archs.get(name) for name in options.arch or archs.load()]
    except archs.Refusal as error:
        sys.exit(f"unwindcheck.py: {error}")
    failed = False
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(check, chosen):
            print(result, flush=True)
            failed |= bool(result.problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
