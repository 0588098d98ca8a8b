"""Trampolines of all architectures, executed: stepped, called, unwound, and broken on purpose.

Needs no built interpreter, but a cross compiler for each architecture and roots, as Tools/perf/stepcheck.py and
unwindcheck.py do.
"""

import concurrent.futures
import functools
import os
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "Tools/perf"))

try:
    import archs
    import roots
    import stepcheck
    import stepmutants
    import unwindcheck
    from stepcheck import gen
except SystemExit as error:
    raise unittest.SkipTest(str(error))

ARCHS = archs.load()


@functools.cache
def on_all(check):
    """{architecture: what check() says}, two or more at a time."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(ARCHS, pool.map(check, ARCHS.values())))


def step(arch):
    return stepcheck.check(arch, mutants=True)


class TestCase(unittest.TestCase):

    def each_result(self, check):
        for name, result in on_all(check).items():
            with self.subTest(arch=name):
                if result.skipped:
                    self.skipTest(result.skipped)
                yield result


class StepTests(TestCase):

    def test_rows_and_calls_are_right(self):
        for result in self.each_result(step):
            self.assertEqual(result.problems, [])
            self.assertGreater(result.steps, 5)
            self.assertEqual(result.calls, 1_000_000)

    def test_host_is_stepped_by_ptrace_too(self):
        for result in self.each_result(step):
            self.assertEqual("ptrace" in result.stepped_by, result.arch == archs.host())

    def test_every_mutant_is_killed(self):
        for result in self.each_result(step):
            self.assertEqual(result.survivors, [])
            self.assertGreater(result.kills["judged"], 100)
            self.assertGreater(result.kills["refused"], 10)
            self.assertEqual(result.kills["same"], 0)


class UnwinderTests(TestCase):

    def test_all_unwinders_give_the_chain_of_five(self):
        for result in self.each_result(unwindcheck.check):
            self.assertEqual(result.problems, [])
            self.assertEqual(result.agreed, {"registered": ["frame chain", "libgcc"],
                                             "ELF image": ["frame chain", "libgcc", "libunwind", "libdw"]})

    def test_gdb_is_right_at_every_instruction(self):
        for result in self.each_result(unwindcheck.check):
            steps = on_all(step)[result.arch.name].steps
            self.assertEqual(len(result.gdb_offsets), steps)


class BrokenTests(unittest.TestCase):
    """The ABI check and the unwinders each notice by themselves what is theirs."""

    def broken(self, how, name, *lines):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        arch = ARCHS[name]
        try:
            build = how(arch, scratch.name)
        except roots.Unavailable as error:
            self.skipTest(str(error))
        source = (ROOT / arch.source).read_text()
        for line in lines:
            self.assertIn(line, source)
            source = source.replace(line, "")
        tree = stepmutants.source_tree(build, source)
        return build, stepmutants.with_header(gen.build(arch, tree), arch, tree)

    def test_abi_check_notices_lost_registers(self):
        for name, line, found in [
                ("ppc64le", "    std     %r2, 24(%r1)\n", "status -11"),
                ("ppc64le", "    ld      %r2, 24(%r1)\n", "status -11"),
                ("ppc64le", "    mr      %r12, %r6\n", "status -11"),
                ("riscv64", "    ld      s0, 0(sp)\n", "the frame pointer"),
                ("x86_64", "    push    %rbp\n", "status -11")]:
            with self.subTest(arch=name, line=line.strip()):
                build, tree = self.broken(stepcheck.Build, name, line)
                self.assertIn(found, stepcheck.abi_problem(build, build.program(tree), 1000))

    def test_unwinders_notice_a_missing_row(self):
        for name, *lines in [
                ("aarch64", "        .cfi_offset x30, -8\n", "        .cfi_restore x30\n"),
                ("riscv64", "        .cfi_offset ra, -8\n", "        .cfi_restore ra\n"),
                ("s390x", "        .cfi_offset %r15, -40\n", "        .cfi_restore %r15\n")]:
            with self.subTest(arch=name):
                chain, tree = self.broken(unwindcheck.Chain, name, *lines)
                chain.build(tree)
                agreed, _ = chain.walk(chain.images)
                self.assertEqual(agreed, {"frame chain": True, "libgcc": False, "libunwind": False, "libdw": False})
                self.assertLess(len(chain.step_with_gdb()[0]), 4)


if __name__ == "__main__":
    unittest.main()
