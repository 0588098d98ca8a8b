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
    """{architecture: what check() says}, some at a time."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(ARCHS, pool.map(check, ARCHS.values())))


def step(arch):
    return stepcheck.check(arch, mutants=True)


class ArchTests:
    """One architecture; below a class is made for each, so that each can be skipped."""

    arch = None

    def result(self, check):
        result = on_all(check)[self.arch.name]
        if result.skipped:
            self.skipTest(result.skipped)
        return result

    def test_rows_and_calls_are_right(self):
        result = self.result(step)
        self.assertEqual(result.problems, [])
        self.assertGreater(result.steps, 5)
        self.assertEqual(result.calls, 1_000_000)

    def test_host_is_stepped_by_ptrace_too(self):
        self.assertEqual("ptrace" in self.result(step).stepped_by, self.arch == archs.host())

    def test_every_mutant_is_killed(self):
        result = self.result(step)
        self.assertEqual(result.survivors, [])
        self.assertGreater(result.kills["judged"], 100)
        self.assertGreater(result.kills["refused"], 10)
        self.assertEqual(result.kills["same"], 0)

    def test_all_unwinders_give_the_chain_of_five(self):
        result = self.result(unwindcheck.check)
        self.assertEqual(result.problems, [])
        self.assertEqual(result.agreed, {"registered": ["frame chain", "libgcc"],
                                         "ELF image": ["frame chain", "libgcc", "libunwind", "libdw"]})

    def test_gdb_is_right_at_every_instruction(self):
        self.assertEqual(len(self.result(unwindcheck.check).gdb_offsets), self.result(step).steps)


for _arch in ARCHS.values():
    globals()[f"ArchTests_{_arch.name}"] = type(f"ArchTests_{_arch.name}", (ArchTests, unittest.TestCase),
                                                {"arch": _arch, "__module__": __name__})


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

    def check_abi_check(self, name, line, found):
        build, tree = self.broken(stepcheck.Build, name, line)
        self.assertIn(found, stepcheck.abi_problem(build, build.program(tree), 1000))

    def test_abi_check_notices_toc_not_saved(self):
        self.check_abi_check("ppc64le", "    std     %r2, 24(%r1)\n", "status -11")

    def test_abi_check_notices_toc_not_restored(self):
        self.check_abi_check("ppc64le", "    ld      %r2, 24(%r1)\n", "status -11")

    def test_abi_check_notices_missing_entry_address(self):
        self.check_abi_check("ppc64le", "    mr      %r12, %r6\n", "status -11")

    def test_abi_check_notices_lost_frame_pointer(self):
        self.check_abi_check("riscv64", "    ld      s0, 0(sp)\n", "the frame pointer")

    def check_unwinders(self, name, *lines):
        chain, tree = self.broken(unwindcheck.Chain, name, *lines)
        chain.build(tree)
        agreed, _ = chain.walk(chain.images)
        self.assertEqual(agreed, {"frame chain": True, "libgcc": False, "libunwind": False, "libdw": False})
        self.assertLess(len(chain.step_with_gdb()[0]), 4)

    def test_unwinders_notice_a_missing_row_aarch64(self):
        self.check_unwinders("aarch64", "        .cfi_offset x30, -8\n", "        .cfi_restore x30\n")

    def test_unwinders_notice_a_missing_row_riscv64(self):
        self.check_unwinders("riscv64", "        .cfi_offset ra, -8\n", "        .cfi_restore ra\n")

    def test_unwinders_notice_a_missing_row_s390x(self):
        self.check_unwinders("s390x", "        .cfi_offset %r15, -40\n", "        .cfi_restore %r15\n")


if __name__ == "__main__":
    unittest.main()
