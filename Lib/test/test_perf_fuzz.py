"""A short run of the fuzzers, Tools/perf/fuzz; `make fuzz` has more time.  With PERF_TRAMPOLINE_FULL=1: they find faults."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import perf_support
from perf_support import FULL, SOURCE

TARGETS = 'object header table dump script files answers segments names filter'.split()
BOTH = set(TARGETS) - {'names'}     # these refuse some and accept some


def fuzz(python, source, *arguments):
    return subprocess.run([python, source / 'Tools/perf/fuzz/fuzz.py', *map(str, arguments)], capture_output=True,
                          text=True, errors='replace')


@unittest.skipIf(missing := [name for name in ('hypothesis', 'elftools') if not importlib.util.find_spec(name)],
                 f'not installed: {missing}')
class FuzzTest(perf_support.ProgramTest):

    def test_short_run_is_clean(self):
        done = fuzz(sys.executable, SOURCE, '--seconds', 10, '--seed', 1)
        self.assertEqual(done.returncode, 0, f'{done.stdout}\n{done.stderr[-5000:]}')
        found = {name: (int(number), int(refused)) for name, number, refused
                 in re.findall(r'(?m)^(\w+) +(\d+) examples +(\d+) refused', done.stdout)}
        self.assertEqual([*found], TARGETS)
        for name, (number, refused) in found.items():
            self.assertGreaterEqual(number, 20, name)
            self.assertTrue(name not in BOTH or number < 300 or 0 < refused < number, done.stdout)

    # What a careless change might lose, and the target that is to notice.
    FAULTS = [
        ('object', 'Tools/perf/eh_frame.py', 'if (last.cfa, last.registers) != ', 'if False and None != '),
        ('object', 'Tools/perf/eh_frame.py', 'if version not in (1, 3):', 'if version > 4:'),
        ('object', 'Tools/perf/eh_frame.py', ' or found[0]["st_shndx"] != text.number', ''),
        ('header', 'Tools/perf/gen_eh_frame.py', 'if text != expected:', 'if False:'),
        ('table', 'Tools/perf/archs.py', '"chain": rf"', '"chain": r".*|'),
        ('dump', 'Tools/perf/jitdump.py', 'if record.at != record.end:', 'if False:'),
        ('dump', 'Tools/perf/jitdump.py', 'if size > self.end - self.at:', 'if size > len(self.data):'),
        ('script', 'Lib/perf_trampoline/_export.py', 'number &= (1 << 64) - 1', 'pass'),
        ('files', 'Lib/perf_trampoline/_clean.py', ' | os.O_NOFOLLOW', ''),
        ('answers', 'Lib/perf_trampoline/attaching.py', 'SyntaxError, ', ''),
        ('segments', 'Lib/perf_trampoline/attaching.py', 'struct.error, ', ''),
        ('names', 'Python/perf_trampoline.c', "c != ';' && ", ''),
        ('names', 'Python/perf_jit_trampoline.c', "if (path_size == 1 && path[0] == '\\xff')", 'if (0)'),
        ('filter', 'Python/perf_filter.c', "i == first || ", ''),
    ]

    def test_faults_can_be_planted(self):
        self.assertEqual([(name, old) for _, name, old, _ in self.FAULTS if (SOURCE / name).read_text().count(old) != 1], [])

    @unittest.skipUnless(FULL, 'PERF_TRAMPOLINE_FULL=1 runs it')
    def test_planted_faults_are_found(self):
        with tempfile.TemporaryDirectory(prefix='python-fuzz-', dir='/var/tmp') as scratch:
            source, build = Path(scratch, 'source'), Path(scratch, 'build')
            shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns('build', '.git'))
            build.mkdir()
            base = sys._base_executable
            subprocess.run([source / 'configure', '-q', f'--with-python={base}'], cwd=build, check=True, capture_output=True)
            for target, name, old, new in self.FAULTS:
                with self.subTest(name, old=old):
                    good = (source / name).read_text()
                    (source / name).write_text(good.replace(old, new))
                    subprocess.run(['make', '-s', '-C', build], check=True, capture_output=True)
                    done = fuzz(build / 'python', source, '--seconds', 10, '--seed', 1, target)
                    (source / name).write_text(good)
                    self.assertEqual(done.returncode, 1, done.stdout)
                    self.assertIn(f'\n{target}, seed ', done.stderr)


if __name__ == '__main__':
    unittest.main()
