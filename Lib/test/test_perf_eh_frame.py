"""The assembled trampolines, their CFI rows, and the tool that lifts them.

Needs no built interpreter: only an assembler per architecture.  A row or an
instruction that goes missing from any .S must be noticed, also when somebody
regenerates the header afterwards.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from random import Random

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = pathlib.Path(__file__).with_name("perfdata")
TOOL = ROOT / "Tools/perf/gen_eh_frame.py"
sys.path.insert(0, str(ROOT / "Tools/perf"))

try:
    import archs
    import eh_frame
    import gen_eh_frame as gen
except SystemExit as error:
    raise unittest.SkipTest(str(error))

ARCHS = archs.load()


def need(tool, package):
    if not shutil.which(tool):
        raise unittest.SkipTest(f"{tool} not found: install {package}")
    return tool


def gcc(arch):
    return [need(arch.prefix + "gcc", f"gcc-{arch.triplet.replace('_', '-')}")]


def clang(arch):
    return [need("clang", "clang"), f"--target={arch.triplet}"]


def binutils(arch, tool):
    return need(arch.prefix + tool, f"binutils-{arch.triplet.replace('_', '-')}")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True,
                          check=True).stdout


def golden(arch):
    return (GOLDEN / f"rows_{arch.name}.txt").read_text()


def each_arch(tool=lambda arch: binutils(arch, "as")):
    """Run the test for every architecture; `tool` may skip one."""
    def decorate(test):
        @functools.wraps(test)
        def run(self):
            for arch in ARCHS.values():
                with self.subTest(arch=arch.name):
                    tool(arch)
                    test(self, arch)
        return run
    return decorate


class TestCase(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)

    def tree(self, *names):
        """A copy of the part of the source tree that the tool reads."""
        root = self.scratch / "root"
        for name in ("Include/internal", "Python", "Tools/perf"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for path in [ROOT / gen.TABLE, *ROOT.glob("Include/internal/pycore_asm*.h"),
                     *ROOT.glob("Include/internal/*_generated.h"),
                     *ROOT.glob("Python/asm_trampoline_*.S")]:
            shutil.copy(path, root / path.relative_to(ROOT))
        return root

    def compile(self, command, arch, *flags):
        object = self.scratch / "compiled.o"
        object.unlink(missing_ok=True)
        output(*command, *flags, "-c", f"-I{ROOT / 'Include/internal'}",
               ROOT / arch.source, "-o", object)
        return object

    @contextlib.contextmanager
    def refused(self, number, text=""):
        with self.assertRaises(archs.Refusal) as caught:
            yield
        self.assertEqual((caught.exception.number, str(caught.exception)[:3]),
                         (number, f"E{number:02}"))
        self.assertIn(text, str(caught.exception))

    def run_tool(self, *arguments):
        with contextlib.redirect_stderr(io.StringIO()) as stderr, \
             contextlib.redirect_stdout(io.StringIO()):
            status = gen.main([*map(str, arguments)])
        return status, stderr.getvalue()


class TableTests(TestCase):

    def load(self, *lines):
        path = self.scratch / "archs.txt"
        path.write_text("\n".join(lines) + "\n")
        return archs.load(path)

    def setUp(self):
        super().setUp()
        self.lines = [line for line in archs.TABLE.read_text().splitlines()
                      if not line.startswith("#")]

    def test_begins_with_the_rule(self):
        self.assertTrue(archs.TABLE.read_text().startswith(
            "# This table is sorted. Keep it that way.\n"))

    def test_one_line_and_one_source_per_architecture(self):
        self.assertEqual({ROOT / arch.source for arch in ARCHS.values()},
                         set(ROOT.glob("Python/asm_trampoline_*.S")))

    def test_unknown_architecture_lists_the_known(self):
        with self.refused(1, ", ".join(ARCHS)):
            archs.get("vax")

    def test_unsorted_table_is_refused(self):
        with self.refused(2, "must come before"):
            self.load(*reversed(self.lines))

    def test_half_filled_line_is_refused(self):
        columns = len(archs.Arch.__dataclass_fields__)
        with self.refused(2, f"{columns - 1} columns, not {columns}"):
            self.load(self.lines[0].rpartition(" ")[0])

    def test_every_typed_column_is_checked(self):
        for column, word in [("ra_column", "x30"), ("entry_cfa", "sp+0"),
                             ("pc", "-"), ("sp", "31"), ("callee_saved", "x19"),
                             ("status", "perhaps")]:
            with self.subTest(column=column):
                words = self.lines[0].split()
                words[list(archs.Arch.__dataclass_fields__).index(column)] = word
                with self.refused(2, column):
                    self.load(" ".join(words))

    def test_duplicate_architecture_is_refused(self):
        with self.refused(3, "aarch64"):
            self.load(self.lines[0], self.lines[0])

    def test_host_is_found_by_cpu_pattern(self):
        for machine, name in [("arm64", "aarch64"), ("aarch64", "aarch64"),
                              ("powerpc64le", "ppc64le"), ("ppc64le", "ppc64le"),
                              ("riscv64", "riscv64"), ("s390x", "s390x"),
                              ("x86_64", "x86_64")]:
            self.assertEqual(archs.host(machine).name, name)
        for machine in "i686", "ppc64", "riscv32", "loongarch64", "mips64":
            self.assertIsNone(archs.host(machine))

    def test_callee_saved_ranges(self):
        self.assertEqual(ARCHS["riscv64"].callee_saved,
                         {"s0": 8, "s1": 9} | {f"s{i}": 16 + i
                                               for i in range(2, 12)})

    @each_arch(gcc)
    def test_register_offsets_agree_with_kernel_headers(self, arch):
        fields = {  # type, pc, sp, fp, ra
            "aarch64": ("struct user_pt_regs", "pc", "sp", "regs[29]", "regs[30]"),
            "ppc64le": ("struct pt_regs", "nip", "gpr[1]", None, "link"),
            "riscv64": ("struct user_regs_struct", "pc", "sp", "s0", "ra"),
            "s390x": ("s390_regs", "psw.addr", "gprs[15]", None, "gprs[14]"),
            "x86_64": ("struct user_regs_struct", "rip", "rsp", "rbp", None),
        }
        type, *names = fields[arch.name]
        header = "sys/user.h" if arch.name == "x86_64" else "asm/ptrace.h"
        offsets = [arch.pc] + [register and register.offset for register
                               in (arch.sp, arch.fp, arch.ra)]
        source = self.scratch / "offsets.c"
        source.write_text(f"#include <stddef.h>\n#include <{header}>\n"
                          + "".join(
            f'_Static_assert(offsetof({type}, {name}) == {offset}, "");\n'
            for name, offset in zip(names, offsets, strict=True) if name))
        self.assertEqual([name is None for name in names],
                         [offset is None for offset in offsets])
        output(*gcc(arch), "-fsyntax-only", source)


class RowTests(TestCase):

    @each_arch()
    def test_rows_and_code_equal_golden(self, arch):
        self.assertEqual(gen.build(arch).listing(), golden(arch))

    @each_arch()
    def test_headers_are_fresh(self, arch):
        self.assertEqual(self.run_tool("--check", "--arch", arch.name), (0, ""))

    def test_committed_headers_equal_golden(self):
        for arch in ARCHS.values():
            found, listing = gen.read_header(ROOT / arch.header, arch)
            self.assertEqual(listing, golden(arch))

    @each_arch(gcc)
    def test_gcc_gives_the_same_rows_and_code(self, arch):
        object = self.compile(gcc(arch), arch)
        self.assertEqual(gen.build(arch, ready=object).listing(), golden(arch))
        self.assertEqual(self.run_tool("--check", "--arch", arch.name,
                                       "--object", object), (0, ""))

    @each_arch(clang)
    def test_clang_gives_the_same_rows_and_code(self, arch):
        object = self.compile(clang(arch), arch)
        self.assertEqual(gen.build(arch, ready=object).listing(), golden(arch))
        self.assertEqual(self.run_tool("--check", "--arch", arch.name,
                                       "--object", object), (0, ""))

    @each_arch()
    def test_rows_agree_with_readelf(self, arch):
        # binutils names the registers; compare offsets and how many are saved.
        object = self.scratch / "trampoline.o"
        gen.assemble(arch, ROOT, "cc", None, object)
        text = output(binutils(arch, "readelf"), "--debug-dump=frames-interp",
                      object).partition(" FDE ")[2]
        theirs = [(int(at, 16), int(cfa), sorted(map(int, re.findall(
            r"c([+-]\d+)", rules)))) for at, cfa, rules in
            re.findall(r"^([0-9a-f]{16}) \w+([+-]\d+)(.*)$", text, re.M)]
        ours = [(row.offset, row.cfa[1], sorted(row.registers.values()))
                for row in eh_frame.read_object(object).eh_frame.rows]
        self.assertEqual(ours, theirs)

    @each_arch()
    def test_template_fields_are_zero_and_where_the_header_says(self, arch):
        frame = gen.build(arch).eh_frame
        at = frame.initial_location_offset
        self.assertEqual(at, frame.cie_size + 8)
        self.assertEqual(frame.address_range_offset, at + 4)
        self.assertEqual(frame.template[at:at + 8], bytes(8))

    @each_arch()
    def test_table_registers_suffice_for_every_row(self, arch):
        known = {register.dwarf for register in (arch.sp, arch.fp, arch.ra)
                 if register} | {arch.ra_column}
        for row in gen.build(arch).eh_frame.rows:
            self.assertLessEqual({row.cfa[0], *row.registers}, known)


    @each_arch()
    def test_frame_record_has_one_row_from_the_frame_pointer(self, arch):
        """What gdb and backtrace() go by in code of CPython's JIT, written out for those who read it."""
        expected = {"aarch64": "CFA=r29+16  r29=[CFA-16] r30=[CFA-8]", "riscv64": "CFA=r8+0  r1=[CFA-8] r8=[CFA-16]",
                    "x86_64": "CFA=r6+16  r6=[CFA-16] r16=[CFA-8]"}
        pieces = gen.frame_record(gen.build(arch), arch)
        rows = pieces and eh_frame.rows(b"".join(data for data, _ in pieces), "little")
        self.assertEqual(rows and [str(row) for row in rows],
                         arch.name in expected and ["+0x00  " + expected[arch.name]] or None)


class MutationTests(TestCase):

    def mutants(self, source):
        """(line, text without it) for each directive and each instruction."""
        lines = source.splitlines(keepends=True)
        start, end = [i for i, line in enumerate(lines)
                      if line.strip() in ("TRAMPOLINE_START", "TRAMPOLINE_END")]
        for i in range(start + 1, end):
            self.assertTrue(lines[i].strip())
            yield lines[i].strip(), "".join(lines[:i] + lines[i + 1:])

    @each_arch()
    def test_each_lost_line_is_caught_also_after_regenerating(self, arch):
        root, regenerated = self.tree(), self.scratch / "regenerated.h"
        refused = differ = 0
        for line, text in self.mutants((ROOT / arch.source).read_text()):
            (root / arch.source).write_text(text)
            try:
                trampoline = gen.build(arch, root)
            except archs.Refusal:
                refused += 1
                continue
            with self.refused(22):
                gen.check_header(trampoline, arch, root)
            regenerated.write_text(gen.header(trampoline, arch))
            _, listing = gen.read_header(regenerated, arch)
            self.assertNotEqual(listing, golden(arch), line)
            differ += 1
        print(f"{arch.name}: {refused + differ} mutants killed, {refused} by the "
              f"generator, {differ} by the golden rows", file=sys.stderr)

    @each_arch()
    def test_replaced_instruction_of_the_same_length_is_caught(self, arch):
        old, new = {"x86_64": ("*%rcx", "*%rdx"), "aarch64": ("blr     x3", "blr x4"),
                    "riscv64": ("jalr    a3", "jalr a4"),
                    "ppc64le": ("%r12, %r6", "%r12, %r7"),
                    "s390x": ("%r14, %r5", "%r14, %r6")}[arch.name]
        root = self.tree()
        source = (ROOT / arch.source).read_text()
        self.assertEqual(source.count(old), 1)
        (root / arch.source).write_text(source.replace(old, new))
        trampoline = gen.build(arch, root)
        self.assertNotEqual(trampoline.listing(), golden(arch))
        with self.refused(22):
            gen.check_header(trampoline, arch, root)


class RefusalTests(TestCase):
    """Each message of Tools/perf/README.rst that an object can provoke."""

    def build(self, name, *edits):
        arch = ARCHS[name]
        binutils(arch, "as")
        root = self.tree()
        text = (root / arch.source).read_text()
        for old, new in edits:
            self.assertIn(old, text)
            text = text.replace(old, new)
        (root / arch.source).write_text(text)
        return gen.build(arch, root)

    x86_64 = functools.partialmethod(build, "x86_64")

    def eh_frame(self, at=0, value=0):
        """Decode x86-64's template with one byte replaced."""
        arch = ARCHS["x86_64"]
        trampoline = gen.build(arch)
        data = bytearray(trampoline.eh_frame.template)
        data[at] = value
        return eh_frame.decode(bytes(data), len(trampoline.code), "little")

    def test_E04_missing_pyelftools(self):
        (self.scratch / "elftools.py").write_text("raise ImportError\n")
        done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(self.scratch)})
        self.assertEqual(done.returncode, 1)
        self.assertIn("E04: pyelftools is missing: install python3-pyelftools",
                      done.stderr)

    def test_E05_missing_assembler_names_the_package(self):
        for arch in ARCHS.values():
            package = "binutils-" + arch.triplet.replace("_", "-")
            with unittest.mock.patch.dict(os.environ, PATH=str(self.scratch)), \
                 self.refused(5, f"install {package}"):
                gen.build(arch)

    def test_E06_missing_or_failing_tool(self):
        with self.refused(6, "no-such-cc"):
            gen.build(ARCHS["x86_64"], cc="no-such-cc")
        with self.refused(6, "nonsense"):
            self.x86_64(("ret\n", "nonsense\n"))
        with self.refused(6, "CFI"):
            self.x86_64((".cfi_endproc", ""))

    def test_E07_guard_differs_from_table(self):
        with self.refused(7, "guard"):
            self.x86_64((" && !defined(__ILP32__)", ""))

    def test_E08_missing_symbol_or_section(self):
        with self.refused(8, "_Py_trampoline_func_end"):
            self.x86_64(("TRAMPOLINE_END",
                         "TRAMPOLINE_SIZE(_Py_trampoline_func_start)"))
        with self.refused(8, "lacks"):
            gen.build(ARCHS["x86_64"], ready=self.empty_object())
        with self.refused(8, "no ELF"):
            gen.build(ARCHS["x86_64"], ready=ROOT / gen.TABLE)

    def empty_object(self):
        # An x86-64 compiler finds the guard of another architecture false.
        return self.compile(gcc(ARCHS["x86_64"]), ARCHS["s390x"])

    def test_E09_anything_else_in_text(self):
        with self.refused(9):
            self.x86_64(("TRAMPOLINE_END", "TRAMPOLINE_END\n.skip 16"))
        with self.refused(9):
            self.x86_64(("TRAMPOLINE_START", ".text\nnop\nTRAMPOLINE_START"))

    def test_E10_relocation_in_the_code(self):
        with self.refused(10):
            self.x86_64(("call    *%rcx", "call    evaluator"))

    def test_E11_second_or_no_fde(self):
        second = ("TRAMPOLINE_END\n.section .text.second\n.cfi_startproc\nret\n"
                  ".cfi_endproc")
        with self.refused(11, "CIE, FDE, FDE"):
            self.x86_64(("TRAMPOLINE_END", second))
        with self.refused(11, "CIE, FDE, CIE, FDE"):
            self.x86_64(("TRAMPOLINE_END", second.replace(
                "\nret", "\n.cfi_return_column 15\nret")))
        with self.refused(11, "CIE pointer"):
            self.eh_frame(28, 0x18)
        with self.refused(11):
            self.eh_frame(0, 0x18)
        with self.refused(11, "nothing"):
            eh_frame.decode(b"", 12, "little")

    def test_E11_damaged_bytes_are_refused_or_decoded(self):
        random = Random(1)
        for arch in ARCHS.values():
            binutils(arch, "as")
            trampoline = gen.build(arch)
            order = {1: "little", 2: "big"}[trampoline.elf_data]
            for _ in range(1000):
                data = bytearray(trampoline.eh_frame.template)
                for _ in range(random.randint(1, 3)):
                    data[random.randrange(len(data))] = random.randrange(256)
                with contextlib.suppress(archs.Refusal):
                    eh_frame.decode(bytes(data), len(trampoline.code), order)

    def test_E12_cie_version(self):
        with self.refused(12, "CIE version 4"):
            self.eh_frame(8, 4)

    def test_E13_augmentation(self):
        with self.refused(13, '"zRS"'):
            self.x86_64((".cfi_startproc", ".cfi_startproc\n.cfi_signal_frame"))
        with self.refused(13, "length"):
            self.eh_frame(15, 2)
        with self.refused(13, '"zPR"'):
            self.x86_64((".cfi_startproc",
                         ".cfi_startproc\n.cfi_personality 0x1b, f"))
        with self.refused(13, '"zRB"'):
            self.build("aarch64", (".cfi_startproc",
                                   ".cfi_startproc\n.cfi_b_key_frame"))

    def test_E14_pointer_encoding(self):
        with self.refused(14, "0x00"):
            self.eh_frame(16, 0)

    def test_E15_fde_is_not_the_function(self):
        late = (".cfi_startproc", "nop\n.cfi_startproc")
        early = (".cfi_endproc", ".cfi_endproc\nnop")
        for name in "x86_64", "riscv64":    # a range in the object, and by relocation
            for edit in late, early:
                with self.subTest(arch=name, edit=edit), self.refused(15):
                    self.build(name, edit)

    def test_E16_last_row_differs_from_first(self):
        with self.refused(16, "does not restore"):
            self.x86_64(("        .cfi_restore %rbp\n", ""))
        with self.refused(16, "behind the code"):
            self.x86_64(("        .cfi_def_cfa_offset 8\n        .cfi_restore %rbp\n"
                         "    ret\n",
                         "ret\n.cfi_def_cfa_offset 8\n.cfi_restore %rbp\n"))

    def test_E17_size_of_eh_frame(self):
        with self.refused(17, "58 bytes"):
            eh_frame.decode(bytes(58), 12, "little")

    def test_E18_relocation_elsewhere_in_eh_frame(self):
        arch = ARCHS["x86_64"]
        binutils(arch, "as")
        root, object = self.tree(), self.scratch / "trampoline.o"
        gen.assemble(arch, root, "cc", None, object)
        data = bytearray(object.read_bytes())
        # .rela.eh_frame has one entry, recognisable by its offset, the FDE's 32.
        entry = (32).to_bytes(8, "little") + (2).to_bytes(4, "little")
        self.assertEqual(data.count(entry), 1)
        data[data.index(entry)] = 44
        object.write_bytes(data)
        with self.refused(18, ".eh_frame+0x2c"):
            gen.build(arch, ready=object)

    def test_E19_cfi_instruction(self):
        for directive in (".cfi_remember_state", ".cfi_undefined %rbx",
                          ".cfi_escape 0x0f, 1, 0x9c", ".cfi_register %rbx, %rcx",
                          ".cfi_window_save"):
            with self.subTest(directive=directive), self.refused(19):
                self.x86_64(("    ret\n", f"{directive}\nret\n"))

    def test_E20_return_address_column(self):
        with self.refused(20, "column 15, the table says 16"):
            self.x86_64((".cfi_startproc",
                         ".cfi_startproc\n.cfi_return_column 15"))

    def test_E21_cfa_on_entry(self):
        with self.refused(21, "r7+16, the table says r7+8"):
            self.x86_64((".cfi_startproc",
                         ".cfi_startproc\n.cfi_def_cfa_offset 16"),
                        ("cfa_offset 8", "cfa_offset 16"))

    def test_E22_stale_header_names_file_difference_and_cure(self):
        root, arch = self.tree(), ARCHS["x86_64"]
        binutils(arch, "as")
        header = root / arch.header
        text = header.read_text()
        for old, new in [("0x90, 0x01,", "0x90, 0x02,"),    # a row
                         ("0xff, 0xd1,", "0xff, 0xd2,"),    # the code
                         ("E_MACHINE 62", "E_MACHINE 3"),
                         ("RANGE_OFFSET 36", "RANGE_OFFSET 40"),
                         ("0x0c, 0x06, 0x10", "0x0c, 0x06, 0x18"),
                         ("0x14, 0x00", "0x14"),
                         (text, "")]:
            with self.subTest(old=old[:20]):
                header.write_text(text.replace(old, new))
                status, errors = self.run_tool("--root", root, "--check",
                                               "--arch", arch.name)
                self.assertEqual(status, 1)
                self.assertIn(f"E22: {arch.header} is stale:\n", errors)
                self.assertRegex(errors, r"(?m)^-.*\n(?s:.*)^\+")
                self.assertIn("mend it with: make regen-perf-trampoline ARCH=x86_64",
                              errors)

    def test_E22_stale_picker(self):
        root, arch = self.tree(), ARCHS["x86_64"]
        (root / gen.PICKER).unlink()
        status, errors = self.run_tool("--root", root, "--check", "--arch", arch.name)
        self.assertEqual(status, 1)
        self.assertIn(f"E22: {gen.PICKER} is stale:", errors)

    def test_E23_readme_without_markers(self):
        readme = self.scratch / "README.rst"
        readme.write_text("no markers\n")
        status, errors = self.run_tool("--root", self.tree(), "--arch", "x86_64",
                                       "--readme", readme)
        self.assertEqual(status, 1)
        self.assertIn("E23: ", errors)

    def test_E24_chain_that_the_frame_does_not_keep(self):
        trampoline = gen.build(ARCHS["x86_64"])
        with self.refused(24, "no row has the slots of"):
            gen.check_chain(trampoline, dataclasses.replace(ARCHS["x86_64"], chain=archs.Chain(0, 16, False)))

    def test_every_message_is_in_the_readme_and_tested(self):
        def numbers(pattern, *paths):
            return {int(number) for path in paths
                    for number in re.findall(pattern, path.read_text())}

        used = numbers(r"Refusal\((\d+),", *ROOT.glob("Tools/perf/*.py"))
        self.assertEqual(used, set(range(1, max(used) + 1)))
        self.assertEqual(used, numbers(r"\bE(\d\d): ", ROOT / "Tools/perf/README.rst"))
        self.assertEqual(used, numbers(r"(?:refused\(|_E)(\d+)",
                                       pathlib.Path(__file__)))


class GeneratorTests(TestCase):

    def state(self, root):
        return {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
                for path in root.rglob("*") if path.is_file()}

    @each_arch()
    def test_regeneration_is_reproducible_byte_for_byte(self, arch):
        root = self.tree()
        headers = [root / arch.header, root / gen.PICKER]
        before = [path.read_bytes() for path in headers]
        for path in headers:
            path.unlink()
        self.assertEqual(self.run_tool("--root", root, "--arch", arch.name),
                         (0, ""))
        self.assertEqual([path.read_bytes() for path in headers], before)

    @each_arch()
    def test_unchanged_files_are_not_written(self, arch):
        root = self.tree()
        before = self.state(root)
        self.run_tool("--root", root, "--arch", arch.name)
        self.assertEqual(self.state(root), before)

    def test_check_writes_nothing(self):
        root = self.tree()
        for path in root.glob("Include/internal/*_generated.h"):
            path.unlink()
        before = self.state(root)
        status, _ = self.run_tool("--root", root, "--check")
        self.assertEqual((status, self.state(root)), (1, before))

    def test_failed_write_leaves_the_old_file_and_no_other(self):
        path = self.scratch / "header.h"
        path.write_text("old")
        with unittest.mock.patch("os.replace", side_effect=OSError), \
             self.assertRaises(OSError):
            gen.write(path, "new")
        self.assertEqual(path.read_text(), "old")
        self.assertEqual(list(self.scratch.iterdir()), [path])

    def test_refusal_leaves_the_header(self):
        root, arch = self.tree(), ARCHS["x86_64"]
        source = root / arch.source
        source.write_text(source.read_text().replace("        .cfi_restore %rbp\n", ""))
        before = self.state(root)
        status, errors = self.run_tool("--root", root, "--arch", arch.name)
        self.assertEqual(status, 1)
        self.assertIn("x86_64: E16", errors)
        self.assertEqual(self.state(root), before)

    def test_one_bad_architecture_does_not_stop_the_others(self):
        root = self.tree()
        for arch in ARCHS.values():
            binutils(arch, "as")
        (root / ARCHS["aarch64"].source).write_text("")
        (root / ARCHS["x86_64"].header).unlink()
        status, errors = self.run_tool("--root", root)
        self.assertEqual(status, 1)
        self.assertEqual(errors.count("gen_eh_frame.py: "), 1)
        self.assertTrue((root / ARCHS["x86_64"].header).exists())

    @each_arch(gcc)
    def test_header_compiles_and_defines_what_c_uses(self, arch):
        source = self.scratch / "use.c"
        source.write_text('#include "pycore_perf_eh_frame_generated.h"\n'
                          "_Static_assert(sizeof(PERF_TRAMPOLINE_ARCH) > 1\n"
                          "    && PERF_TRAMPOLINE_E_MACHINE > 0\n"
                          "    && PERF_TRAMPOLINE_E_FLAGS >= 0\n"
                          "    && PERF_TRAMPOLINE_ELF_CLASS == 2\n"
                          "    && PERF_TRAMPOLINE_ELF_DATA > 0\n"
                          "    && PERF_TRAMPOLINE_CIE_SIZE + 8 ==\n"
                          "           PERF_TRAMPOLINE_INITIAL_LOCATION_OFFSET\n"
                          "    && PERF_TRAMPOLINE_ADDRESS_RANGE_OFFSET + 4\n"
                          "           < sizeof(perf_trampoline_eh_frame)\n"
                          "    && sizeof(perf_trampoline_code) > 4, \"\");\n"
                          'const char arch[] = PERF_TRAMPOLINE_ARCH;\n')
        text = output(*gcc(arch), "-std=c11", "-E", "-P",
                      f"-I{ROOT / 'Include/internal'}", source)
        self.assertIn(f'arch[] = "{arch.name}"', text)
        output(*gcc(arch), "-std=c11", "-fsyntax-only",
               f"-I{ROOT / 'Include/internal'}", source)

    def test_elsewhere_there_is_no_trampoline(self):
        cc = gcc(ARCHS["x86_64"])
        for flags in ["-undef"], ["-undef", "-D__ELF__", "-D__mips__"]:
            text = output(*cc, "-E", "-P", *flags, ROOT / gen.PICKER)
            self.assertEqual(text.strip(), "")

    def test_readme_table_comes_from_the_table(self):
        readme = self.scratch / "README.rst"
        readme.write_text("before\n.. architectures begin\nold\n"
                          ".. architectures end\nafter\n")
        root = self.tree()
        arguments = ("--root", root, "--arch", "x86_64", "--readme", readme)
        self.assertEqual(self.run_tool("--check", *arguments)[0], 1)
        self.assertEqual(self.run_tool(*arguments), (0, ""))
        self.assertEqual(self.run_tool("--check", *arguments), (0, ""))
        text = readme.read_text()
        self.assertTrue(text.startswith("before\n.. architectures begin\n\n====="))
        self.assertTrue(text.endswith("=====\n\n.. architectures end\nafter\n"))
        for arch in ARCHS.values():
            self.assertIn(f"\n{arch.name:<12} {arch.debian:<7} {arch.status}\n", text)


class ObjectTests(TestCase):
    """What the objects of a build carry besides code and rows."""

    def notes(self, arch, object):
        return output(binutils(arch, "readelf"), "-nW", object)

    def test_hardening_flags_change_notes_only(self):
        for name, flag, properties in [
                ("x86_64", "-fcf-protection=full", "IBT, SHSTK"),
                ("x86_64", "-fcf-protection=branch", "IBT"),
                ("x86_64", "-fcf-protection=return", "SHSTK"),
                ("x86_64", "-fcf-protection=none", None),
                ("aarch64", "-mbranch-protection=standard", "BTI, PAC"),
                ("aarch64", "-mbranch-protection=bti", "BTI"),
                ("aarch64", "-mbranch-protection=pac-ret", "PAC"),
                ("aarch64", "-mbranch-protection=none", None)]:
            for compiler in gcc, clang:
                with self.subTest(arch=name, flag=flag):
                    arch = ARCHS[name]
                    object = self.compile(compiler(arch), arch, flag)
                    self.assertEqual(gen.build(arch, ready=object).listing(),
                                     golden(arch))
                    found = re.findall(r"feature: (.*)", self.notes(arch, object))
                    self.assertEqual(found, [properties] if properties else [])

    def test_gcs_joins_the_aarch64_property(self):
        arch = ARCHS["aarch64"]
        object = self.compile(gcc(arch), arch, "-mbranch-protection=standard",
                              "-D__ARM_FEATURE_GCS_DEFAULT=1")
        with open(object, "rb") as file:
            note = eh_frame.ELFFile(file).get_section_by_name(".note.gnu.property")
            self.assertEqual(note.data()[16:28].hex(" ", 4),
                             "000000c0 04000000 07000000")

    def test_compressed_and_relaxed_riscv_changes_nothing(self):
        arch = ARCHS["riscv64"]
        for march in "rv64gc", "rv64g":
            for flags in ["-mrelax"], ["-mno-relax"]:
                object = self.compile(gcc(arch), arch, f"-march={march}", *flags)
                self.assertEqual(gen.build(arch, ready=object).listing(), golden(arch))

    def check_stack_note(self, elf):
        self.assertEqual(elf.get_section_by_name(".note.GNU-stack")["sh_flags"], 0)

    @each_arch(gcc)
    def test_foreign_source_assembles_to_nothing_but_the_stack_note(self, arch):
        for other in ARCHS.values():
            if other != arch:
                with open(self.compile(gcc(arch), other), "rb") as file:
                    elf = eh_frame.ELFFile(file)
                    self.check_stack_note(elf)
                    self.assertEqual(elf.get_section_by_name(".text")["sh_size"], 0)
                    self.assertIsNone(elf.get_section_by_name(".eh_frame"))

    @each_arch(gcc)
    def test_stack_is_not_executable_gcc(self, arch):
        with open(self.compile(gcc(arch), arch), "rb") as file:
            self.check_stack_note(eh_frame.ELFFile(file))

    @each_arch(clang)
    def test_stack_is_not_executable_clang(self, arch):
        with open(self.compile(clang(arch), arch), "rb") as file:
            self.check_stack_note(eh_frame.ELFFile(file))

    @each_arch(gcc)
    def test_symbols_are_hidden_functions(self, arch):
        object = self.compile(gcc(arch), arch)
        symbols = output(binutils(arch, "readelf"), "-sW", object)
        size = len(gen.build(arch, ready=object).code)
        self.assertRegex(symbols, rf" {size} FUNC +GLOBAL HIDDEN .*func_start\n")
        self.assertRegex(symbols, r" 0 NOTYPE +GLOBAL HIDDEN .*func_end\n")

    def test_mach_o_targets_assemble(self):
        for target, arch in ("x86_64", ARCHS["x86_64"]), ("arm64", ARCHS["aarch64"]):
            with self.subTest(target=target):
                command = [need("clang", "clang"), "-target", f"{target}-apple-macos11"]
                object = self.compile(command, arch)
                symbols = output(need("llvm-nm", "llvm"), object)
                code = gen.build(arch).code
                self.assertIn(" T __Py_trampoline_func_start\n", symbols)
                self.assertIn(f"{len(code):016x} T __Py_trampoline_func_end\n", symbols)
                self.assertIn(code, object.read_bytes())


if __name__ == "__main__":
    unittest.main()
