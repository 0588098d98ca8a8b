#!/usr/bin/env python3
"""Let the unwinders of each architecture walk a chain of five trampolines.

    unwindcheck.py                  every architecture of the table
    unwindcheck.py --arch riscv64   one; may be repeated

unwindcheck.c runs under qemu-user with the C library, libgcc, libunwind and libdw of a Debian root.  gdb, which knows
all architectures, steps through a trampoline of an ELF image and must be right about all callers at each instruction.
"""

import argparse
import concurrent.futures
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
        self.program = self.scratch / "unwindcheck"
        libraries = self.root / "usr/lib" / arch.triplet
        chain = arch.chain
        gen.run([gcc, "-std=gnu11", "-O2", "-g", "-Wall", "-no-pie", "-fno-optimize-sibling-calls",
                 "-fasynchronous-unwind-tables", *arch.chain_cflags, "-DHAVE_LIBUNWIND", f"-DCHAIN_NEXT={chain.next}",
                 f"-DCHAIN_RA={chain.ra}", f"-DCHAIN_RA_IN_NEXT={int(chain.ra_in_next)}", HERE / "unwindcheck.c",
                 *CORE, gen.ROOT / arch.source, *headers(gen.ROOT), "-idirafter", self.root / "usr/include",
                 "-idirafter", self.root / "usr/include" / arch.triplet, *libraries.glob("libunwind*.so.8"),
                 "-Wl,--allow-shlib-undefined", "-o", self.program])
        self.images = self.scratch / "images"
        self.images.mkdir(mode=0o700)

    def walk(self, *arguments):
        """{unwinder: whether it agrees}, and what the program printed."""
        done = subprocess.run([self.qemu, "-L", self.root, self.program, *arguments], text=True, timeout=TIMEOUT,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        found = dict(re.findall(r"^(.+?) (agrees|does not agree)", done.stdout, re.M))
        return {name: word == "agrees" for name, word in found.items()}, f"{done.stdout}status {done.returncode}"

    def step_with_gdb(self):
        """The offsets at which gdb was right, and what it printed."""
        root = roots.root("sid", roots._arch(None).debian, ["gdb-multiarch"])
        gdb = roots._command(root, archs.host(), root / "usr/bin/gdb-multiarch", "gdb")
        socket = self.scratch / "gdb"
        stub = subprocess.Popen([self.qemu, "-g", socket, "-L", self.root, self.program, self.images],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while stub.poll() is None and not socket.exists():
                time.sleep(.01)
            done = subprocess.run([*gdb, "-q", "-nx", "-batch", "-iex", "set auto-load no", "-iex",
                                   "set sysroot /nonexistent", "-ex", f"target remote {socket}", "-x",
                                   HERE / "unwindcheck.gdb", self.program], env=os.environ | {"PYTHONHOME": root / "usr"},
                                  text=True, timeout=TIMEOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        finally:
            stub.kill()
            stub.wait()
        return [int(offset, 16) for offset in re.findall(r"^right at \+0x(\w+)", done.stdout, re.M)], done.stdout


def check(arch):
    """A line of the report, and whether all is well (None: not tried)."""
    words, problems = [], []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            chain = Chain(arch, scratch)
            for how, arguments in ("registered", ()), ("ELF image", (chain.images,)):
                agreed, output = chain.walk(*arguments)
                words.append(f"{how}: {', '.join(name for name in agreed if agreed[name])}")
                expected = ["frame chain", "libgcc"] + ["libunwind"] * bool(arguments)
                if agreed != dict.fromkeys(expected, True):
                    problems.append(output)
            offsets, output = chain.step_with_gdb()
            instructions = instruction_offsets(arch, chain.program)
            words.append(f"gdb at {len(offsets)} of {len(instructions)} instructions")
            if offsets != instructions:
                problems.append(output)
    except roots.Unavailable as error:
        return f"{arch.name:<8} SKIPPED: {error}", None
    except archs.Refusal as error:
        problems.append(str(error))
    return "\n".join([f"{arch.name:<8} {'; '.join(words)}{'  FAILED' * bool(problems)}", *problems]), not problems


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
        for line, passed in pool.map(check, chosen):
            print(line, flush=True)
            failed |= passed is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
