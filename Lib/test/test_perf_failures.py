"""Every system call, allocation and clock of the runtime made to fail, one after the other: the program must not notice."""

import collections
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
from perf_support import EMULATED, FULL

import jitdump
from test_perf_map import parse

HERE = Path(__file__).resolve().parent
# Takes several arenas and rooms, forks, uses threads, lets go and begins again.
PROGRAM = '''\
import os, sys, threading, types
plain = (lambda: 1).__code__
def function(i):
    return types.FunctionType(plain.replace(co_name=f'f_{i}', co_qualname='x' * 60 + str(i)), {})
def work(begin, number): return sum(function(i)() for i in range(begin, begin + number))
backend, number = sys.argv[1], int(sys.argv[2])
sys.activate_stack_trampoline(backend)
total = work(0, number)
thread = threading.Thread(target=work, args=(-10, 10)); thread.start(); thread.join()
if (pid := os.fork()) == 0:
    os._exit(work(number, 5))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
sys.deactivate_stack_trampoline()
sys.activate_stack_trampoline(backend)
total += work(2 * number, 5)
try: work(1, 'x')
except TypeError: total += 1
print(total, os.getpid(), pid)
sys.exit(3)
'''
# These may fail without loss, and do so in silence: a directory is there already, a page comes by a fault, a number in a
# file name is 0, a mapping has the file's own name, an old file or a tail of zeros stays.
SILENT = {'clock_gettime', 'ftruncate64', 'link', 'madvise', 'mkdir', 'mremap', 'opendir', 'pthread_getattr_np',
          'sigaction', 'unlink'}


@unittest.skipIf(EMULATED, 'an emulator does not take LD_PRELOAD for the program alone')
class NthFailureTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        compiler = shutil.which('cc') or shutil.which('gcc')
        if not compiler:
            raise unittest.SkipTest('no C compiler')
        scratch = tempfile.TemporaryDirectory(dir='/var/tmp')
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = Path(scratch.name)
        cls.library = cls.scratch / 'fail_nth.so'
        subprocess.run([compiler, '-O1', '-shared', '-fPIC', '-w', HERE / 'perf_fail_nth.c', '-o', cls.library, '-ldl'],
                       check=True)
        (cls.scratch / 'program.py').write_text(PROGRAM)

    def run_failing(self, backend, nth, number):
        """The completed program, and the names of what failed, none when it made fewer calls: a child counts on."""
        log = self.scratch / 'log'
        log.write_text('')
        env = os.environ | {'LD_PRELOAD': str(self.library), 'FAIL_NTH': str(nth), 'FAIL_LOG': str(log),
                            'PERF_TRAMPOLINE_DIR': str(self.scratch / 'images')}
        done = perf_support.run([self.scratch / 'program.py', backend, number], env=env, check=False)
        return done, set(log.read_text().split())

    def check_file(self, backend, pid):
        """Whatever was written is whole."""
        with contextlib.suppress(FileNotFoundError):
            if backend == 'perf':
                parse(Path(f'/tmp/perf-{pid}.map').read_text())
            elif backend == 'perf_jit' and os.path.getsize(f'/tmp/jit-{pid}.dump'):
                jitdump.read(f'/tmp/jit-{pid}.dump')

    def check_backend(self, backend, number, silent=SILENT):
        failed, unsaid = collections.Counter(), []
        for nth in range(1, 5000):
            done, names = self.run_failing(backend, nth, number)
            with self.subTest(nth=nth, failed=names):
                numbers = re.fullmatch(r'(\d+) (\d+) (\d+)\n', done.stdout)
                pids = [int(pid) for pid in numbers.groups()[1:]] if numbers else [done.pid]
                self.addCleanup(perf_support.remove_files, *pids)
                self.assertEqual((done.returncode, numbers and numbers[1]), (3, str(number + 6)), done.stderr)
                self.assertRegex(done.stderr, r'\A(perf trampoline: .*\n)*\Z')
                if not names <= silent and not done.stderr:
                    unsaid.append(names)
                self.assertLessEqual(done.stderr.count('\n'), 2)
                for pid in pids:
                    self.check_file(backend, pid)
            if not names:
                break
            failed.update(names)
        # Each process opens its file to cut it to its length, at exit, and a jitdump by another name, to map it.
        self.assertLessEqual(len(unsaid), 8, unsaid)
        self.assertLessEqual(set().union(*unsaid), silent | {'open64', 'fstat64'})
        self.assertGreater(len(failed), 5)
        if os.environ.get('PERF_VERBOSE'):
            print(backend, dict(failed), file=sys.stderr)

    def test_map(self):
        self.check_backend('perf', 5000 if FULL else 1100)

    def test_jitdump(self):
        # It reads the clock for every function, and leaves no record without a time stamp.
        self.check_backend('perf_jit', 2500 if FULL else 60, SILENT - {'clock_gettime'})

    def test_images(self):
        self.check_backend('perf_elf', 5000 if FULL else 1100)


if __name__ == '__main__':
    unittest.main()
