"""Debian's CPythons of every architecture in the table, with our package built for them.

Foreign ones run under qemu-user. Each runs a small program with every backend, and what it wrote is judged here; the
newest runs the tests of the backends as well, with PERF_TRAMPOLINE_FULL=1 each of them. `-k riscv64` chooses. The debug
build of this machine's newest runs them too.
PERF_TRAMPOLINE_RESULTS names a folder for the outcome, of which Tools/perf/results.py makes the README's table.
"""

import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import perf_support
from perf_support import FULL, SOURCE

import archs
import jitdump
import roots

try:
    import eh_frame
except archs.Refusal as error:
    raise unittest.SkipTest(str(error))
from elftools.elf.elffile import ELFFile

BACKENDS = 'perf', 'perf_jit', 'perf_elf'
VERSIONS = '3.15', '3.14', '3.13', '3.11'
FILES = {'test_perf_trampoline': BACKENDS, 'test_perf_elf_image': ['perf_elf'], 'test_perf_jitdump': ['perf_jit'],
         'test_perf_map': ['perf']}

PROGRAM = '''\
import sys
def leaf(n): return n + 1
class C:
    def method(self, n): return leaf(n)
def generator(): yield C().method(1)
def down(n): return n and down(n - 1) + 1
sys.setrecursionlimit(30000)
print(down(20000), *generator(), sorted([3, 1], key=lambda n: leaf(n)))
sys.exit(7)
'''
NAMES = ['<module>', 'down', 'generator', 'C.method', 'leaf', '<lambda>']


class Template:
    """What a committed header says, and what it must become for functions at given addresses."""

    def __init__(self, arch):
        text = (SOURCE / arch.header).read_text()
        self.code, self.eh_frame, *_ = [bytes.fromhex(''.join(re.findall(r'0x(\w\w),', body)))
                                    for body in re.findall(r'(?ms)\[\] = \{(.*?)^\};', text)]
        self.byteorder = 'big' if re.search(r'(?m)ELF_DATA 2$', text) else 'little'
        self.order = {'big': '>', 'little': '<'}[self.byteorder]
        self.listing = (HERE / f'perfdata/rows_{arch.name}.txt').read_text()
        self.cie_size = 4 + struct.unpack_from(self.order + 'I', self.eh_frame)[0]
        self.fde_size = len(self.eh_frame) - self.cie_size

    def unwind_data(self, functions, eh_frame, hdr):
        """.eh_frame and .eh_frame_hdr at these addresses, for functions (address, size) in ascending order.

        CIE_pointer is the distance from itself to the CIE and initial_location, pcrel, that from itself to the function
        (DWARF 5, 6.4.1; LSB Core, 10.6.1). The search table counts from its section's beginning, datarel (10.6.2).
        """
        pack = lambda layout, *numbers: struct.pack(self.order + layout, *numbers)
        fde = self.eh_frame[self.cie_size:]
        entries, table = [self.eh_frame[:self.cie_size]], []
        for i, (address, size) in enumerate(functions):
            at = self.cie_size + i * self.fde_size
            entries += [fde[:4], pack('IiI', at + 4, address - (eh_frame + at + 8), size), fde[16:]]
            table.append(pack('ii', address - hdr, eh_frame + at - hdr))
        head = pack('4BiI', 1, 0x1b, 0x03, 0x3b, eh_frame - (hdr + 4), len(functions))
        return b''.join(entries), head + b''.join(table)

    def rows(self, eh_frame_data, code):
        """The rows that a decoder finds, and their code, as the golden file lists them."""
        frame = eh_frame.decode(eh_frame_data, len(code), self.byteorder)
        return eh_frame.Trampoline(0, 0, 0, 0, code[:len(self.code)], frame).listing()


def run_file(python, env, file):
    return perf_support.run(['-m', 'unittest', file], python, env, check=False, timeout=7200, cwd=HERE)


class Interpreters:
    """One architecture's; below a class is made for each, so that each can be chosen and skipped."""

    arch = None

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory(prefix='foreign-')
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = Path(scratch.name)
        cls.program = cls.scratch / 'program.py'
        cls.program.write_text(PROGRAM)
        cls.template = Template(cls.arch)
        cls.native = cls.arch == archs.host()
        # version -> backend -> what was run -> outcome
        cls.outcomes = collections.defaultdict(lambda: collections.defaultdict(dict))
        cls.addClassCleanup(cls.write_results)
        cls.pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        cls.addClassCleanup(cls.pool.shutdown, cancel_futures=True)
        # What waits for an interpreter must be submitted behind it.
        cls.interpreters = {version: cls.pool.submit(perf_support.interpreter, version, cls.arch.name)
                            for version in VERSIONS}
        cls.programs = {(version, backend): cls.pool.submit(cls.run_program, version, backend)
                        for version in VERSIONS for backend in BACKENDS}

    @classmethod
    @functools.cache
    def files(cls):
        """Begun when a test first asks, so that -k can do without."""
        return {(version, file): cls.pool.submit(cls.run_file, version, file)
                for version in VERSIONS[:None if FULL else 1] for file in FILES}

    @classmethod
    def run_file(cls, version, file):
        python, env = cls.interpreters[version].result()
        # What is counted in hundreds of thousands is for hardware.
        env = env | {'PERF_TRAMPOLINE_FULL': str(int(FULL and cls.native))}
        return run_file(python, env, file)

    @classmethod
    def run_program(cls, version, backend):
        python, env = cls.interpreters[version].result()
        env = env | {'PERF_TRAMPOLINE_DIR': str(cls.scratch / 'images')}
        done = perf_support.run(['-X', backend, cls.program], python, env, check=False)
        cls.addClassCleanup(perf_support.remove_files, done.pid)
        return done

    @classmethod
    def write_results(cls):
        directory = os.environ.get('PERF_TRAMPOLINE_RESULTS')
        if directory and cls.outcomes:
            on = 'hardware'
            if not cls.native:
                with contextlib.suppress(roots.Unavailable):
                    said = subprocess.check_output([roots.qemu(cls.arch.name), '--version'], text=True)
                    on = 'qemu-user ' + re.search(r'version (\S+)', said)[1]
            Path(directory).mkdir(exist_ok=True)
            Path(directory, f'{cls.arch.name}.json').write_text(
                json.dumps({'on': on, 'outcomes': cls.outcomes}, indent=2) + '\n')

    @contextlib.contextmanager
    def recorded(self, version, backend, what):
        outcome = 'failed'
        try:
            yield
            outcome = 'passed'
        except unittest.SkipTest:
            outcome = 'skipped'
            raise
        finally:
            known = self.outcomes[version][backend]
            known[what] = max(known.get(what, outcome), outcome, key=['passed', 'skipped', 'failed'].index)

    def check_file(self, version, file):
        with contextlib.ExitStack() as recorded:
            for backend in FILES[file]:
                recorded.enter_context(self.recorded(version, backend, 'all'))
            done = self.files()[version, file].result()
            self.assertEqual(done.returncode, 0, done.stderr[-20000:])
            self.assertRegex(done.stderr, r'(?m)^Ran [1-9]')

    def check_written(self, version, check, *backends):
        for backend in backends:
            with self.subTest(backend), self.recorded(version, backend, 'smoke'):
                getattr(self, f'{check}_{backend}')(self.programs[version, backend].result().pid)

    def check_program(self, version):
        """It does what it does without us, and its functions have names."""
        for backend in BACKENDS:
            with self.subTest(backend), self.recorded(version, backend, 'smoke'):
                done = self.programs[version, backend].result()
                self.assertEqual((done.returncode, done.stdout, done.stderr), (7, '20000 2 [1, 3]\n', ''))
                self.assertLessEqual({f'py::{name}:{self.program}' for name in NAMES},
                                     set(getattr(self, f'names_{backend}')(done.pid)))

    def names_perf(self, pid):
        return [name for _, _, name in perf_support.map_entries(pid)]

    def names_perf_jit(self, pid):
        return [record.name for record in jitdump.read(f'/tmp/jit-{pid}.dump')[1]
                if isinstance(record, jitdump.CodeLoad)]

    def names_perf_elf(self, pid):
        return [symbol.name for _, elf in self.images(pid)
                for symbol in elf.get_section_by_name('.dynsym').iter_symbols()]

    def images(self, pid):
        paths = sorted((self.scratch / 'images').glob(f'{pid}-*.so'))
        self.assertTrue(paths)
        for path in paths:
            with open(path, 'rb') as file:
                yield path, ELFFile(file)

    def unwind_data_perf_jit(self, pid):
        header, records = jitdump.read(f'/tmp/jit-{pid}.dump')
        self.assertEqual(header.byteorder, self.template.byteorder)
        self.assertGreater(len(records), 3 * len(NAMES))
        for unwinding, _, load in zip(*[iter(records)] * 3):
            # perf inject puts .eh_frame behind the code, at a multiple of 8, and .eh_frame_hdr directly behind that.
            behind = -(-load.code_size // 8) * 8
            self.assertEqual((unwinding.eh_frame, unwinding.eh_frame_hdr), self.template.unwind_data(
                [(0, load.code_size)], behind, behind + len(self.template.eh_frame)))
            self.assertEqual(self.template.rows(unwinding.eh_frame, load.code), self.template.listing)

    def unwind_data_perf_elf(self, pid):
        for path, elf in self.images(pid):
            text, eh_frame, hdr = map(elf.get_section_by_name, ('.text', '.eh_frame', '.eh_frame_hdr'))
            symbols = {(symbol['st_value'], symbol['st_size'])
                       for symbol in elf.get_section_by_name('.dynsym').iter_symbols() if symbol['st_size']}
            (size,) = {size for _, size in symbols}
            # Places that no function has yet have their FDE.
            count = (eh_frame['sh_size'] - self.template.cie_size) // self.template.fde_size
            functions = [(text['sh_addr'] + i * (text['sh_size'] // count), size) for i in range(count)]
            self.assertLessEqual(symbols, set(functions))
            self.assertEqual((eh_frame.data(), hdr.data()),
                             self.template.unwind_data(functions, eh_frame['sh_addr'], hdr['sh_addr']))
            one = eh_frame.data()[:len(self.template.eh_frame)]     # the others have the same instructions
            self.assertEqual(self.template.rows(one, text.data()[:size]), self.template.listing)
            spans = re.findall(r'FDE cie=.*pc=(\w+)\.\.\.(\w+)', self.tool('llvm-dwarfdump', '--eh-frame', path))
            self.assertEqual([(int(start, 16), int(end, 16) - int(start, 16)) for start, end in spans], functions)

    def readers_perf_elf(self, pid):
        for path, _ in self.images(pid):
            self.tool('eu-elflint', path)
            self.tool('llvm-dwarfdump', '--verify', path)
            said = [line for line in self.tool('readelf', '-aW', path).splitlines() if 'py::' not in line]
            self.assertNotRegex('\n'.join(said), '(?i)warning|error|corrupt')

    def tool(self, *command):
        """What a program of this machine prints; it must have no complaint."""
        if not shutil.which(command[0]):
            self.skipTest(f'{command[0]} is missing')
        done = subprocess.run(command, text=True, capture_output=True, env=os.environ | {'LC_ALL': 'C.UTF-8'})
        self.assertEqual((done.returncode, done.stderr), (0, ''), done.stdout[-2000:])
        return done.stdout


def _test(check, *arguments):
    return lambda self: getattr(self, check)(*arguments)


def _tests():
    for version in VERSIONS:
        on = 'on_' + version.replace('.', '_')
        yield f'test_program_is_the_same_and_named_{on}', _test('check_program', version)
        yield f'test_unwind_data_is_the_template_patched_{on}', _test('check_written', version, 'unwind_data', 'perf_jit', 'perf_elf')
        yield f'test_readers_accept_images_{on}', _test('check_written', version, 'readers', 'perf_elf')
        if FULL or version == VERSIONS[0]:
            for file in FILES:
                yield f'{file}_passes_{on}', _test('check_file', version, file)


for _arch in archs.load().values():
    globals()[f'InterpretersTest_{_arch.name}'] = type(f'InterpretersTest_{_arch.name}', (Interpreters, unittest.TestCase),
                                                       dict(_tests(), arch=_arch, __module__=__name__))


@unittest.skipUnless(archs.host(), 'no trampoline for this processor')
class DebugBuildTest(unittest.TestCase):
    """This machine's newest CPython with the assertions that its developers build it with."""

    def test_files(self):
        python, env = perf_support.interpreter(f'{VERSIONS[0]}d')
        self.assertEqual(perf_support.run(['-c', 'import sys; print(hasattr(sys, "gettotalrefcount"))'], python, env).stdout, 'True\n')
        # It would show warnings for what the tests' programs leave to the collector.
        env = env | {'PYTHONWARNINGS': 'ignore::ResourceWarning'}
        for file in [*FILES, 'test_perf_filter', 'test_perf_code_extra'] if FULL else ['test_perf_map']:
            with self.subTest(file):
                done = run_file(python, env, file)
                self.assertEqual(done.returncode, 0, done.stderr[-20000:])
                self.assertRegex(done.stderr, r'(?m)^Ran [1-9]')


if __name__ == '__main__':
    unittest.main()
