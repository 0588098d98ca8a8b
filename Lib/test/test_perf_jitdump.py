"""The jitdump: what perf inject, and every other reader of /tmp/jit-PID.dump, may count on.

Programs run under the interpreter that runs this file; Tools/perf/jitdump.py reads what they wrote. That reader refuses
what perf would forgive, and is tested first.
"""

import dataclasses
import glob
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
import test_perf_map
from perf_support import EMULATED, GROWS_ANYWAY, SOURCE, ProgramTest

import jitdump
from jitdump import CodeClose, CodeDebugInfo, CodeLoad, CodeMove, CodeUnwindingInfo, DebugEntry, JitdumpError

PRELUDE = f'''\
import json, os, sys, time, types
sys.path.insert(0, {str(SOURCE / "Tools/perf")!r})
def path():
    return f'/tmp/jit-{{os.getpid()}}.dump'
def function(qualname, filename='/x.py', plain=(lambda: None).__code__):
    return types.FunctionType(plain.replace(co_name='f', co_qualname=qualname, co_filename=filename), {{}})
'''
ACTIVATE = "sys.activate_stack_trampoline('perf_jit')\n"


def align(number, unit):
    return -(-number // unit) * unit


class ReaderTest(unittest.TestCase):
    """A dump made by hand from the specification is read; each way to spoil it is refused."""

    CODE, EH_FRAME, EH_FRAME_HDR = b'code', b'eh_frame', b'header'

    def dump(self, order='<', **change):
        """The pieces of a dump by name; `change` replaces some."""
        def record(id, layout, *numbers, tail=b''):
            body = struct.pack(order + layout, *numbers) + tail
            return struct.pack(f'{order}IIQ', id, 16 + len(body), 7) + body
        return {
            'header': struct.pack(order + 'IIIIIIQQ', 0x4A695444, 1, 40, 62, 0, 1000, 5, 0),
            'unwinding': record(4, 'QQQ', 14, 6, 16, tail=self.EH_FRAME + self.EH_FRAME_HDR + bytes(3)),
            'debug': record(2, 'QQ', 0x7000, 2, tail=(struct.pack(order + 'QII', 0x7000, 3, 0) + b'/x.py\0'
                                                      + struct.pack(order + 'QII', 0x7001, 4, 0) + b'\xff\0')),
            'load': record(0, 'IIQQQQ', 1000, 1001, 0x7000, 0x7000, 4, 9, tail=b'py::\xff\0' + self.CODE),
            'move': record(1, 'IIQQQQQ', 1000, 1001, 0x7000, 0x7000, 0x8000, 4, 9),
            'close': record(3, ''),
        } | change

    def read(self, pieces):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b''.join(pieces.values()) if isinstance(pieces, dict) else pieces)
            file.flush()
            return jitdump.read(file.name)

    def check_refused(self, reason, pieces):
        with self.assertRaisesRegex(JitdumpError, f'^offset 0x[0-9a-f]+: .*{reason}'):
            self.read(pieces)

    def test_every_record_is_read_in_both_byte_orders(self):
        for order, byteorder in ('<', 'little'), ('>', 'big'):
            header, records = self.read(self.dump(order))
            self.assertEqual(dataclasses.astuple(header), (1, 40, 62, 0, 1000, 5, 0, byteorder, True))
            self.assertEqual(records, [
                CodeUnwindingInfo(40, 57, 7, 14, 6, 16, self.EH_FRAME, self.EH_FRAME_HDR),
                CodeDebugInfo(97, 72, 7, 0x7000, 2,
                              [DebugEntry(0x7000, 3, 0, '/x.py'), DebugEntry(0x7001, 4, 0, '/x.py')]),
                CodeLoad(169, 66, 7, 1000, 1001, 0x7000, 0x7000, 4, 9, 'py::\udcff', self.CODE),
                CodeMove(235, 64, 7, 1000, 1001, 0x7000, 0x7000, 0x8000, 4, 9),
                CodeClose(299, 16, 7),
            ])

    def test_unused_room_makes_a_dump_incomplete(self):
        for room in bytes(8), bytes(4096), bytes(8) + b'half a record':
            header, records = self.read(b''.join(self.dump().values()) + room)
            self.assertFalse(header.complete)
            self.assertEqual(len(records), 5)

    def test_dump_cut_anywhere_but_between_records_is_refused(self):
        whole, ends = b'', {0}
        for piece in self.dump().values():
            whole += piece
            ends.add(len(whole))
        for size in range(len(whole)):
            with self.subTest(size=size):
                if size in ends - {0}:
                    self.read(whole[:size])
                else:
                    self.check_refused('', whole[:size])

    def test_other_header_is_refused(self):
        good = self.dump()['header']
        for offset, value in (0, 0), (4, 2), (8, 48), (16, 1), (32, 2):
            with self.subTest(offset=offset):
                self.check_refused('', {'header': good[:offset] + struct.pack('<I', value) + good[offset + 4:]})

    def test_record_of_another_size_is_refused(self):
        for name, piece in self.dump().items():
            if name != 'header':
                for change in -8, 8:
                    with self.subTest(name, change=change):
                        size = struct.pack('<I', len(piece) + change)
                        self.check_refused('', self.dump(**{name: piece[:4] + size + piece[8:], 'end': bytes(8)}))

    def test_unknown_record_is_refused(self):
        self.check_refused('unknown record id 5', self.dump(close=struct.pack('<IIQ', 5, 16, 7)))

    def test_unended_name_is_refused(self):
        self.check_refused('not ended', self.dump(load=self.dump()['load'].replace(b'\0code', b'!code')))

    def test_wrong_unwinding_sizes_are_refused(self):
        good = self.dump()['unwinding']
        for sizes in (6, 6, 16), (14, 0, 16), (14, 15, 16), (18, 6, 18), (8, 6, 16), (14, 6, 13):
            with self.subTest(sizes):
                self.check_refused('', self.dump(unwinding=good[:16] + struct.pack('<QQQ', *sizes) + good[40:]))

    def test_padding_that_is_not_zero_is_refused(self):
        self.check_refused('padding', self.dump(unwinding=self.dump()['unwinding'][:-1] + b'!'))


class DumpTest(ProgramTest):

    def run_program(self, source, *options, **run_options):
        return super().run_program(PRELUDE + ACTIVATE + source, *options, **run_options)

    def read(self, process, complete=True):
        """The header and the functions of the dump, each function as its three records."""
        header, records = jitdump.read(f'/tmp/jit-{process.pid}.dump')
        self.assertEqual(header.complete, complete)
        return header, self.functions(records)

    def functions(self, records):
        """One UNWINDING_INFO and one DEBUG_INFO apply to each LOAD, and stand before it."""
        self.assertEqual([type(record) for record in records],
                         [CodeUnwindingInfo, CodeDebugInfo, CodeLoad] * (len(records) // 3))
        return list(zip(*[iter(records)] * 3))

    def names(self, functions):
        return [load.name for _, _, load in functions]

    def ours(self, functions):
        """Those between functions named `begin` and `end`: the interpreter calls some of its own before and after."""
        begin, end = (next(i for i, name in enumerate(self.names(functions)) if name.startswith(f'py::{mark}:'))
                      for mark in ('begin', 'end'))
        return functions[begin + 1:end]


class RecordTest(DumpTest):
    """The records of one program, which calls some functions and ends."""

    def setUp(self):
        super().setUp()
        self.start = time.monotonic_ns()
        self.process = self.run_program('''
function('begin')()
for i in range(100): function(f'f_{i}', f'/x_{i}.py')()
function('end')()
''')
        self.end = time.monotonic_ns()
        self.header, self.all = self.read(self.process)

    def test_every_function_is_named(self):
        self.assertEqual(self.names(self.ours(self.all)), [f'py::f_{i}:/x_{i}.py' for i in range(100)])

    def test_header_tells_machine_process_and_clock(self):
        elf = Path('/proc/self/exe').read_bytes()[:20]
        byteorder = {1: 'little', 2: 'big'}[elf[5]]
        machine = int.from_bytes(elf[18:20], byteorder)
        self.assertEqual((self.header.elf_mach, self.header.pid, self.header.flags, self.header.byteorder),
                         (machine, self.process.pid, 0, byteorder))

    def test_time_stamps_ascend_on_the_monotonic_clock(self):
        stamps = [self.start, self.header.timestamp,
                  *(record.timestamp for function in self.all for record in function), self.end]
        self.assertEqual(stamps, sorted(stamps))

    def test_loads_tell_process_thread_and_a_number_of_their_own(self):
        loads = [load for _, _, load in self.all]
        self.assertEqual({(load.pid, load.tid) for load in loads}, {(self.process.pid,) * 2})
        self.assertEqual([load.code_index for load in loads], list(range(len(loads))))

    def test_debug_info_is_the_first_line_of_the_same_code(self):
        for _, debug, load in self.ours(self.all):
            self.assertEqual((load.vma, debug.code_addr, debug.entries),
                             (load.code_addr, load.code_addr,
                              [DebugEntry(load.code_addr, 5, 0, load.name.rpartition(':')[2])]))

    def test_codes_differ_only_in_a_tail(self):
        """perf may derive a build-id from the code, and merges files that have the same."""
        codes = [load.code for _, _, load in self.all]
        self.assertEqual(len(set(codes)), len(codes))
        self.assertEqual(len({code[:-8] for code in codes}), 1)

    def test_groups_begin_at_multiples_of_8(self):
        self.assertEqual({unwinding.offset % 8 for unwinding, _, _ in self.all}, {0})

    def test_fde_covers_exactly_the_code(self):
        order = {'little': '<', 'big': '>'}[self.header.byteorder]
        for unwinding, _, load in self.all:
            # The CIE's length leads to the FDE: length, CIE pointer, initial_location (relative to itself), range.
            fde = 4 + struct.unpack_from(order + 'I', unwinding.eh_frame)[0]
            length, cie_pointer, location, address_range = struct.unpack_from(order + 'IIiI', unwinding.eh_frame, fde)
            self.assertEqual((fde + 4 + length, cie_pointer), (len(unwinding.eh_frame), fde + 4))
            self.assertEqual((location, address_range), (-align(load.code_size, 8) - (fde + 8), load.code_size))

    def test_eh_frame_hdr_finds_the_fde(self):
        order = {'little': '<', 'big': '>'}[self.header.byteorder]
        for unwinding, _, load in self.all:
            eh_frame = unwinding.eh_frame
            fde = 4 + struct.unpack_from(order + 'I', eh_frame)[0]
            self.assertEqual(len(eh_frame) % 4, 0)
            self.assertEqual(struct.unpack(order + '4BiIii', unwinding.eh_frame_hdr),
                             (1, 0x1b, 0x03, 0x3b, -len(eh_frame) - 4, 1,
                              -align(load.code_size, 8) - len(eh_frame), fde - len(eh_frame)))

    def test_unwind_data_of_one_slot_does_not_reach_the_next(self):
        spans = sorted({(load.code_addr, load.code_addr + align(load.code_size, 8) + unwinding.mapped_size)
                        for unwinding, _, load in self.all})
        for (_, end), (start, _) in zip(spans, spans[1:]):
            self.assertLessEqual(end, start)

    def test_unwind_data_is_mapped(self):
        """Without that perf's libunwind cannot read it."""
        for unwinding, _, _ in self.all:
            self.assertGreaterEqual(unwinding.mapped_size, unwinding.unwinding_size)

    def test_command_line_prints_every_record(self):
        tool = [sys.executable, SOURCE / 'Tools/perf/jitdump.py', f'/tmp/jit-{self.process.pid}.dump']
        done = subprocess.run(tool, capture_output=True, text=True)
        if 'pyelftools is missing' in done.stderr:
            self.skipTest('this interpreter has no pyelftools')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        for kind in 'UNWINDING_INFO', 'DEBUG_INFO', 'LOAD':
            self.assertEqual(done.stdout.count(f'JIT_CODE_{kind}\n'), len(self.all))
        self.assertIn('+0x00  CFA=r', done.stdout)


class FileTest(DumpTest):

    def test_dumped_code_is_the_running_code(self):
        done = self.run_program('''
import ctypes, jitdump
function('f')()
_, records = jitdump.read(path())
load = next(record for record in records if getattr(record, 'name', '') == 'py::f:/x.py')
print(ctypes.string_at(load.code_addr, load.code_size - 8).hex(), load.code.hex())
''')
        running, dumped = map(bytes.fromhex, done.stdout.split())
        self.assertTrue(running.strip(b'\0'))
        self.assertEqual(running, dumped[:-8])

    def test_running_code_lies_in_memory_that_perf_has_been_told_of(self):
        """An executable mapping that is not writable; and one of the dump itself, from which perf learns of it.

        perf inject would read the whole dump again for each further mapping of that name.
        """
        done = self.run_program('''
import jitdump
function('f')()
print(next(r.code_addr for r in jitdump.read(path())[1] if getattr(r, 'name', '') == 'py::f:/x.py'))
print(open('/proc/self/maps').read())
''')
        address, _, maps = done.stdout.partition('\n')
        maps = [line.split() for line in maps.splitlines() if line]
        modes = [mode for span, mode, *_ in maps
                 if int(span.split('-')[0], 16) <= int(address) < int(span.split('-')[1], 16)]
        self.assertEqual([mode[:3] for mode in modes], ['r-x'])
        self.assertEqual([fields[1] for fields in maps if fields[-1] == f'/tmp/jit-{done.pid}.dump'], ['r-xp'])

    def test_record_is_there_during_first_call(self):
        done = self.run_program('''
def first_call():
    import subprocess
    print(b'py::first_call:<string>' in subprocess.run(['cat', path()], stdout=subprocess.PIPE).stdout)
first_call()
''')
        self.assertEqual(done.stdout, 'True\n')

    def test_only_the_user_may_read_it(self):
        done = self.run_program("os.umask(0); sys.deactivate_stack_trampoline()\nfunction('f')()")
        self.assertEqual(Path(f'/tmp/jit-{done.pid}.dump').stat().st_mode & 0o777, 0o600)

    def test_threads_have_their_own_numbers(self):
        done = self.run_program('''
import threading
def work():
    for i in range(100): function(f'f_{threading.get_native_id()}')()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
''')
        _, functions = self.read(done)
        loads = [load for _, _, load in functions if load.name.startswith('py::f_')]
        self.assertEqual(len(loads), 800)
        self.assertEqual([load for load in loads if load.name != f'py::f_{load.tid}:/x.py'], [])

    def test_forked_child_has_a_dump_of_its_own(self):
        done = self.run_program('''
function('parent')()
if pid := os.fork():
    os.waitpid(pid, 0)
    function('parent_later')()
    print(pid)
else:
    function('child')()
''')
        child = type(done)((), 0)
        child.pid = int(done.stdout)
        self.addCleanup(perf_support.remove_files, child.pid)
        for process, expected in (done, {'parent', 'parent_later'}), (child, {'child'}):
            header, functions = self.read(process)
            numbers = {number for _, _, load in functions for number in (load.pid, load.tid)}
            self.assertEqual({header.pid} | numbers, {process.pid})
            names = self.names(functions)
            self.assertEqual({name for name in ('parent', 'parent_later', 'child') if f'py::{name}:/x.py' in names},
                             expected)

    def test_records_are_whole_after_sigkill(self):
        for process, names in self.killed_programs(PRELUDE + ACTIVATE):
            _, functions = self.read(process, complete=False)
            self.assertLessEqual(names, {name.partition(':/')[0] for name in self.names(functions)})

    def read_hostile(self, *names):
        """Names and debug information's file names of functions whose names and paths are hostile."""
        done = self.run_program('for name in json.load(sys.stdin): function(name, name)()',
                                input=json.dumps(['begin', *names, 'end']))
        functions = self.ours(self.read(done)[1])
        return self.names(functions), [debug.entries[0].name for _, debug, _ in functions]

    def test_paths_are_those_of_the_file_system(self):
        paths = ['/a\nb', '/a;b\\c d', '/ü\x80\u2028', '/\udcff', '']
        self.assertEqual(self.read_hostile(*paths)[1], paths)

    def test_names_that_no_file_has_leave_records_whole(self):
        names, _ = self.read_hostile('a\0b', '\ud800', '\udcff', 'x' * 20000)
        self.assertEqual([name[:9] for name in names], ['py::a\\x00', 'py::\\ud80', 'py::\\xff:', 'py::xxxxx'])

    def test_interpreters_own_dump_gives_way_to_ours(self):
        """From 3.13 on the interpreter opens one before us, and writes to it again at exit."""
        for options, env in (['-X', 'perf_jit'], {}), ([], {'PYTHON_PERF_JIT_SUPPORT': '1'}):
            done = ProgramTest.run_program(self, 'def f(): pass\nf()', *options, env=env)
            self.assertIn('py::f:<string>', self.names(self.read(done)[1]))
            self.assertEqual(glob.glob(f'/tmp/*-{done.pid}.dump'), [f'/tmp/jit-{done.pid}.dump'])


class CreationTest(test_perf_map.CreationTest):

    BACKEND, PATH = 'perf_jit', '/tmp/jit-{}.dump'

    def names(self, pid):
        return {getattr(record, 'name', '') for record in jitdump.read(self.PATH.format(pid))[1]}


class TroubleTest(ProgramTest):
    """A file system that cannot take the dump costs names, and nothing else."""

    SOURCE = PRELUDE + '''
import jitdump
mount_tmp()
sys.activate_stack_trampoline('perf_jit')
for i in range(3000):
    assert function(f'f_{i}')() is None
print(sys.is_stack_trampoline_active(), perf_trampoline.status()['failure'])
print(os.path.exists(path()) and sum(getattr(r, 'name', '').startswith('py::f_') for r in jitdump.read(path())[1]))
'''

    def check_one_message(self, mount_options, reason, num_functions):
        done = self.run_in_private_tmp(mount_options, self.SOURCE)
        self.assertRegex(done.stderr, rf'\Aperf trampoline: .*{reason}.*\n\Z')
        failure = done.stderr.removeprefix('perf trampoline: ')
        self.assertRegex(done.stdout, rf'\AFalse {re.escape(failure)}{num_functions}\n\Z')

    def test_noexec_tmp_leaves_no_file(self):
        """perf would not find the dump."""
        if EMULATED:
            self.skipTest('an emulator maps nothing as executable')
        self.check_one_message('noexec', 'noexec', False)

    def test_read_only_tmp(self):
        self.check_one_message('ro', 'Read-only file system', False)

    def test_full_disk_leaves_whole_records(self):
        self.check_one_message('size=4k', 'No space left on device', r'1\d')
        self.check_one_message('size=300k', 'No space left on device', r'1\d{3}')


class GrowthTest(DumpTest):

    def test_dead_functions_make_place_for_others(self):
        done = self.run_program('for i in range(20000): function(f"f_{i}")()')
        _, functions = self.read(done)
        loads = [load for _, _, load in functions if load.name.startswith('py::f_')]
        self.assertCountEqual([load.name for load in loads], [f'py::f_{i}:/x.py' for i in range(20000)])
        self.assertLess(len({load.code_addr for load in loads}), 10)

    @unittest.skipIf(GROWS_ANYWAY, 'an emulator or a sanitizer grows by itself')
    def test_dead_functions_take_no_memory(self):
        growth = perf_support.growth_program(5000, 100000)
        profiled = int(self.run_program(growth).stdout)
        plain = int(ProgramTest.run_program(self, PRELUDE + growth).stdout)
        self.assertLess(profiled - plain, 1024)      # KiB; 100000 slots take 1.6 MB and more


if __name__ == '__main__':
    unittest.main()
