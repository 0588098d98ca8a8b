"""ELF images: what every reader of such a file, and every unwinder, may count on.

Programs run under the interpreter that runs this file, and write their images to a directory of the test's. What needs
another program says so when that is missing; the rest runs anywhere, under an emulator as well.
"""

import collections
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
import perf_trampoline
import test_perf_profiler
from perf_support import EMULATED, FULL, GROWS_ANYWAY, IN_ROOT, SOURCE, ProgramTest

import archs
import perf_script
import roots

PRELUDE = '''\
import json, os, sys, threading, time, types
import perf_trampoline, perf_trampoline.images
def function(qualname, filename='/x.py', line=1, plain=(lambda: None).__code__):
    return types.FunctionType(plain.replace(
        co_name='f', co_qualname=qualname, co_filename=filename, co_firstlineno=line), {})
def status():
    return perf_trampoline.status()
'''
ACTIVATE = "sys.activate_stack_trampoline('perf_elf')\n"
# Five Python functions on the stack, and `leaf` in the last; their names, outermost first.
NESTED = '''
def one(leaf): two(leaf)
def two(leaf): three(leaf)
class C:
    def __call__(self, leaf): (lambda: four(leaf))()
three = C()
def four(leaf): leaf()
'''
NESTED_NAMES = ['one', 'two', 'C.__call__', 'C.__call__.<locals>.<lambda>', 'four']

Function = collections.namedtuple('Function', 'name address size info section')
Section = collections.namedtuple('Section', 'name type flags address offset size link info alignment entry_size')
Segment = collections.namedtuple('Segment', 'type flags offset address physical file_size size alignment')
PT_LOAD, PT_NOTE, PT_GNU_EH_FRAME, PT_GNU_STACK = 1, 4, 0x6474e550, 0x6474e551
PF_X, PF_W, PF_R = 1, 2, 4
GLOBAL_FUNC = 0x12


class Image:
    """An image, as a reader sees it at this moment who shares no code with the writer. System V gABI, chapter 4."""

    def __init__(self, path):
        self.path = Path(path)
        self.data = data = self.path.read_bytes()
        self.order = '<' if data[5] == 1 else '>'
        segments, headers = self.unpack('QQ', 32)
        num_segments, _, num_sections, names = self.unpack('HHHH', 56)
        self.segments = [Segment(*self.unpack('IIQQQQQQ', segments + 56 * i)) for i in range(num_segments)]
        sections = [Section(*self.unpack('IIQQQQIIQQ', headers + 64 * i)) for i in range(num_sections)]
        self.sections = {self.string(sections[names], section.name): section for section in sections}
        self.text = self.sections['.text']

    def unpack(self, layout, offset):
        return struct.unpack_from(self.order + layout, self.data, offset)

    def content(self, name):
        section = self.sections[name]
        return self.data[section.offset:section.offset + section.size]

    def string(self, table, offset):
        return self.data[table.offset + offset:self.data.index(b'\0', table.offset + offset)].decode('utf-8')

    @property
    def functions(self):
        """The symbols that are defined."""
        return [Function(self.string(self.sections['.dynstr'], name), address, size, info, section)
                for name, info, _, section, address, size in struct.iter_unpack(
                    self.order + 'IBBHQQ', self.content('.dynsym'))
                if section]

    @property
    def names(self):
        return [function.name for function in self.functions]

    def fdes(self):
        """(its address, initial location, address range, bytes) of each; the first entry must be their one CIE."""
        section, data = self.sections['.eh_frame'], self.content('.eh_frame')
        fdes, at = [], 4 + struct.unpack_from(self.order + 'I', data)[0]
        while at < len(data):
            length, cie, location, size = struct.unpack_from(self.order + 'IIiI', data, at)
            assert cie == at + 4
            fdes.append((section.address + at, section.address + at + 8 + location, size, data[at:at + 4 + length]))
            at += 4 + length
        return fdes


class ElfTest(ProgramTest):

    def setUp(self):
        self.directory = Path(tempfile.mkdtemp(prefix='elf-images-'))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def env(self, env=()):
        return {'PERF_TRAMPOLINE_DIR': str(self.directory)} | dict(env)

    def run_program(self, source, *options, env=(), **run_options):
        return super().run_program(PRELUDE + ACTIVATE + source, *options, env=self.env(env), **run_options)

    def run_plain(self, source, *options, env=(), **run_options):
        """A program that switches the trampoline on when it likes."""
        return super().run_program(PRELUDE + source, *options, env=self.env(env), **run_options)

    @contextlib.contextmanager
    def running(self, source, *, ready='ready\n'):
        """A program that has printed its line, until the end of the block; it may read from its standard input."""
        with subprocess.Popen([sys.executable, '-c', PRELUDE + ACTIVATE + source], text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, env=os.environ | self.env()) as process:
            try:
                self.assertEqual(process.stdout.readline(), ready)
                yield process
            finally:
                process.kill()

    def images(self, pid=None):
        """The images of a process, or of all, in order of their making."""
        paths = self.directory.glob(f'{pid or "*"}-*.so')
        return list(map(Image, sorted(paths, key=lambda path: int(path.name.split('-')[1]))))

    def names(self, pid=None):
        return [name for image in self.images(pid) for name in image.names]

    def tool(self, *command, check=True):
        """What a program prints, with its complaints; skips where it is missing."""
        if not shutil.which(command[0]):
            self.skipTest(f'{command[0]} is missing')
        done = subprocess.run(list(map(str, command)), text=True, errors='surrogateescape', stdin=subprocess.DEVNULL,
                              capture_output=True, env=os.environ | {'LC_ALL': 'C.UTF-8', 'DEBUGINFOD_URLS': ''})
        if check and done.returncode:
            self.fail(f'{shlex.join(done.args)}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr}')
        return done

    def binutil(self, name):
        """binutils know one architecture each."""
        return archs.get(perf_trampoline.status()['architecture']).prefix + name


def positions(functions):
    """Program text that calls functions of these (qualified name, file name, line) and keeps them."""
    return f'kept = [function(*known) for known in json.loads({json.dumps(functions)!r})]\nfor f in kept: f()\n'


class AcceptedTest(ElfTest):
    """No reader has a complaint."""

    STATES = {
        'fresh': '',
        'half full': positions([(f'C.f_{i}', f'/m{i // 9}.py', i + 1) for i in range(500)]),
        'full, and a second one': positions([(f'C.f_{i}', f'/m{i // 9}.py', i + 1) for i in range(1500)]),
        'hostile': positions([
            ('a\nb', '/a\0b.py', 1), ('größe', '/ü.py', 0), ('', '', 3), ('\ud800', '/\udcff.py', 2 ** 31 - 1),
            ('long' * 2000, '/long' * 1600, 4), ('a\0', '/c.py', 5), ('_Z3foov', '/d e.py', 6), ('after', '/x.py', 7)]),
    }

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.kept = Path(tempfile.mkdtemp(prefix='elf-images-'))
        cls.addClassCleanup(shutil.rmtree, cls.kept)
        for state, source in cls.STATES.items():
            directory = cls.kept / state.partition(',')[0].replace(' ', '-')
            perf_support.run(['-c', PRELUDE + ACTIVATE + source],
                             env=os.environ | {'PERF_TRAMPOLINE_DIR': str(directory)})

    def check(self, *command, complaint='(?i)warning|error|invalid|corrupt|mangled'):
        for path in sorted(self.kept.glob('*/*.so')):
            with self.subTest(f'{path.parent.name} {path.name.split("-")[1]}'):
                done = self.tool(*command, path)
                self.assertEqual(done.stderr, '')
                if complaint:
                    lines = [line for line in done.stdout.splitlines() if not line.startswith('No errors')]
                    self.assertEqual([line for line in lines if re.search(complaint, line) and 'py::' not in line], [])

    def test_readelf(self):
        self.check('readelf', '-aWw')

    def test_eu_readelf(self):
        self.check('eu-readelf', '-a', '-w')

    def test_eu_elflint(self):
        self.check('eu-elflint')

    def test_eu_elflint_that_knows_gnu_ld(self):
        self.check('eu-elflint', '--gnu-ld')

    def test_objdump(self):
        self.check(self.binutil('objdump'), '-d')

    def test_objdump_with_lines(self):
        self.check(self.binutil('objdump'), '-dl')

    def test_nm(self):
        self.check('nm', '-D')

    def test_llvm_dwarfdump(self):
        self.check('llvm-dwarfdump', '--verify', complaint='^error|^warning')

    def test_gdb(self):
        self.check('gdb', '-nx', '-batch', '-ex', 'set complaints 100', '-ex', 'info functions py::')


class StepTest(ElfTest):

    @unittest.skipIf(EMULATED or IN_ROOT, 'gdb sees the emulator, or the loader')
    def test_image_is_accepted_after_every_single_store(self):
        """Whoever reads it while a function is being added, or after a kill in the midst of that, has a whole file."""
        script = self.directory / 'step.py'
        script.write_text(f'''
import gdb, glob
gdb.execute('set breakpoint pending on')
gdb.Breakpoint('elf_publish')
gdb.execute('run')
gdb.execute('continue 8')
image, = glob.glob('{self.directory}/*.so')
end = gdb.selected_frame().older().pc()
states = []
while gdb.selected_frame().pc() != end:
    gdb.execute('stepi', to_string=True)
    state = open(image, 'rb').read()
    if states[-1:] != [state]:
        states.append(state)
for number, state in enumerate(states):
    open(f'{self.directory}/{{number:03}}.state', 'wb').write(state)
gdb.execute('kill')
''')
        program = self.directory / 'program.py'
        program.write_text(PRELUDE + ACTIVATE + positions([(f'C.f_{i}', f'/m{i}.py', i + 1) for i in range(20)]))
        self.tool('env', f'PERF_TRAMPOLINE_DIR={self.directory}', 'gdb', '-nx', '-batch', '-iex', 'set confirm off',
                  '-x', script, '--args', sys.executable, program)
        states = sorted(self.directory.glob('*.state'))
        self.assertGreater(len(states), 8)
        complaints = []
        for state in states:
            Image(state).fdes()
            for command in (['readelf', '-aWw'], ['eu-elflint'], ['llvm-dwarfdump', '--verify']):
                done = self.tool(*command, state, check=False)
                said = re.search(r'(?m)^.*(?<!No )(?i:error|warning).*$', done.stderr + done.stdout)
                if done.returncode or done.stderr or said and 'No errors' not in said[0]:
                    complaints.append(f'{state.stem}: {command[0]}: {said[0] if said else done.stderr}')
        # Between two stores .debug_line is longer than its unit: no format we know of grows in one.
        known, rest = [[text for text in complaints if ('debug_line' in text) == about] for about in (True, False)]
        self.assertEqual(rest, [])
        self.assertLessEqual(len(known), 1)


class NameTest(ElfTest):

    KNOWN = [('f', '/x.py', 1), ('C.f', '/x.py', 70), ('C.g.<locals>.<lambda>', '/dir-y/y.py', 700),
             ('__init__', '/größe.py', 123456), ('C.f', '/z.py', 2), ('long' * 1000, '/l.py', 9),
             ('h', '/l' * 1500, 8)]

    # elfutils reads the length of a file's entry as one byte, so of longer names the tail is there.
    FILES = [filename[-122:] for _, filename, _ in KNOWN]

    def one_image(self, source):
        self.run_program(source)
        image, = self.images()
        return image

    def test_every_function_is_one_symbol(self):
        image = self.one_image(positions([(f'f_{i}', '/x.py', 1) for i in range(300)]))
        names = [name for name in image.names if name.startswith('py::f_')]
        self.assertEqual(names, [f'py::f_{i}:/x.py' for i in range(300)])

    def test_name_is_qualified_name_and_file(self):
        names = self.one_image(positions(self.KNOWN)).names
        first = names.index('py::f:/x.py')
        self.assertEqual(names[first:first + len(self.KNOWN)],
                         [f'py::{qualname}:{filename}' for qualname, filename, _ in self.KNOWN])

    def test_symbols_are_functions_in_text(self):
        image = self.one_image(positions(self.KNOWN))
        locations = {location: size for _, location, size, _ in image.fdes()}
        for function in image.functions:
            self.assertEqual((function.info, function.section), (GLOBAL_FUNC, 1))
            self.assertEqual(function.size, locations[function.address])

    def test_process_itself_knows_each_function_by_its_address(self):
        image = self.one_image('''
import ctypes
class Info(ctypes.Structure):
    _fields_ = [('file', ctypes.c_char_p), ('base', ctypes.c_void_p),
                ('name', ctypes.c_char_p), ('at', ctypes.c_void_p)]
for i in range(50): function(f'f_{i}')()
maps = [line.split() for line in open('/proc/self/maps')]
base = next(int(span.split('-')[0], 16) for span, _, offset, *_, path in maps
            if path == status()['files'][0] and not int(offset, 16))
sys.path[:0] = PATH
from test_perf_elf_image import Image
info = Info()
for known in Image(status()['files'][0]).functions:
    assert ctypes.CDLL(None).dladdr(ctypes.c_void_p(base + known.address + 4), ctypes.byref(info))
    assert (info.name.decode(), info.at) == (known.name, base + known.address)
'''.replace('PATH', repr(sys.path)))
        self.assertIn('py::f_49:/x.py', image.names)

    def test_name_of_8000_characters_is_whole(self):
        image = self.one_image("for i in range(10): function(f'{i:08}' * 500, '/x' * 2000)()")
        self.assertLessEqual({f'py::{f"{i:08}" * 500}:{"/x" * 2000}' for i in range(10)}, set(image.names))

    def known(self):
        """An image with the functions of KNOWN, and an address within each."""
        image = self.one_image(positions(self.KNOWN))
        first = image.names.index('py::f:/x.py')
        return image, [function.address + 4 for function in image.functions[first:first + len(self.KNOWN)]]

    def check_positions(self, *command):
        image, addresses = self.known()
        done = self.tool(*command, image.path, *map(hex, addresses))
        lines = [line.rstrip() for line in done.stdout.splitlines() if line]
        self.assertEqual([re.sub(r'(:\d+):0$', r'\1', line) for line in lines],
                         [f'{file}:{line}' for file, (_, _, line) in zip(self.FILES, self.KNOWN)])
        self.assertEqual(done.stderr, '')

    def test_addr2line_tells_file_and_first_line(self):
        self.check_positions(self.binutil('addr2line'), '-e')

    def test_eu_addr2line_tells_file_and_first_line(self):
        self.check_positions('eu-addr2line', '-e')

    def test_llvm_symbolizer_tells_file_and_first_line(self):
        self.check_positions('llvm-symbolizer', '--functions=none', '-e')

    def test_gdb_tells_file_and_first_line(self):
        image, addresses = self.known()
        for file, (_, _, line), address in zip(self.FILES, self.KNOWN, addresses):
            done = self.tool('gdb', '-nx', '-batch', '-ex', f'info line *{address}', image.path)
            self.assertIn(f'Line {line} of "{file}"', done.stdout)

    def test_function_on_line_0_is_not_far_away(self):
        """Generated code may say so."""
        image = self.one_image(positions([('zero', '/zero.py', 0)]))
        address = next(function.address for function in image.functions if function.name == 'py::zero:/zero.py')
        done = self.tool(self.binutil('addr2line'), '-e', image.path, hex(address))
        self.assertRegex(done.stdout, r'\A/zero\.py:[01?]\n\Z')

    def test_decl_file_is_the_function_s_file(self):
        image = self.one_image(positions(self.KNOWN))
        done = self.tool('gdb', '-nx', '-batch', '-ex', 'info functions -q py::h', image.path)
        self.assertIn(f'File {self.FILES[-1]}:', done.stdout)


class UnwindDataTest(ElfTest):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with tempfile.TemporaryDirectory(prefix='elf-images-') as directory:
            perf_support.run(['-c', PRELUDE + ACTIVATE + "function('f')()"],
                             env=os.environ | {'PERF_TRAMPOLINE_DIR': directory})
            cls.image, = map(Image, Path(directory).iterdir())
        cls.fdes = cls.image.fdes()

    def assert_same(self, found, expected):
        """assertEqual() compares long lists for hours."""
        self.assertEqual([pair for pair in zip(found, expected) if pair[0] != pair[1]][:3], [])
        self.assertEqual(len(found), len(expected))

    def test_every_slot_has_an_fde_of_its_range(self):
        size = self.image.functions[0].size
        slots = range(self.image.text.address, self.image.text.address + self.image.text.size, -(-size // 16) * 16)
        self.assert_same([fde[1:3] for fde in self.fdes], [(address, size) for address in slots])

    def test_rows_are_the_golden_ones_in_every_slot(self):
        try:
            import eh_frame
        except archs.Refusal as error:
            self.skipTest(str(error))
        data, order = self.image.content('.eh_frame'), self.image.order
        cie = data[:4 + struct.unpack_from(order + 'I', data)[0]]
        golden = (SOURCE / f'Lib/test/perfdata/rows_{perf_trampoline.status()["architecture"]}.txt').read_text()
        for instructions in {fde[3][8 + 8:] for fde in self.fdes}:
            fde = struct.pack(order + 'II8x', 12 + len(instructions), len(cie) + 4) + instructions
            decoded = eh_frame.decode(cie + fde, self.image.functions[0].size, {'<': 'little', '>': 'big'}[order])
            self.assertEqual(list(map(str, decoded.rows)), re.findall(r'(?m)^\+0x.*', golden))

    def test_search_table_leads_to_every_fde_in_order(self):
        section, data = self.image.sections['.eh_frame_hdr'], self.image.content('.eh_frame_hdr')
        encodings, eh_frame, count = struct.unpack_from(self.image.order + '4siI', data)
        self.assertEqual((encodings, section.address + 4 + eh_frame, count),
                         (b'\1\x1b\3\x3b', self.image.sections['.eh_frame'].address, len(self.fdes)))
        table = [(section.address + location, section.address + fde)
                 for location, fde in struct.iter_unpack(self.image.order + 'ii', data[12:])]
        self.assert_same(table, [(location, address) for address, location, _, _ in self.fdes])
        self.assert_same(table, sorted(table))

    def test_slots_hold_the_same_code(self):
        text, spacing = self.image.content('.text'), self.fdes[1][1] - self.fdes[0][1]
        self.assertEqual(len({text[i:i + spacing] for i in range(0, len(text) - spacing, spacing)}), 1)

    def test_segments_are_never_writable_and_executable(self):
        segments = [(segment.type, segment.flags) for segment in self.image.segments]
        self.assertFalse([segment for segment in segments if segment[1] & (PF_W | PF_X) == PF_W | PF_X])
        self.assertIn((PT_GNU_STACK, PF_R | PF_W), segments)

    def test_unwind_data_has_a_segment(self):
        section = self.image.sections['.eh_frame_hdr']
        self.assertIn((PT_GNU_EH_FRAME, PF_R, section.address, section.size),
                      [(segment.type, segment.flags, segment.address, segment.size) for segment in self.image.segments])

    def test_segments_are_aligned_to_pages(self):
        for segment in self.image.segments:
            if segment.type == PT_LOAD:
                self.assertGreaterEqual(segment.alignment, os.sysconf('SC_PAGE_SIZE'))
                self.assertEqual((segment.offset - segment.address) % segment.alignment, 0)

    def test_there_is_no_build_id(self):
        """It would promise that no name is added."""
        self.assertNotIn(PT_NOTE, [segment.type for segment in self.image.segments])


class MappingTest(ElfTest):

    def test_no_mapping_is_writable_and_executable_and_text_is_never_mapped_writable(self):
        done = self.run_program('''
for i in range(2000):
    function(f'f_{i}')()
    if i % 100 == 0:
        print(open('/proc/self/maps').read())
''')
        first = self.images()[0]
        mappings = [line.split(None, 5) for line in done.stdout.splitlines() if line]
        self.assertEqual([mapping for mapping in mappings if 'w' in mapping[1] and 'x' in mapping[1]], [])
        ours = [mapping for mapping in mappings if mapping[-1] == str(first.path)]
        self.assertIn('r-xp', {mapping[1] for mapping in ours})
        text = range(first.text.offset, first.text.offset + first.text.size)
        for span, mode, offset, *_ in ours:
            start, end = (int(number, 16) for number in span.split('-'))
            if 'w' in mode:
                self.assertGreaterEqual(int(offset, 16), text.stop)

    @unittest.skipIf(EMULATED, 'an emulator makes its own code')
    def test_images_need_no_memory_that_becomes_executable(self):
        done = self.run_program('''
import ctypes
sys.deactivate_stack_trampoline()
libc = ctypes.CDLL(None)
denied = libc.prctl(65, 1, 0, 0, 0)         # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
print(denied)
for backend in 'perf_elf', 'perf':
    sys.activate_stack_trampoline(backend)
    function(backend)()
    print(sys.is_stack_trampoline_active(), status()['failure'])
''')
        denied, *results = done.stdout.splitlines()
        if denied != '0':
            self.skipTest('this kernel has no PR_SET_MDWE')
        self.assertEqual(results[0], 'True None')
        self.assertIn('py::perf_elf:/x.py', self.names())
        self.assertRegex(results[1], '^False .*executable')


class MeaningTest(ElfTest):
    """An address has one meaning, for ever."""

    def test_same_function_compiled_again_takes_no_slot(self):
        self.run_program("for _ in range(10000): function('again', '/again.py', 7)()")
        self.assertEqual(self.names().count('py::again:/again.py'), 1)

    def test_functions_of_one_name_differ_by_line(self):
        self.run_program("for line in range(1, 51): function('twin', '/twin.py', line)()")
        self.assertEqual(self.names().count('py::twin:/twin.py'), 50)

    def test_no_address_is_let_twice(self):
        self.run_program('''
import random
random.seed(1)
alive = [None] * 50
for i in range(20000):
    f = function(f'f_{random.randrange(3000)}'); f()
    alive[random.randrange(50)] = f
''')
        for image in self.images():
            addresses = [function.address for function in image.functions]
            self.assertEqual(len(addresses), len(set(addresses)))

    def test_full_images_are_followed_by_further_ones(self):
        for name, number in ('f', 6000), ('name' * 200, 500):
            with self.subTest(name[:4]):
                done = self.run_program(f"for i in range({number}): function(f'{name}_{{i}}')()")
                self.assertGreater(len(self.images(done.pid)), 1)
                self.assertLessEqual({f'py::{name}_{i}:/x.py' for i in range(number)}, set(self.names(done.pid)))

    def test_status_lists_every_image(self):
        done = self.run_program("for i in range(2000): function(f'f_{i}')()\nprint(*status()['files'], sep='\\n')")
        self.assertEqual(done.stdout.split(), [str(image.path) for image in self.images()])

    @unittest.skipIf(GROWS_ANYWAY, 'an emulator or a sanitizer grows by itself')
    def test_dead_functions_take_no_memory(self):
        growth = perf_support.growth_program(25000, 1_000_000 if FULL else 100_000)
        profiled = int(self.run_program(growth).stdout)
        plain = int(self.run_plain(growth).stdout)
        self.assertLess(profiled - plain, 2048)


class ProcessTest(ElfTest):
    """Threads, forks and kills."""

    def test_every_function_of_every_thread_is_named_at_an_address_of_its_own(self):
        self.run_program('''
def work(number):
    for i in range(2000): function(f'thread_{number}_{i}')()
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
''')
        functions = [function for image in self.images() for function in image.functions]
        self.assertLessEqual({f'py::thread_{n}_{i}:/x.py' for n in range(8) for i in range(2000)},
                             {function.name for function in functions})
        for image in self.images():
            self.assertEqual(len({function.address for function in image.functions}), len(image.functions))

    def test_function_is_named_during_its_first_call(self):
        source = "def first_call():\n  print('ready', flush=True)\n  sys.stdin.read()\nfirst_call()"
        with self.running(source) as process:
            self.assertIn('py::first_call:<string>', self.names(process.pid))

    def test_every_function_that_ran_is_named_after_sigkill(self):
        for process, names in self.killed_programs(PRELUDE + ACTIVATE, env=os.environ | self.env()):
            self.assertLessEqual(names, {name.partition(':/')[0] for name in self.names(process.pid)})

    def test_reader_finds_whole_functions_while_others_are_added(self):
        source = '''
function('f')()
print('ready', flush=True)
for i in range(40000): function(f'f_{i}', f'/{i % 9}.py', i + 1)()
'''
        with self.running(source) as process:
            for _ in range(5 if EMULATED else 200):
                maps = Path(f'/proc/{process.pid}/maps').read_text()
                loaded = re.findall(rf'r-xp .* ({self.directory}/\S+)', maps)
                for path in [max(loaded, key=os.path.getmtime)] if loaded else []:
                    image = Image(path)
                    for function in image.functions:
                        self.assertRegex(function.name, r'^py::.+:.+$')
                        self.assertEqual((function.info, function.section), (GLOBAL_FUNC, 1))
                        self.assertTrue(function.size and image.text.address <= function.address)

    @unittest.skipIf(EMULATED, 'strace sees the emulator')
    def test_file_that_is_called_an_image_is_whole(self):
        """Even when the process is killed while it makes it."""
        done = self.tool('strace', '-f', '-qq', '-o', '/dev/null', '-e', 'inject=fallocate:signal=KILL:when=1', 'env',
                         f'PERF_TRAMPOLINE_DIR={self.directory}', sys.executable, '-c',
                         PRELUDE + ACTIVATE + "function('f')()", check=False)
        self.assertEqual(done.returncode, -signal.SIGKILL)
        self.assertEqual(list(self.directory.glob('*.so')), [])

    def test_forked_child_has_an_image_of_its_own_and_leaves_the_parent_s_alone(self):
        done = self.run_program('''
import hashlib
def content(): return hashlib.sha256(open(path, 'rb').read()).digest()
path = status()['files'][0]
f = function('parent'); f()
content(); before = content()       # called once, it is in the image
if pid := os.fork():
    os.waitpid(pid, 0)
    assert content() == before
    function('parent_later')()
    print(pid)
else:
    for i in range(3000): function(f'child_{i}')()
    f()
    os._exit(0)
''')
        child = self.names(int(done.stdout))
        self.assertLessEqual({f'py::child_{i}:/x.py' for i in range(3000)}, set(child))
        self.assertEqual([name for name in child if 'parent' in name], [])      # the parent's image names it for both
        self.assertIn('py::parent_later:/x.py', self.names(done.pid))
        self.assertFalse([name for name in self.names(done.pid) if 'child' in name])

    @unittest.skipIf(EMULATED, 'too slow')
    def test_forks_beside_threads_that_load_images_do_not_hang(self):
        done = self.run_program('''
stop = False
def work(number):
    i = 0
    while not stop:
        function(f'thread_{number}_{i}')(); i += 1
threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for thread in threads: thread.start()
for _ in range(30):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
    else:
        for i in range(1500): function(f'child_{i}')()
        os._exit(0)
stop = True
''', '-W', 'ignore::DeprecationWarning', timeout=60)
        self.assertEqual(done.stderr, '')


class DirectoryTest(ElfTest):

    SOURCE = "function('f')()\nprint(sys.is_stack_trampoline_active(), *status()['files'])\nprint(status()['failure'])"

    def test_directory_and_files_are_private(self):
        self.directory = self.directory / 'a' / 'b'
        self.run_program('os.umask(0)', '-X', 'perf_elf')
        self.assertEqual({path.stat().st_mode & 0o777 for path in (self.directory, self.directory.parent)}, {0o700})
        self.assertEqual(self.images()[0].path.stat().st_mode & 0o777, 0o600)

    def check_refused(self, directory, reason):
        done = self.run_program(self.SOURCE, env={'PERF_TRAMPOLINE_DIR': str(directory)})
        self.assertRegex(done.stderr, rf'\Aperf trampoline: cannot make images in .*{reason}.*\n\Z')
        self.assertEqual(done.stdout, 'False\n' + done.stderr.removeprefix('perf trampoline: '))

    def test_link_is_refused(self):
        target = self.directory / 'target'
        target.mkdir(0o700)
        (self.directory / 'link').symlink_to(target)
        self.check_refused(self.directory / 'link', 'not a directory of this user alone')
        self.assertEqual(list(target.iterdir()), [])

    def test_directory_that_others_may_write_is_refused(self):
        self.directory.chmod(0o777)
        self.check_refused(self.directory, 'not a directory of this user alone')

    @unittest.skipIf(os.geteuid(), 'only root can leave a directory of another user')
    def test_directory_of_another_user_is_refused(self):
        os.chown(self.directory, 65534, 65534)
        self.check_refused(self.directory, 'not a directory of this user alone')

    def test_file_in_its_place_is_refused(self):
        (self.directory / 'file').touch()
        self.check_refused(self.directory / 'file', 'not a directory')

    def test_limit_on_file_sizes_is_survived(self):
        done = self.run_plain('''
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
''' + ACTIVATE + self.SOURCE)
        self.assertRegex(done.stderr, r'\Aperf trampoline: .*File too large.*\n\Z')
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_option_chooses_the_directory(self):
        for name in 'plain', 'with space', 'größe', os.fsdecode(b'\xff'):
            with self.subTest(name):
                chosen = self.directory / name
                done = self.run_plain('status()', '-X', f'perf_elf={chosen}')
                self.assertEqual(done.stderr, '')
                self.assertEqual(len(list(chosen.glob(f'{done.pid}-1-*.so'))), 1)

    def test_directory_whose_name_would_end_a_list_is_refused_with_a_sentence(self):
        done = self.run_plain('print("fine")', '-X', f'perf_elf={self.directory}/a:b')
        self.assertRegex(done.stderr, r'\Aperf trampoline: .*colon.*a:b\n\Z')
        self.assertEqual((done.stdout, list(self.directory.iterdir())), ('fine\n', []))

    def test_directory_that_perf_takes_for_maps_is_refused_with_a_sentence(self):
        done = self.run_plain('print("fine")', '-X', 'perf_elf=/tmp/perf-images')
        self.assertRegex(done.stderr, r'\Aperf trampoline: perf reads no images in /tmp/perf-images: .*\n\Z')
        self.assertEqual(done.stdout, 'fine\n')
        self.assertFalse(os.path.exists('/tmp/perf-images'))

    def test_status_can_be_read_whatever_the_directory_is_called(self):
        self.directory.chmod(0o777)
        for name in 'ü' * 60, 'u' + 'ü' * 60, os.fsdecode(b'\xff'):
            (self.directory / name).touch()
            done = self.run_program(self.SOURCE, env={'PERF_TRAMPOLINE_DIR': str(self.directory / name)}, check=False,
                                    errors='replace')
            self.assertEqual(done.returncode, 0, done.stderr)


class PurgeTest(ElfTest):
    """An image outlives its process, for the report; what removes it harms nobody."""

    def purge(self):
        return self.run_plain("print(*perf_trampoline.images.purge(), sep='\\n')").stdout.split()

    def test_image_outlives_its_process(self):
        done = self.run_program("function('f')()")
        self.assertIn('py::f:/x.py', self.names(done.pid))

    def test_purge_removes_images_of_ended_processes_only(self):
        ended = self.run_program("function('f')()")
        paths = [str(image.path) for image in self.images(ended.pid)]
        (self.directory / 'other.so').touch()
        with self.running("function('f')()\nprint('ready', flush=True)\nsys.stdin.read()") as process:
            self.assertEqual(self.purge(), paths)
            self.assertEqual(len(self.images(process.pid)), 1)
        self.assertTrue((self.directory / 'other.so').exists())

    def test_purge_leaves_what_a_forked_child_still_runs(self):
        with self.running('''
def child():
    while os.getppid() == parent: time.sleep(0.01)
    print('ready', flush=True)
    sys.stdin.read()
parent = os.getpid()
def f():
    if not os.fork(): child()
    os._exit(0)
f()
''') as process:
            process.wait()
            self.purge()
            self.assertEqual(len(self.images(process.pid)), 1)
            process.stdin.close()

    def test_activation_removes_what_is_a_week_old(self):
        old, new = (self.directory / f'999999999-{i}-1.so' for i in (1, 2))
        for path, days in (old, 8), (new, 6):
            path.touch()
            os.utime(path, (time.time() - days * 24 * 3600,) * 2)
        self.run_program('pass')
        self.assertEqual((old.exists(), new.exists()), (False, True))


class DiskTest(ElfTest):
    """A file system that cannot hold images costs one message; the next directory is used, if there is one."""

    def check_fallback(self, mount_options, reason, number=3000):
        with tempfile.TemporaryDirectory(dir='/var/tmp', prefix='elf-images-') as cache:
            done = ProgramTest.run_in_private_tmp(self, mount_options, PRELUDE + f'''
mount_tmp()
os.environ.pop('PERF_TRAMPOLINE_DIR', None)
os.environ['XDG_CACHE_HOME'] = {cache!r}
sys.activate_stack_trampoline('perf_elf')
for i in range({number}): assert function(f'f_{{i}}')() is None
print(sys.is_stack_trampoline_active(), status()['failure'])
''')
            self.directory = Path(cache) / 'perf-trampoline-images'
            names = set(self.names())
        self.assertRegex(done.stderr, rf'\Aperf trampoline: cannot make images in /tmp/python-perf-\d+: {reason}; '
                                      rf'they are in {cache}/perf-trampoline-images\n\Z')
        self.assertEqual(done.stdout, 'True ' + done.stderr.removeprefix('perf trampoline: '))
        return names

    def run_program(self, source, *options, env=(), **run_options):
        return ProgramTest.run_program(self, source, *options, env=env, **run_options)

    @unittest.skipIf(EMULATED, 'an emulator reads what it executes')
    def test_noexec_directory(self):
        names = self.check_fallback('noexec', 'the file system is mounted noexec, .*')
        self.assertLessEqual({f'py::f_{i}:/x.py' for i in range(3000)}, names)

    def test_read_only_directory(self):
        self.check_fallback('ro', 'Read-only file system')

    def test_full_directory(self):
        for size in 16, 64:
            with self.subTest(size):
                self.check_fallback(f'size={size}k', 'No space left on device')

    def test_directory_that_becomes_full(self):
        names = self.check_fallback('size=600k', 'No space left on device')
        self.assertIn('py::f_2999:/x.py', names)

    @unittest.skipIf(EMULATED, 'an emulator reads what it executes')
    def test_no_usable_directory_stops_profiling_not_the_program(self):
        done = ProgramTest.run_in_private_tmp(self, 'noexec', PRELUDE + '''
mount_tmp()
os.environ['PERF_TRAMPOLINE_DIR'] = '/tmp/images'
sys.activate_stack_trampoline('perf_elf')
for i in range(3000): assert function(f'f_{i}')() is None
print(sys.is_stack_trampoline_active(), status()['failure'], os.listdir('/tmp/images'))
''')
        self.assertRegex(done.stderr, r'\Aperf trampoline: cannot make images in /tmp/images: .*noexec.*\n\Z')
        self.assertEqual(done.stdout, f'False {done.stderr.removeprefix("perf trampoline: ").rstrip()} []\n')


class UnwinderTest(ElfTest):
    """Who walks the stack, of this process or another, comes through the trampolines."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        arch = archs.get(perf_trampoline.status()['architecture'])
        cls.probe_directory = Path(tempfile.mkdtemp(prefix='elf-images-'))
        cls.addClassCleanup(shutil.rmtree, cls.probe_directory)
        cls.compiler = shutil.which(f'{arch.prefix}g++') or (not EMULATED and shutil.which('c++'))
        if not cls.compiler:
            raise unittest.SkipTest('there is no C++ compiler')

    def probe(self, *flags):
        library = self.probe_directory / f'probe{"".join(flags)}.so'
        if not library.exists():
            source = Path(__file__).with_name('perf_unwind_probe.cc')
            subprocess.run([self.compiler, '-O1', '-shared', '-fPIC', '-pthread', '-static-libstdc++', source,
                            '-o', library, *flags], check=True, capture_output=True)
        return library

    def call(self, leaf, *flags, way='one(leaf)', **options):
        """Run a program in which five Python functions call `leaf` of the probe; its output."""
        done = self.run_program(NESTED + f'''
import ctypes
probe = ctypes.CDLL({str(self.probe(*flags))!r})
def leaf(): {leaf}
Callback = ctypes.CFUNCTYPE(None)
callback = Callback(lambda: one(leaf))
{way}
''', **options)
        self.assertEqual(done.stderr, '')
        return done.stdout

    def python_names(self, text):
        return re.findall(r'\bpy::(.+?):<string>', text)[::-1]

    def test_backtrace_shows_names(self):
        out = self.call('probe.print_backtrace()')
        self.assertEqual(self.python_names(out), [*NESTED_NAMES, 'leaf'])

    def test_libunwind_shows_names(self):
        try:
            out = self.call('probe.print_libunwind()', '-DWITH_LIBUNWIND', '-lunwind')
        except subprocess.CalledProcessError:
            self.skipTest('libunwind is missing: install libunwind-dev')
        self.assertEqual(self.python_names(out), [*NESTED_NAMES, 'leaf'])

    def test_cxx_exception_is_caught(self):
        self.assertEqual(self.call('probe.throw_number(42)', way='probe.catch_number(callback)'), 'caught 42\n')

    def test_pthread_exit_unwinds(self):
        self.assertEqual(self.call('probe.exit_thread()', way='probe.join_thread(callback)'), 'unwound\nexited\n')

    def test_pthread_cancel_unwinds(self):
        self.assertEqual(self.call('probe.cancel_thread()', way='probe.join_thread(callback)'), 'unwound\ncancelled\n')

    WAITING = NESTED + "def leaf():\n  print('ready', flush=True)\n  sys.stdin.read()\none(leaf)\n"

    @unittest.skipIf(EMULATED, 'the process is the emulator')
    def test_gdb_shows_names_and_lines(self):
        if os.path.basename(os.readlink('/proc/self/exe')).startswith('ld'):
            self.skipTest('gdb does not find a program behind its loader')
        with self.running(self.WAITING) as process:
            done = self.tool('gdb', '-nx', '-batch', '-p', process.pid, '-ex', 'bt')
        frames = re.findall(r'(?m)^#\d+ .* in py::(.+?):<string> \(\) at <string>:(\d+)$', done.stdout)[::-1]
        first_line = PRELUDE.count('\n') + ACTIVATE.count('\n')
        lines = [first_line + line for line in (2, 3, 5, 5, 7, 8)]
        self.assertEqual([name for name, _ in frames], [*NESTED_NAMES, 'leaf'])
        self.assertEqual([int(line) for _, line in frames], lines)
        self.assertNotIn('corrupt', done.stdout)

    @unittest.skipIf(EMULATED, 'the process is the emulator')
    def test_eu_stack_shows_names(self):
        with self.running(self.WAITING) as process:
            done = self.tool('eu-stack', '-p', process.pid, check=False)
        self.assertEqual(self.python_names(done.stdout), [*NESTED_NAMES, 'leaf'])

    @unittest.skipIf(EMULATED, 'the process is the emulator')
    def test_loader_that_waits_for_the_interpreter_lock_does_not_wait_for_ever(self):
        done = self.run_program(f'''
import ctypes, shutil
library = {str(self.probe('-DWAITS_FOR_GIL'))!r}
def load():
    for i in range(100):
        shutil.copy(library, f'{self.directory}/{{i}}.lib')
        ctypes.CDLL(f'{self.directory}/{{i}}.lib')
sys.setswitchinterval(1e-5)
thread = threading.Thread(target=load)
thread.start()
i = 0
while thread.is_alive():
    function(f'{"name" * 500}_{{i}}')()
    i += 1
print(i)
''', timeout=60)
        self.assertGreater(len(self.images()), 2)
        self.assertIn(f'py::{"name" * 500}_{int(done.stdout) - 1}:/x.py', self.names())


class CheckerTest(ElfTest):
    """Programs that watch memory accept the images."""

    SOURCE = NESTED + "for i in range(1500): function(f'f_{i}')()\none(lambda: print('fine'))\n"

    @unittest.skipIf(EMULATED, 'the process is the emulator')
    def test_valgrind(self):
        program = self.directory / 'program.py'
        program.write_text(PRELUDE + ACTIVATE + self.SOURCE)
        # An interpreter may be started by a script.
        command = 'valgrind', '--trace-children=yes'
        # It may want debugging symbols of the interpreter's C library, which is not this machine's.
        memcheck = FULL and 'Fatal error at startup' not in self.tool(*command, sys.executable, '-c', '', check=False).stderr
        done = self.tool('env', f'PERF_TRAMPOLINE_DIR={self.directory}', 'PYTHONMALLOC=malloc', *command,
                         *([] if memcheck else ['--tool=none']), sys.executable, program)
        self.assertEqual(done.stdout, 'fine\n')
        self.assertRegex(done.stderr, 'ERROR SUMMARY: 0 errors' if memcheck else r'==\d+== \n\Z')
        self.assertIn('py::f_1499:/x.py', self.names())


# `leaf` works until the standard input has a line or ends.
BUSY = NESTED + '''
import select
poll = select.poll()        # select() takes more stack than perf copies
poll.register(0)
def leaf():
    while not poll.poll(0):
        for i in range(10000): pass
'''


@unittest.skipIf(EMULATED or IN_ROOT, 'perf sees the emulator, or the loader')
class ProfilerTest(ElfTest, test_perf_profiler.Profiles):
    """perf record, then perf script: with nothing between and no option for our sake."""

    def setUp(self):
        ElfTest.setUp(self)
        test_perf_profiler.Profiles.setUp(self)

    def check_profile(self, version=None, suite=None, **options):
        python, env = perf_support.interpreter(version) if version else ((sys.executable,), os.environ)
        try:
            perf = roots.perf(suite) if suite else ('perf',)
        except roots.Unavailable as error:
            self.skipTest(str(error))
        super().check_profile('perf_elf', python=python, env=env | self.env(), perf=perf,
                              frame_pointers=version == '3.15', **options)

    def test_dwarf_stacks_are_whole(self):
        self.check_profile()

    def test_dwarf_stacks_are_whole_on_3_13(self):
        self.check_profile('3.13', 'sid')

    @unittest.skipUnless(FULL, '3.13 and 3.15 are enough for every day')
    def test_dwarf_stacks_are_whole_on_3_14(self):
        self.check_profile('3.14', 'sid')

    def test_dwarf_stacks_are_whole_on_3_15(self):
        self.check_profile('3.15', 'sid')

    def test_frame_pointer_stacks_are_whole_on_3_15(self):
        self.check_profile('3.15', 'sid', call_graph='fp', mode='fp')

    def perfs(self):
        """The machine's perf, and a recent one, where they can be had."""
        yield ('perf',)
        with contextlib.suppress(roots.Unavailable):
            yield roots.perf('sid')

    def record(self, *options, perf=('perf',), home=None):
        """A recording's path; an attached perf ends after a second."""
        data = self.directory / f'{time.monotonic_ns()}.data'
        env = os.environ | self.env({'HOME': str(home or self.directory), 'PERF_CONFIG': '/dev/null'})
        done = subprocess.run([*perf, 'record', '-o', data, '-e', perf_script.EVENT, '-F', '250', '--call-graph',
                               'dwarf,32768', *map(str, options)], env=env, stdin=subprocess.DEVNULL, text=True,
                              capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return data

    def record_program(self, source, **options):
        return self.record('--', sys.executable, '-c', PRELUDE + ACTIVATE + source, **options)

    def check_attached(self, *options):
        with self.running(BUSY + "print('ready', flush=True)\none(leaf)") as process:
            target = [process.pid if option == 'PID' else option for option in options]
            data = self.record(*target, '--', 'sleep', '2')
        stacks = [[name[0] for frame in reversed(sample.stack) if (name := perf_script.python_name(frame))]
                  for sample in perf_script.samples(data) if sample.pid == process.pid]
        self.assertGreater(len(stacks), 50)
        self.assertGreaterEqual(stacks.count([*NESTED_NAMES, 'leaf']), 0.99 * len(stacks))

    def test_running_process_can_be_recorded(self):
        self.check_attached('-p', 'PID')

    @unittest.skipIf(os.geteuid(), 'only root may record the whole system')
    def test_whole_system_can_be_recorded(self):
        self.check_attached('-a')

    def test_source_lines_are_known(self):
        first_line = (PRELUDE + ACTIVATE).count('\n')
        for perf in self.perfs():
            with self.subTest(perf[-1]):
                data = self.record_program(NESTED + 'one(lambda: sum(i & 3 for i in range(5 * 10 ** 6)))', perf=perf)
                done = self.tool(*perf, 'script', '-i', data, '-F', 'ip,sym,srcline', check=False)
                for name, line in ('one', 2), ('two', 3), ('four', 7):
                    self.assertRegex(done.stdout, rf'py::{name}:<string>.*\n\s+<string>:{first_line + line}\n')

    def test_function_that_died_keeps_its_share(self):
        """10 000 others have been named since."""
        data = self.record_program('''
def dead():
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for i in range(10000): pass
dead(); del dead
for i in range(10000): function(f'later_{i}')()
''')
        leaves = [next(filter(None, map(perf_script.python_name, sample.stack)), ('none',))[0]
                  for sample in perf_script.samples(data)]
        self.assertGreater(leaves.count('dead'), 0.6 * len(leaves))

    def test_function_named_before_a_fork_has_its_name_in_the_child(self):
        data = self.record_program('''
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        for i in range(10000): pass
burn(0.1)
if pid := os.fork(): os.waitpid(pid, 0)
else: burn(1)
''')
        by_process = collections.defaultdict(collections.Counter)
        for sample in perf_script.samples(data):
            name = next(filter(None, map(perf_script.python_name, sample.stack)), ('none',))[0]
            by_process[sample.pid][name] += 1
        child = max(by_process)
        self.assertEqual(len(by_process), 2)
        self.assertGreater(by_process[child]['burn'], 0.9 * sum(by_process[child].values()))
        self.assertNotIn('py::burn:<string>', self.names(child))

    def test_second_recording_of_a_process_names_what_was_new(self):
        """perf keeps copies of what has a build-id, and would go on to use the first."""
        source = BUSY + '''
print('ready', flush=True)
for name in 'first', 'second':
    namespace = {'leaf': leaf}
    exec(compile(f'def {name}(leaf): leaf()', '/new.py', 'exec'), namespace)
    namespace[name](leaf)
    sys.stdin.readline()
'''
        for perf in self.perfs():
            with self.subTest(perf[-1]), tempfile.TemporaryDirectory(dir='/dev/shm') as home:
                self.assertNotEqual(os.stat(home).st_dev, self.directory.stat().st_dev)
                datas = []
                with self.running(source) as process:
                    for _ in range(2):
                        datas.append(self.record('-p', process.pid, '--', 'sleep', '1', perf=perf, home=home))
                        print(file=process.stdin, flush=True)
                for name, data in zip(('first', 'second'), datas):
                    done = self.tool('env', f'HOME={home}', 'PERF_CONFIG=/dev/null', *perf, 'script', '-i', data,
                                     '-F', 'ip,sym,dso', check=False)
                    self.assertGreater(done.stdout.count(f'py::{name}:/new.py'), 20)
                    self.assertNotIn(f'[unknown] ({self.directory}', done.stdout)


if __name__ == '__main__':
    unittest.main()
