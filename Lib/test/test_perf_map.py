"""The perf map: what whoever reads /tmp/perf-PID.map may count on.

Programs run under the interpreter that runs this file. They switch the trampoline on themselves: with -X perf an
interpreter that has one of its own begins the map, in its own style.
"""

import json
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
from perf_support import EMULATED, GROWS_ANYWAY, ProgramTest

PRELUDE = '''\
import os, sys, time, types
def path():
    return f'/tmp/perf-{os.getpid()}.map'
def function(qualname, filename='/x.py', plain=(lambda: None).__code__):
    return types.FunctionType(plain.replace(co_name='f', co_qualname=qualname, co_filename=filename), {})
def failure():
    import perf_trampoline
    return perf_trampoline.status()['failure']
'''
ACTIVATE = "sys.activate_stack_trampoline('perf')\n"


def parse(text, killed=False):
    """The names in a map by their addresses; ValueError unless every line is whole and every address has one meaning.

    What was being written when the process was `killed` may be a START or a NAME alone: readers skip these.
    """
    names, ends = {}, []
    for line in text.split('\n'):
        if line and not (killed and ' ' not in line):
            if not re.fullmatch(r'[0-9a-f]+ [0-9a-f]+ (py::.*:.*|theirs_number_\d+)', line):
                raise ValueError(f'not an entry: {line!r}')
            start, size, name = line.split(' ', 2)
            start, size = int(start, 16), int(size, 16)
            if start in names or not size:
                raise ValueError(f'{name} and {names.get(start)} are {size} bytes at {start:#x}')
            names[start] = name
            ends.append((start, start + size))
    ends.sort()
    for (_, end), (start, _) in zip(ends, ends[1:]):
        if end > start:
            raise ValueError(f'{names[start]} begins within another')
    return names


def unescape(name):
    """The text that an escaped name stands for: file name bytes that were not UTF-8 become surrogates, as in Python."""
    def character(match):
        number = int(match[1] or match[2], 16)
        return chr(number + 0xdc00 if match[1] and number >= 0x80 else number)
    return re.sub(r'\\x(..)|\\u(....)', character, name)


class MapTest(ProgramTest):

    def run_program(self, source, *options, **run_options):
        return super().run_program(PRELUDE + ACTIVATE + source, *options, **run_options)

    def names(self, process, killed=False):
        return list(parse(Path(f'/tmp/perf-{process.pid}.map').read_text('utf-8'), killed).values())


class EntryTest(MapTest):

    def names_of(self, *functions):
        """The names in the map of a program that calls functions of these qualified and file names."""
        mark = 'begin', 'end'       # the interpreter calls functions of its own before and after
        done = self.run_program('''
import json
for names in json.load(sys.stdin): function(*names)()
''', input=json.dumps([mark, *functions, mark[::-1]]))
        names = self.names(done)
        return names[names.index('py::begin:end') + 1:names.index('py::end:begin')]

    def test_entry_is_start_size_and_name(self):
        done = self.run_program("function('C.f')()")
        self.assertRegex(Path(f'/tmp/perf-{done.pid}.map').read_text(),
                         r'(?m)^[1-9a-f][0-9a-f]{7,} [0-9a-f]{1,2} py::C\.f:/x\.py$')

    def test_hostile_names_stay_whole(self):
        names = ['a\nb', 'a\rb', 'a\0b', 'a;b', 'a\\b', 'a\\x0ab', 'a\tb', 'a b', 'a\x7fb', 'a\x85b', 'a\u2028b',
                 'a\u2029b', 'a\ud800b', 'a\udfffb', 'größe', '\U0001f40d', '\uffff', '名前', '', 'a\n7f00 10 py::b']
        names = [(name, '/x.py') for name in names] + [('f', name) for name in [*names, '/\udcff\udc80/x.py']]
        self.assertEqual([unescape(name) for name in self.names_of(*names)],
                         [f'py::{qualname}:{filename}' for qualname, filename in names])

    def test_readable_names_stay_readable(self):
        self.assertEqual(self.names_of(('C.größe.<locals>.<lambda>', '/ü/~a-b_c,(d)[e]{f}.py')),
                         ['py::C.größe.<locals>.<lambda>:/ü/~a-b_c,(d)[e]{f}.py'])

    def test_semicolon_that_folded_stacks_would_split_on_is_escaped(self):
        self.assertEqual(self.names_of(('f', '/a;b.py')), [r'py::f:/a\x3bb.py'])

    def test_long_name_keeps_its_head_and_long_path_its_tail(self):
        for letter in 'a', '\n', '\U0001f40d':
            with self.subTest(letter):
                name, = self.names_of(('head' + letter * 20000, letter * 20000 + 'tail.py'))
                self.assertRegex(unescape(name), f'(?s)^py::head{letter}+:{letter}+tail.py$')
                self.assertGreater(len(name.encode()), 8000)

    def test_name_of_4000_characters_is_not_cut(self):
        self.assertEqual(self.names_of(('f' * 4000, '/' + 'x' * 4000)), [f'py::{"f" * 4000}:/{"x" * 4000}'])

    def test_entries_are_ended(self):
        """perf drops the last character of a file that does not end in a newline."""
        done = self.run_program("function('f')()")
        self.assertEqual(Path(f'/tmp/perf-{done.pid}.map').read_bytes()[-1:], b'\n')


class TimeTest(MapTest):
    """Entries are there when somebody looks, whatever becomes of the program."""

    def test_entry_is_there_during_first_call(self):
        done = self.run_program('''
def first_call():
    import subprocess
    print(subprocess.run(['cat', path()], stdout=subprocess.PIPE, text=True).stdout)
first_call()
''')
        self.assertIn('py::first_call:<string>', parse(done.stdout).values())

    def test_every_function_that_ran_is_named_after_sigkill(self):
        for process, names in self.killed_programs(PRELUDE + ACTIVATE):
            self.assertLessEqual(names, {name.partition(':/')[0] for name in self.names(process, killed=True)})

    def test_every_function_of_every_thread_is_named(self):
        done = self.run_program('''
import threading
def work(number):
    for i in range(200):
        function(f'thread_{number}_{i}')()
threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
''')
        expected = {f'py::thread_{n}_{i}:/x.py' for n in range(16) for i in range(200)}
        self.assertLessEqual(expected, set(self.names(done)))

    def test_function_called_again_after_a_pause_is_not_named_again(self):
        done = self.run_program('''
f = function('again'); f()
for _ in range(100):
    sys.deactivate_stack_trampoline(); f(); sys.activate_stack_trampoline('perf'); f()
''')
        self.assertEqual(self.names(done).count('py::again:/x.py'), 1)


class SharedFileTest(MapTest):
    """Others may append to the map: CPython's own API does, and other compilers in the process."""

    def check_interleaved(self, done):
        names = self.names(done)
        self.assertEqual({name for name in names if 'number' in name},
                         {f'{who}_number_{i}' + ':/x.py' * (who == 'py::ours')
                          for who in ('py::ours', 'theirs') for i in range(3000)})

    def test_lines_of_an_appender_stay_whole(self):
        self.check_interleaved(self.run_program('''
import subprocess
other = subprocess.Popen([sys.executable, '-c', f"""
import os
fd = os.open('{path()}', os.O_WRONLY | os.O_APPEND)
for i in range(3000):
    os.write(fd, b'%x 1 theirs_number_%d\\\\n' % (i + 1, i))
"""])
for i in range(3000):
    function(f'ours_number_{i}')()
assert other.wait() == 0
'''))

    @unittest.skipUnless(sys.version_info >= (3, 12), 'the API is new in 3.12')
    def test_lines_of_cpythons_own_writer_stay_whole(self):
        for ours_first in True, False:
            with self.subTest(ours_first=ours_first):
                self.check_interleaved(self.run_program(f'''
import ctypes
write = ctypes.pythonapi.PyUnstable_WritePerfMapEntry
write.argtypes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p
if not {ours_first}:
    sys.deactivate_stack_trampoline()
for i in range(3000):
    assert write(i + 1, 1, b'theirs_number_%d' % i) == 0
    if i == 0:
        sys.activate_stack_trampoline('perf')
    function(f'ours_number_{{i}}')()
'''))


class CreationTest(ProgramTest):
    """The name of the file is known to everybody, and /tmp is everybody's."""

    BACKEND, PATH = 'perf', '/tmp/perf-{}.map'

    def names(self, pid):
        return parse(Path(self.PATH.format(pid)).read_text()).values()

    def run_planted(self, plant):
        """Run a program that executes `plant` with `path`, the map's name to be, and then goes on with profiling."""
        with tempfile.TemporaryDirectory() as scratch:
            os.chmod(scratch, 0o755)
            target = Path(scratch) / 'target'
            target.write_text('precious')
            done = self.run_program(PRELUDE + f'''
import perf_trampoline
target, path = {str(target)!r}, {self.PATH!r}.format(os.getpid())
if os.path.lexists(path): os.unlink(path)       # of an earlier process
{plant}
sys.activate_stack_trampoline({self.BACKEND!r})
function('f')()
print(sys.is_stack_trampoline_active(), failure())
''')
            self.assertEqual(target.read_text(), 'precious')
        return done

    def check_replaced(self, plant):
        done = self.run_planted(plant)
        self.assertEqual((done.stdout, done.stderr), ('True None\n', ''))
        path = Path(self.PATH.format(done.pid))
        self.assertTrue(path.is_file() and not path.is_symlink())
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        self.assertIn('py::f:/x.py', self.names(done.pid))

    def check_given_up(self, plant):
        done = self.run_planted(plant)
        self.addCleanup(lambda: (os.rmdir if os.path.isdir(path) else os.unlink)(path))
        path = self.PATH.format(done.pid)
        self.assertRegex(done.stderr, rf'\Aperf trampoline: cannot create {path}: .+\n\Z')
        self.assertEqual(done.stdout, f'False {done.stderr.removeprefix("perf trampoline: ")}')

    def test_only_the_user_may_read_it(self):
        self.check_replaced('os.umask(0)')

    def test_tmpdir_moves_nothing(self):
        self.check_replaced('os.environ["TMPDIR"] = "/var/tmp"')

    def test_file_of_an_earlier_process_is_replaced(self):
        self.check_replaced('open(path, "w").write("7f0000000000 zz py::stale\\n")')

    def test_symlink_is_replaced_and_not_followed(self):
        self.check_replaced('os.symlink(target, path)')
        self.check_replaced('os.symlink("/nonexistent/file", path)')

    def test_hard_link_is_replaced_and_its_file_left_alone(self):
        self.check_replaced('os.link(target, path) if os.stat(target).st_dev == os.stat("/tmp").st_dev else None')

    def test_hard_link_to_an_open_file_is_left_alone(self):
        self.check_replaced('kept = open(target); os.link(target, path)')

    def test_fifo_is_replaced(self):
        self.check_replaced('os.mkfifo(path)')

    def test_directory_stops_profiling_not_the_program(self):
        self.check_given_up('os.mkdir(path)')

    @unittest.skipIf(os.geteuid(), 'only root can leave a file of another user')
    def test_what_another_user_planted_stops_profiling_not_the_program(self):
        if EMULATED:
            self.skipTest('an emulator finds its own files no more when it has changed its user')
        for plant in 'open(path, "w")', 'os.symlink(target, path)', 'os.mkfifo(path)', 'os.link(target, path)':
            with self.subTest(plant):
                self.check_given_up(f'{plant}; os.setgid(65534); os.setuid(65534)')


class DiskTest(ProgramTest):
    """A file system that cannot take the map costs names, and nothing else."""

    SOURCE = PRELUDE + '''
mount_tmp()
sys.activate_stack_trampoline('perf')
for i in range(3000):
    assert function(f'f_{i}', '/x' * 50)() is None
print(sys.is_stack_trampoline_active(), failure())
sys.deactivate_stack_trampoline()
if os.path.exists(path()):
    print(open(path()).read())
'''

    def check_one_message(self, done, reason):
        self.assertRegex(done.stderr, rf'\Aperf trampoline: .*{reason}.*\n\Z')
        result, _, map = done.stdout.partition('\n')
        self.assertEqual(result, 'False ' + done.stderr.removeprefix('perf trampoline: ').rstrip('\n'))
        return parse(map)

    def test_full_disk_leaves_whole_lines_and_one_message(self):
        for size, least in (0, 0), (4, 10), (20, 100), (36, 200), (64, 400):
            with self.subTest(size):
                done = self.run_in_private_tmp(f'size={size * 1024},nr_inodes={2 if size else 1}', self.SOURCE)
                names = self.check_one_message(done, 'No space left on device')
                names = [name for name in names.values() if name.startswith('py::f_')]
                self.assertEqual(names, [f'py::f_{i}:' + '/x' * 50 for i in range(len(names))])
                self.assertGreaterEqual(len(names), least)

    def test_read_only_tmp_gives_one_message(self):
        done = self.run_in_private_tmp('ro', self.SOURCE)
        self.assertEqual(self.check_one_message(done, 'Read-only file system'), {})


class GrowthTest(MapTest):

    def test_same_code_compiled_again_is_not_named_again(self):
        done = self.run_program('''
for _ in range(10000):
    namespace = {}
    exec('def outer():\\n  def inner(): return 1\\n  return inner()\\nouter()', namespace)
    namespace.clear()
''')
        names = self.names(done)
        self.assertEqual([names.count(f'py::{name}:<string>') for name in ('outer', 'outer.<locals>.inner')], [1, 1])

    def test_address_never_means_two_names(self):
        done = self.run_program('''
import random
random.seed(1)
alive = [None] * 50
for i in range(20000):
    f = function(f'f_{random.randrange(3000)}'); f()
    alive[random.randrange(50)] = f
''')
        self.assertGreater(len(self.names(done)), 3000)

    @unittest.skipIf(GROWS_ANYWAY, 'an emulator or a sanitizer grows by itself')
    def test_dead_functions_take_no_memory(self):
        growth = perf_support.growth_program(5000, 100000)
        profiled = int(self.run_program(growth).stdout)
        plain = int(ProgramTest.run_program(self, PRELUDE + growth).stdout)
        self.assertLess(profiled - plain, 1024)      # KiB; 100000 slots take 1.6 MB and more


if __name__ == '__main__':
    unittest.main()
