"""The command line: what it says, what it writes, and that it is true."""

import argparse
import collections
import contextlib
import gzip
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / 'Tools' / 'perf')]

import perf_script
import perf_support
import perf_trampoline
from perf_trampoline import _clean, _export, _interpreter, _profile, _record
from perf_trampoline._profile import NATIVE, PYTHON, Function

# Two leaves, 2 to 1 by their CPU clock, under a caller each.
PROGRAM = '''
import sys, time
def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        for i in range(1000): pass
def large(): spin(.4)
def small(): spin(.2)
for _ in range(2): large(); small()
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
'''

HAS_VIEWER = os.path.exists(os.path.join(_interpreter.PACKAGE, 'viewer'))


def cli(*arguments, status=0, prefix=(), **options):
    """Run a command without a terminal; its output and what it says."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(('PYTHONPERF', 'PYTHON_PERF'))}
    done = subprocess.run([*prefix, sys.executable, '-m', 'perf_trampoline', *map(str, arguments)],
                          **{'env': env, 'stdin': subprocess.DEVNULL, 'capture_output': True, 'text': True} | options)
    if status is not None and done.returncode != status:
        raise AssertionError(f'status {done.returncode} of {arguments}\n{done.stdout}\n{done.stderr}')
    return done


def python(name, file='/x/app.py'):
    return f'py::{name}:{file} (/tmp/python-perf-0/1-1-0.so)'


EVALUATOR = '_PyEval_EvalFrameDefault (/usr/bin/python3.11)'
HOOK = 'evaluate (/x/perf_trampoline/_perf_trampoline.cpython-311-x86_64-linux-gnu.so)'
START = ['Py_BytesMain (/usr/bin/python3.11)', '__libc_start_main (/usr/lib/libc.so.6)', '_start (/usr/bin/python3.11)']


def script(*stacks):
    """What perf script prints of samples, each (comm, pid, period, frames with the leaf first)."""
    text = ''
    for number, (comm, pid, period, frames) in enumerate(stacks, 1):
        text += f'{comm} {pid}/{pid} 1.{number:09}: {period} cpu-clock:u: \n'
        text += ''.join(f'\t{address + 1:16x} {frame}\n' for address, frame in enumerate(frames)) + '\n'
    return text


class Scratch(unittest.TestCase):

    def setUp(self):
        # Not under /tmp/perf-: perf would take the files for maps.
        directory = tempfile.TemporaryDirectory(prefix='python-cli-')
        self.addCleanup(directory.cleanup)
        self.scratch = Path(directory.name)

    def write(self, name, text, mode=0o644):
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def perf_that_prints(self, *stacks, mode='STACK_USER'):
        """A perf that has recorded these samples."""
        self.write('printed', script(*stacks))
        self.write('perf.data', '')
        return self.write('perf', f'#!/bin/sh\ncase $1 in evlist) echo {mode};; script) cat {self.scratch}/printed;; esac\n',
                          0o755)

    def profile(self, *stacks, mode='STACK_USER', **options):
        return _profile.Profile(self.scratch / 'perf.data', [str(self.perf_that_prints(*stacks, mode=mode))], **options)


class ProfileTest(Scratch):

    def names(self, *frames, comm='python', **options):
        [path] = self.profile((comm, 7, 5, frames), **options).paths
        return [function.name for function in path.functions]

    def test_interpreter_frames_fold_into_their_python_function(self):
        self.assertEqual(self.names('list_sort (/usr/bin/python3.11)', EVALUATOR, python('leaf'), HOOK, EVALUATOR,
                                    python('main'), HOOK, *START), ['main', 'leaf'])

    def test_c_library_extension_and_kernel_frames_stay(self):
        frames = ['page_fault ([kernel.kallsyms])', 'memcpy (/usr/lib/libc.so.6)', 'encode (/x/_json.cpython-311.so)',
                  EVALUATOR, python('leaf'), *START]
        self.assertEqual(self.names(*frames), ['leaf', 'encode', 'memcpy', 'page_fault'])
        self.assertEqual(self.names(*frames, hide=['kernel']), ['leaf', 'encode', 'memcpy'])
        self.assertEqual(self.names(*frames, hide=['native', 'kernel']), ['leaf'])

    def test_interpreter_frames_can_be_kept(self):
        self.assertEqual(self.names(EVALUATOR, python('leaf'), HOOK, *START, unfold=True),
                         ['leaf', '_PyEval_EvalFrameDefault'])

    def test_a_program_that_embeds_python_is_seen(self):
        self.assertEqual(self.names(EVALUATOR, python('leaf'), 'serve (/usr/bin/server)',
                                    '__libc_start_main (/usr/lib/libc.so.6)', '_start (/usr/bin/server)'),
                         ['_start', 'serve', 'leaf'])

    def test_other_programs_are_named_after_their_command(self):
        self.assertEqual(self.names('parse (/usr/bin/cc1)', 'main (/usr/bin/cc1)', '_start (/usr/bin/cc1)', comm='cc 1'),
                         ['[cc 1]', '_start', 'main', 'parse'])

    def test_incomplete_stacks_are_told_apart(self):
        profile = self.profile(('python', 7, 1, [EVALUATOR, python('leaf')]), ('python', 7, 3, [python('leaf'), *START]),
                               ('python', 7, 1, []))
        self.assertEqual([path.functions[0].name for path in profile.paths],
                         ['[incomplete stack]', 'leaf', '[no stack]'])
        self.assertEqual(profile.whole, 1)

    def test_periods_are_the_weights_and_recursion_counts_once(self):
        profile = self.profile(('python', 7, 30, [python('f'), EVALUATOR, python('f'), *START]),
                               ('python', 7, 10, [python('g'), EVALUATOR, python('f'), *START]))
        table = {function.name: weights for function, weights in profile.table(_profile.same).items()}
        self.assertEqual(table, {'f': [40, 30], 'g': [10, 10]})
        self.assertEqual(profile.share(10), 25)
        tree = profile.tree()
        self.assertEqual((tree.total, [node.total for _, node in tree.sorted()]), (40, [40]))

    def test_names_that_perf_cannot_print_clearly(self):
        [path] = self.profile(('a\rb', 7, 5, ['f\r (/x)y)', python('g\rh'), *START])).paths
        self.assertEqual((path.sample.comm, [tuple(function) for function in path.functions]),
                         ('a\rb', [(PYTHON, 'g\rh', '/x/app.py'), (NATIVE, 'f\r', '/x)y')]))
        self.assertEqual(self.names('no path', python('g'), *START), ['g', '[unknown]'])

    def test_stack_of_a_sample_that_cannot_be_read_is_not_that_of_the_one_before(self):
        perf = self.perf_that_prints(('a', 7, 5, [python('f'), *START]), ('b', 7, 5, [python('g'), *START]))
        printed = self.scratch / 'printed'
        printed.write_text(printed.read_text().replace('b 7/7', 'b'))
        [sample] = perf_script.samples(self.scratch / 'perf.data', [str(perf)])
        self.assertEqual(len(sample.stack), 1 + len(START))

    def test_modules(self):
        for path, name in {'/usr/lib/python3.11/json/encoder.py': 'json.encoder', '/v/site-packages/a/__init__.py': 'a',
                           '/usr/lib/python3/dist-packages/yaml/x.py': 'yaml.x', '/home/me/prog.py': 'prog',
                           '<frozen os>': '<frozen os>'}.items():
            self.assertEqual(_profile.module(Function(PYTHON, 'f', path)), name)
        self.assertEqual(_profile.module(Function(NATIVE, 'memcpy', '/usr/lib/libc.so.6')), 'libc.so.6')

    def test_samples_of_a_second_event_are_left_out(self):
        perf = self.perf_that_prints(*[('python', 7, 1, [python('f'), *START])] * 3)
        printed = self.scratch / 'printed'
        printed.write_text(printed.read_text().replace('cpu-clock:u', 'faults:u', 1))
        self.assertEqual(_profile.Profile(self.scratch / 'perf.data', [str(perf)]).weight, 2)


class ReportTest(Scratch):

    STACKS = [('python', 7, 60, [python('leaf'), EVALUATOR, python('main'), *START]),
              ('python', 8, 30, ['memcpy (/usr/lib/libc.so.6)', python('other', '/x/b.py'), EVALUATOR, python('main'), *START]),
              ('python', 7, 10, [python('main'), *START])]

    def report(self, *options, stacks=STACKS, **run_options):
        perf = self.perf_that_prints(*stacks)
        return cli('report', '-i', self.scratch / 'perf.data', '--perf', perf, *options, **run_options).stdout

    def test_tree(self):
        self.assertEqual(self.report(env=os.environ | {'PYTHONIOENCODING': 'utf-8'}).splitlines(), [
            f'{self.scratch}/perf.data: 3 samples of cpu-clock:u, 2 processes, 100.0 % with their whole stack', '',
            ' total   self  function',
            ' 100.0   10.0  main  app',
            '  60.0   60.0  ├─ leaf  app',
            '  30.0    0.0  └─ other  b',
            '  30.0   30.0     memcpy  libc.so.6'])

    def test_ascii_where_nothing_else_can_be_shown(self):
        self.assertIn('|- leaf', self.report(env=os.environ | {'PYTHONIOENCODING': 'ascii'}))

    def test_tables(self):
        def rows(*options):
            return [line.split() for line in self.report(*options).splitlines()[3:]]
        self.assertEqual(rows('--by', 'function')[0], ['60.0', '60.0', 'leaf', 'app'])
        self.assertEqual(rows('--by', 'module', '--sort', 'total'),
                         [['100.0', '70.0', 'app'], ['30.0', '30.0', 'libc.so.6'], ['30.0', '0.0', 'b']])
        self.assertEqual(rows('--by', 'file', '--no-native'), [['100.0', '70.0', '/x/app.py'], ['30.0', '30.0', '/x/b.py']])
        self.assertEqual(len(rows('--by', 'function', '--min', '50')), 2)

    def test_json(self):
        tree = json.loads(self.report('--json'))['tree']
        self.assertEqual((tree['total'], tree['children'][0]['name'], tree['children'][0]['self']), (100, 'main', 10))
        [row] = [row for row in json.loads(self.report('--json', '--by', 'function'))['rows'] if row['name'] == 'leaf']
        self.assertEqual(row, {'name': 'leaf', 'kind': 'python', 'file': '/x/app.py', 'total': 60, 'self': 60})

    def test_very_deep_stacks(self):
        deep = [frame for i in range(1000) for frame in (python(f'f{i}'),)] + START
        self.assertIn('f0', self.report('--json', stacks=[('python', 7, 1, deep)]))
        self.assertIn('f0', self.report(stacks=[('python', 7, 1, deep)]))

    def test_names_that_would_move_the_terminal(self):
        shown = self.report(stacks=[('python', 7, 1, [python('f\x1b[2J'), *START])])
        self.assertIn('f?[2J', shown)

    def test_names_that_are_no_text(self):
        perf = self.perf_that_prints(('python', 7, 1, [python('f'), *START]))
        printed = self.scratch / 'printed'
        printed.write_bytes(printed.read_bytes().replace(b'py::f:', b'py::f\xff:'))
        arguments = '-i', self.scratch / 'perf.data', '--perf', perf
        self.assertIn(' f?  app\n', cli('report', *arguments).stdout)
        for form in 'folded', 'speedscope', 'firefox', 'pprof':
            cli('flamegraph', *arguments, '--format', form)

    def test_diff(self):
        self.perf_that_prints(*self.STACKS)
        # One perf for two recordings: it looks at the name that follows -i.
        (self.scratch / 'printed').rename(self.scratch / 'printed-A')
        self.write('printed-B', script(('python', 7, 1, [python('leaf'), EVALUATOR, python('main'), *START])))
        perf = self.write('perf', '#!/bin/sh\ncase $1 in evlist) echo STACK_USER;; '
                          f'script) cat {self.scratch}/printed-$(basename $3);; esac\n', 0o755)
        self.write('A', '')
        self.write('B', '')
        rows = json.loads(cli('report', '--perf', perf, '--json', '--diff', self.scratch / 'A', self.scratch / 'B').stdout)['rows']
        changes = {row['name']: row['change'] for row in rows}
        self.assertEqual(changes['leaf'], {'total': 40, 'self': 40})
        self.assertEqual(changes['other'], {'total': -30, 'self': 0})
        self.assertEqual(rows[0]['name'], 'leaf')
        text = cli('report', '--perf', perf, '--diff', self.scratch / 'A', self.scratch / 'B').stdout
        self.assertRegex(text, r'100\.0  \+40\.0   100\.0  \+40\.0  leaf')

    def test_a_missing_recording_is_one_sentence(self):
        done = cli('report', '-i', self.scratch / 'none', status=1)
        self.assertRegex(done.stderr, r'\A\S.*there is no .*/none: record one, or name it with -i\n\Z')

    def test_a_closed_pipe_is_no_error(self):
        perf = self.perf_that_prints(*[('python', 7, 1, [python(f'f{i}' + 'x' * 500), *START]) for i in range(1000)])
        done = subprocess.run(f'{sys.executable} -m perf_trampoline report --min 0 --perf {perf} -i {self.scratch}/perf.data'
                              ' | head -1', shell=True, capture_output=True, text=True)
        self.assertEqual((done.stdout.count('\n'), done.stderr), (1, ''))


class TerminalTest(Scratch):
    """Colours, width and progress are a terminal's."""

    def on_terminal(self, *arguments, columns=80, **variables):
        """What a command shows on a terminal of so many columns."""
        pid, master = pty.fork()
        if not pid:
            env = {name: value for name, value in os.environ.items() if name not in ('NO_COLOR', 'COLUMNS', 'TERM')}
            os.execve(sys.executable, [sys.executable, '-m', 'perf_trampoline', *map(str, arguments)],
                      env | {'TERM': 'xterm', 'PYTHONIOENCODING': 'utf-8', 'COLUMNS': str(columns)} | variables)
        shown = b''
        with contextlib.suppress(OSError):      # EIO: the other side has ended
            while part := os.read(master, 65536):
                shown += part
        os.close(master)
        os.waitpid(pid, 0)
        return shown.decode()

    def report(self, **variables):
        long = [('python', 7, 1, [python('f' * 200, '/x/' + 'm' * 100 + '.py'), *START])]
        perf = self.perf_that_prints(*long)
        return self.on_terminal('report', '-i', self.scratch / 'perf.data', '--perf', perf, **variables)

    def test_colours_and_width(self):
        shown = self.report()
        self.assertIn('\x1b[1m', shown)
        self.assertLessEqual(max(len(re.sub('\x1b\\[[0-9;]*[mK]', '', line)) for line in shown.split('\r\n')), 80)

    def test_no_color_and_dumb_terminals(self):
        self.assertNotIn('\x1b', self.report(NO_COLOR='1'))
        self.assertNotIn('\x1b', self.report(TERM='dumb'))

    def test_progress_is_drawn_and_removed(self):
        perf = self.perf_that_prints(*[('python', 7, 1, [python('f'), *START])] * 600)
        arguments = 'report', '-i', self.scratch / 'perf.data', '--perf', perf
        shown = self.on_terminal(*arguments)
        self.assertIn('reading the recording: 250 samples', shown)
        self.assertIn('\r\x1b[K', shown.partition('250 samples')[2])
        self.assertNotIn('reading', cli(*arguments).stderr)


class HelpTest(unittest.TestCase):

    def test_version_and_help_everywhere(self):
        for command in [], ['record'], ['report'], ['flamegraph'], ['doctor'], ['clean'], ['status']:
            with self.subTest(command):
                self.assertRegex(cli(*command, '--version').stdout, r'^perf-trampoline \d+\.\d+\.\d+\n$')
                self.assertIn('usage: ', cli(*command, '--help', env=os.environ | {'COLUMNS': '80'}).stdout)

    def test_wrong_usage_is_status_2(self):
        self.assertIn('invalid choice', cli('paint', status=2).stderr)
        self.assertIn('required', cli(status=2).stderr)

    def test_script_is_the_module(self):
        script = Path(sys.executable).with_name('perf-trampoline')
        self.assertEqual(subprocess.run([script, '--version'], capture_output=True, text=True).stdout, cli('--version').stdout)


class DocumentsTest(unittest.TestCase):
    """The man page and the shell's completion have the options that there are, and no others."""

    MISC = HERE.parents[1] / 'Misc'
    FOR_ALL = {'-h', '--help', '--version'}

    def options(self):
        """{command: its options}, the inherited ones of flamegraph included."""
        commands = {}
        for name in 'record', 'report', 'flamegraph', 'doctor', 'clean', 'status':
            parser = argparse.ArgumentParser(description='')
            __import__('importlib').import_module(f'perf_trampoline._{name}').add_arguments(parser)
            commands[name] = {option for action in parser._actions for option in action.option_strings} - self.FOR_ALL
        return commands

    def test_man_page(self):
        page = (self.MISC / 'perf-trampoline.1').read_text().replace('\\-', '-')
        for name, text in re.findall(r'(?ms)^\.SS (\w+)\n(.*?)(?=^\.S[SH] )', page):
            found = {word for word in re.findall(r'(?<![\w-])--?[a-z-]*\w', text, re.I)} - {'-m', '-c'} if name != 'record' \
                else set(re.findall(r'(?m)^\.(?:BR|BI|B) (-\w|--[\w-]+)', text)) | set(re.findall(r'", " (--[\w-]+)', text))
            with self.subTest(name):
                self.assertEqual({word for word in found if word.startswith('--')},
                                 {word for word in self.options()[name] if word.startswith('--')})

    @unittest.skipUnless(shutil.which('man'), 'man is not installed')
    def test_man_page_has_no_faults(self):
        done = subprocess.run(['man', '--warnings', '-l', self.MISC / 'perf-trampoline.1'], capture_output=True, text=True,
                              env=os.environ | {'LC_ALL': 'C.UTF-8', 'MANWIDTH': '80'})
        self.assertEqual((done.returncode, done.stderr), (0, ''))

    def complete(self, *words):
        script = f"""source {self.MISC}/perf-trampoline.bash
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _perf_trampoline; printf '%s\\n' "${{COMPREPLY[@]}}" """
        return set(subprocess.run(['bash', '-c', script, 'bash', 'perf-trampoline', *words], check=True, capture_output=True,
                                  text=True).stdout.split())

    def test_completion(self):
        self.assertEqual(self.complete('re'), {'record', 'report'})
        self.assertEqual(self.complete('report', '--by', ''), {'function', 'file', 'module'})
        for name, options in self.options().items():
            with self.subTest(name):
                self.assertEqual(self.complete(name, '--') | {'--help', '--version'},
                                 {option for option in options if option.startswith('--')} | {'--help', '--version'})


class SplitTest(unittest.TestCase):

    def test_what_belongs_to_the_program(self):
        for line, ours in {'-F 99 x.py -q': '-F 99', '-F99 -q -m mod -o y': '-F99 -q', '--freq=9 --json -c 1 -- -m': '--freq=9 --json',
                           '-n -- -odd.py': '-n', '--pid 7 -q': '--pid 7 -q', 'x.py': ''}.items():
            self.assertEqual(' '.join(_record.split(line.split())[0]), ours)

    def test_every_option_is_known_as_flag_or_not(self):
        parser = argparse.ArgumentParser()
        _record.add_arguments(parser)
        self.assertEqual({name for action in parser._actions if action.nargs == 0 for name in action.option_strings},
                         _record.FLAGS - {'--version'})


class WithPerf(Scratch):

    def setUp(self):
        super().setUp()
        try:
            perf_script.check()
        except perf_script.PerfError as error:
            self.skipTest(str(error))
        self.data = self.scratch / 'perf.data'
        self.images = self.scratch / 'images'

    def record(self, *arguments, **options):
        return cli('record', '-o', self.data, '--images', self.images, *arguments, **options)

    def shares(self, *options):
        rows = json.loads(cli('report', '-i', self.data, '--by', 'function', '--json', *options).stdout)['rows']
        # Of several functions with one name (<module>) the one with the largest share.
        return {row['name']: row for row in sorted(rows, key=lambda row: row['total'])}


class RecordTest(WithPerf):

    def test_from_program_to_shares(self):
        program = self.write('prog.py', PROGRAM)
        done = self.record(program, '3', status=3)
        self.assertEqual(done.stdout, '')
        self.assertRegex(done.stderr.splitlines()[0], r'PYTHON_PERF_ELF_SUPPORT=1 .*perf record .*prog\.py 3$')
        self.assertRegex(done.stderr, r'\d+\.\d +\d+\.\d  spin +prog')
        self.assertNotIn('\x1b', done.stderr)
        shares = self.shares('--no-native')
        self.assertAlmostEqual(shares['large']['total'] / shares['small']['total'], 2, delta=.35)
        self.assertGreater(shares['<module>']['total'], 80)

    def test_printed_command_is_the_whole_truth(self):
        program = self.write('prog.py', PROGRAM)
        command = self.record('-n', program).stderr.splitlines()[-1]
        self.assertFalse(self.data.exists())
        subprocess.run(command, shell=True, check=True, capture_output=True)
        self.assertGreater(self.shares()['spin']['total'], 80)

    def test_module_code_and_their_arguments(self):
        self.write('mod.py', 'import sys; print(sys.argv[1:])')
        self.assertEqual(self.record('-m', 'mod', '-o', '--json', 'x', cwd=self.scratch).stdout, "['-o', '--json', 'x']\n")
        self.assertEqual(self.record('-c', 'import sys; print(sys.argv)', '-c', '--', 'y').stdout, "['-c', '-c', '--', 'y']\n")

    def test_json_is_all_there_is_on_stdout(self):
        answer = json.loads(self.record('--json', self.write('prog.py', PROGRAM), '4', status=4).stdout)
        self.assertEqual((answer['status'], answer['backend'], answer['data']), (4, 'perf_elf', str(self.data)))
        self.assertEqual(answer['functions'][0]['name'], 'spin')
        self.assertGreater(answer['whole'] / answer['samples'], .9)

    def test_children_are_followed(self):
        program = self.write('parent.py', f'''
import os, subprocess, sys
exec({PROGRAM.replace('sys.exit', '(lambda status: None)')!r})
def forked(): spin(.3)
if not os.fork(): forked(); os._exit(0)
os.wait()
subprocess.run([sys.executable, {str(self.write('child.py', PROGRAM.replace('large', 'of_child')))!r}], check=True)
''')
        self.record(program)
        shares = self.shares('--no-native')
        self.assertLessEqual({'large', 'forked', 'of_child'}, {name for name in shares if shares[name]['total'] > 5})
        self.assertGreaterEqual(json.loads(cli('report', '-i', self.data, '--json').stdout)['processes'], 3)

    def test_a_jitdump_is_injected(self):
        done = self.record('--backend', 'perf_jit', '--json', self.write('prog.py', PROGRAM))
        answer = json.loads(done.stdout)
        self.addCleanup(_clean.remove_of, set(self.pids(f'{self.data}.jit')))
        self.assertEqual((answer['data'], answer['functions'][0]['name']), (f'{self.data}.jit', 'spin'))

    def pids(self, data):
        return {sample.pid for sample in perf_script.samples(data)}

    def test_without_a_place_for_images_a_jitdump_is_made(self):
        program = self.write('prog.py', PROGRAM)
        done = cli('record', '-n', '--images', '/proc/none', program)
        self.assertRegex(done.stderr, r'note: no ELF images: .*\n.*PYTHON_PERF_JIT_SUPPORT=1 .*-k mono')

    def test_an_environment_in_which_nothing_is_installed(self):
        venv = self.scratch / 'venv'
        subprocess.run([sys._base_executable, '-m', 'venv', '--without-pip', venv], check=True)
        site = next(venv.glob('lib/python*/site-packages'))
        (site / 'usersite.py').write_text('NAME = "of the environment"')
        self.write('custom/sitecustomize.py', 'import builtins; builtins.customized = True')
        program = self.write('prog.py', PROGRAM + '\n').read_text().replace(
            'sys.exit', 'import usersite; print(usersite.NAME, sys.prefix, customized, "pytest" in sys.modules); sys.exit')
        done = self.record('--python', venv / 'bin/python', self.write('prog2.py', program),
                           env=os.environ | {'PYTHONPATH': str(self.scratch / 'custom')})
        self.assertEqual(done.stdout, f'of the environment {venv} True False\n')
        self.assertGreater(self.shares()['spin']['total'], 80)
        self.assertEqual(subprocess.run([venv / 'bin/python', '-c', 'import perf_trampoline'], capture_output=True,
                                        env={'PYTHONNOUSERSITE': '1'}).returncode, 1, 'it was installed after all')

    def test_ctrl_c_ends_the_program_not_us(self):
        program = self.write('loop.py', PROGRAM.replace('range(2)', 'range(1000)'))
        process = subprocess.Popen([sys.executable, '-m', 'perf_trampoline', 'record', '-o', self.data, program],
                                   stderr=subprocess.PIPE, text=True, start_new_session=True)
        started = process.stderr.readline()
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 130, started + said)
        self.assertIn('hottest Python functions', said)

    def test_duration(self):
        start = time.monotonic()
        self.record('--duration', '4', self.write('loop.py', PROGRAM.replace('range(2)', 'range(1000)')))
        self.assertLess(time.monotonic() - start, 30)
        self.assertGreater(self.shares()['spin']['total'], 50)


class PidTest(WithPerf):

    def test_a_running_process_is_watched_and_left_as_it_was(self):
        program = self.write('loop.py', 'print(flush=True)\n' + PROGRAM.replace('.4', '.04').replace('.2', '.02')
                             .replace('range(2)', 'range(10000)'))
        process = subprocess.Popen([sys._base_executable, program], stdout=subprocess.PIPE)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        process.stdout.readline()
        time.sleep(.5)
        done = self.record('--pid', process.pid, '--duration', 3)
        self.assertRegex(done.stderr, rf'perf record .*-p {process.pid}\n')
        shares = self.shares()
        self.assertAlmostEqual(shares['large']['total'] / shares['small']['total'], 2, delta=.6)
        self.assertIsNone(process.poll())
        self.assertFalse(perf_trampoline.detach(process.pid)['active'])

@unittest.skipUnless(shutil.which('gunicorn'), 'gunicorn is not installed')
class ServerTest(WithPerf):

    APP = '''
import ast, os
SOURCE = open(ast.__file__).read()
def work(): return ast.dump(ast.parse(SOURCE))
def app(environ, start_response):
    body = f'{len(work())} {os.getpid()} {os.getppid()}'.encode()
    start_response('200 OK', [('Content-Length', str(len(body)))])
    return [body]
'''

    def ask(self, path):
        """Length, worker, master."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b'GET / HTTP/1.0\r\n\r\n')
            return list(map(int, b''.join(iter(lambda: sock.recv(4096), b'')).split(b'\r\n\r\n')[1].split()))

    def test_from_a_pre_fork_server_to_the_page_in_two_commands(self):
        self.write('app.py', self.APP)
        at = self.scratch / 'socket'
        server = subprocess.Popen(
            [sys.executable, '-m', 'perf_trampoline', 'record', '-o', self.data, '--images', self.images, shutil.which('gunicorn'),
             '--workers', '2', '--bind', f'unix:{at}', '--chdir', self.scratch, 'app:app'], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not at.exists() and time.monotonic() < deadline:
            time.sleep(.1)
        answers = [self.ask(at)]
        while len({worker for _, worker, _ in answers}) < 2 or len(answers) < 60:
            answers.append(self.ask(at))
            self.assertLess(time.monotonic(), deadline, answers)
        os.kill(answers[0][2], signal.SIGTERM)
        said = server.communicate(timeout=60)[1]
        self.assertEqual(server.returncode, 0, said)

        whole = collections.defaultdict(list)       # of each process' samples below work()
        for sample in perf_script.samples(self.data):
            names = ' '.join(frame.sym.split(':')[2] for frame in reversed(sample.stack) if frame.sym.startswith('py::'))
            if ' work' in names:
                whole[sample.pid].append(bool(re.match('<module> run .* SyncWorker.handle_request app work', names)))
        self.assertEqual(set(whole), {worker for _, worker, _ in answers})
        for samples in whole.values():
            self.assertGreater(len(samples), 5)
            self.assertGreater(sum(samples) / len(samples), .9)
        if HAS_VIEWER:
            page = self.scratch / 'page.html'
            cli('flamegraph', '-i', self.data, '-o', page)
            self.assertIn('["python","SyncWorker.handle_request","', page.read_text().replace(', ', ','))


class RefusalTest(WithPerf):
    """One sentence that says what to do, and status 125."""

    def refuse(self, *arguments):
        done = self.record(*arguments, status=125)
        self.assertEqual((done.stdout, done.stderr.count('\n')), ('', 1), done.stderr)
        return done.stderr

    def test_nothing_to_record(self):
        self.assertIn('say what to record', self.refuse())
        self.assertIn('there is no script /none.py', self.refuse('/none.py'))
        self.assertIn('there is no process', self.refuse('--pid', 2 ** 22 + 1))

    def test_perf(self):
        self.assertIn('was not found: install perf', self.refuse('--perf', 'no-such-perf', '-c', '0'))
        self.assertIn('perf record', self.refuse('-e', 'no-such-event', '-c', '0'))

    def test_output(self):
        self.data = self.scratch / 'none/perf.data'
        self.assertIn(f"No such file or directory: '{self.data}'", self.record('-c', '0', status=125).stderr)

    def test_interpreters(self):
        self.assertIn('no interpreter /none', self.refuse('--python', '/none', '-c', '0'))
        self.assertIn('is no Python', self.refuse('--python', '/bin/true', '-c', '0'))
        old = self.write('old', '#!/bin/sh\nexec %s -c "import sys; sys.version = \'3.9.2 x\'; exec(sys.argv[1])" "$2"\n'
                         % sys.executable, 0o755)
        self.assertIn('CPython 3.11 or later is needed', self.refuse('--python', old, '-c', '0'))

    def test_an_interpreter_that_our_extension_does_not_fit(self):
        other = self.write('other', f'''#!/bin/sh
exec {sys._base_executable} -S -c "import sysconfig
get = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: '.cpython-399-mips.so' if name == 'EXT_SUFFIX' else get(name)
import sys; exec(sys.argv[1])" "$2"
''', 0o755)
        self.assertRegex(self.refuse('--python', other, '-c', '0'), r'does not fit it \(\.cpython-399-mips\.so\): install')


class ExportTest(Scratch):

    STACKS = [('py th', 7, 60, [python('le;af'), EVALUATOR, python('main'), *START]),
              ('py th', 7, 20, [python('le;af'), EVALUATOR, python('main'), *START]),
              ('other', 8, 30, ['memcpy (/usr/lib/libc.so.6)', python('main'), *START])]

    def test_folded(self):
        self.assertEqual(_export.folded(self.profile(*self.STACKS), 't').decode().splitlines(),
                         ['other;main (app);memcpy (libc.so.6) 30', 'py th;main (app);le:af (app) 80'])

    def test_speedscope(self):
        data = json.loads(_export.speedscope(self.profile(*self.STACKS), 't'))
        first, second = data['profiles']
        names = [frame['name'] for frame in data['shared']['frames']]
        self.assertEqual([[names[i] for i in stack] for stack in first['samples']], [['main', 'le;af']] * 2)
        self.assertEqual((first['weights'], first['endValue'], first['name'], second['unit']),
                         ([60, 20], 80, 'py th 7/7', 'nanoseconds'))

    def test_firefox(self):
        data = json.loads(_export.firefox(self.profile(*self.STACKS), 't'))
        thread = data['threads'][1]

        def names(stack):
            if stack is None:
                return []
            prefix, frame = thread['stackTable']['data'][stack]
            return [*names(prefix), thread['stringTable'][thread['frameTable']['data'][frame][0]]]
        self.assertEqual([names(row[0]) for row in thread['samples']['data']], [['main (app)', 'memcpy (libc.so.6)']])
        self.assertEqual(len(data['threads'][0]['stackTable']['data']), 2)

    @unittest.skipUnless(shutil.which('protoc'), 'protoc is not installed')
    def test_pprof_is_a_protocol_buffer(self):
        """protoc, which knows nothing of ours, reads it by pprof's published field numbers."""
        schema = self.write('profile.proto', '''syntax = "proto3";
            message V { int64 type = 1; int64 unit = 2; }
            message L { int64 key = 1; int64 str = 2; int64 num = 3; }
            message S { repeated uint64 location_id = 1; repeated int64 value = 2; repeated L label = 3; }
            message N { uint64 function_id = 1; int64 line = 2; }
            message A { uint64 id = 1; uint64 mapping_id = 2; uint64 address = 3; repeated N line = 4; }
            message F { uint64 id = 1; int64 name = 2; int64 system_name = 3; int64 filename = 4; }
            message P { repeated V sample_type = 1; repeated S sample = 2; repeated A location = 4; repeated F function = 5;
                        repeated string string_table = 6; int64 duration_nanos = 10; V period_type = 11; int64 period = 12; }''')
        text = subprocess.run(['protoc', f'-I{self.scratch}', '--decode=P', schema], check=True, capture_output=True,
                              input=gzip.decompress(_export.pprof(self.profile(*self.STACKS), 't'))).stdout.decode()
        strings = [json.loads(value) for value in re.findall(r'string_table: (".*")', text)]
        found = re.findall(r'function \{\s+id: (\d+)\s+name: (\d+)\s+system_name: (\d+)', text)
        functions = {number: strings[int(name)] for number, name, _ in found}
        samples = [([functions[i] for i in re.findall(r'location_id: (\d+)', sample)],
                    [int(v) for v in re.findall(r'value: (\d+)', sample)])
                   for sample in re.findall(r'(?ms)^sample \{(.*?)^\}', text)]
        self.assertEqual(strings[0], '')
        self.assertEqual(samples, [(['le;af', 'main'], [2, 80]), (['memcpy (libc.so.6)', 'main'], [1, 30])])
        self.assertEqual({strings[int(symbol)] for _, _, symbol in found},
                         {'py::le;af:/x/app.py', 'py::main:/x/app.py', 'memcpy (libc.so.6)'})
        self.assertIn('period: 36\n', text)

    def test_a_sample_without_process(self):
        """perf has -1 for its number; pprof's varints are of 64 bits."""
        data = gzip.decompress(_export.pprof(self.profile(('', -1, 1, [python('main')])), 't'))
        self.assertEqual(data.count(b'\xff' * 9 + b'\1'), 2)

    def test_without_a_viewer_the_page_is_refused_and_exports_offered(self):
        package = self.scratch / 'site/perf_trampoline'
        shutil.copytree(_interpreter.PACKAGE, package, ignore=shutil.ignore_patterns('viewer', '__pycache__'))
        perf = self.perf_that_prints(*self.STACKS)
        arguments = 'flamegraph', '-i', self.scratch / 'perf.data', '--perf', perf
        env = os.environ | {'PYTHONPATH': str(package.parent)}
        self.assertRegex(cli(*arguments, status=1, env=env).stderr, 'make viewer.*--format speedscope')
        self.assertEqual(cli(*arguments, '--format', 'folded', env=env).stdout, f'{self.scratch}/perf.folded\n')
        self.assertIn('main', (self.scratch / 'perf.folded').read_text())
        self.assertIn('main', cli(*arguments, '--format', 'folded', '-o', '-', env=env).stdout)


class Browser:
    """A page in Chromium, headless; commands and answers go over two pipes, in the DevTools protocol."""

    def __init__(self, page, directory):
        self.process = subprocess.Popen(
            ['sh', '-c', 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', 'sh', 'chromium', '--headless', '--no-sandbox',
             '--disable-gpu', '--remote-debugging-pipe', '--window-size=1280,800', f'--user-data-dir={directory}', 'about:blank'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.session = {}
        target = self.call('Target.createTarget', url=f'file://{page}')['targetId']
        self.session = {'sessionId': self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']}
        ready = None
        while ready != 'file: complete':
            with contextlib.suppress(KeyError):     # evaluated in an empty page, whose place this one takes
                ready = self.evaluate('return `${location.protocol} ${document.readyState}`')

    def call(self, method, **params):
        self.process.stdin.write(json.dumps({'id': 1, 'method': method, 'params': params} | self.session).encode() + b'\0')
        self.process.stdin.flush()
        while True:
            message = b''.join(iter(lambda: self.process.stdout.read(1), b'\0'))
            answer = json.loads(message)
            if 'id' in answer:
                return answer['result']

    def evaluate(self, body):
        """What the body of an async function returns."""
        return self.call('Runtime.evaluate', expression=f'(async () => {{{body}}})()', awaitPromise=True,
                         returnByValue=True)['result']['value']

    def close(self):
        self.session = {}
        self.call('Browser.close')
        self.process.communicate(timeout=30)


class PageTest(WithPerf):

    # Rectangles are measured as drawn, when they have come to rest.
    DRIVER = '''
        const rest = () => new Promise(done => setTimeout(done, 1500));
        const frames = () => [...document.querySelectorAll("#chart g.frame")].map(g => [
            g.__data__.data.name, g.__data__.data.place, g.querySelector("rect").getBoundingClientRect().width]);
        await rest();
        const seen = {frames: frames(), width: document.querySelector("#chart svg").getBoundingClientRect().width, errors};
        const input = document.getElementById("search");
        input.value = "^(SMALL|large) prog$"; input.dispatchEvent(new Event("input"));
        seen.found = document.getElementById("found").textContent;
        seen.marked = document.querySelectorAll('rect[fill="#d633ff"]').length;
        const large = [...document.querySelectorAll("#chart g.frame")].find(g => g.__data__.data.name === "large");
        large.dispatchEvent(new MouseEvent("mouseover", {clientX: 400, clientY: 300, bubbles: true}));
        seen.tip = document.getElementById("tip").innerText;
        large.dispatchEvent(new MouseEvent("click", {bubbles: true}));
        await rest();
        seen.zoomed = frames();
        document.getElementById("reset").click();
        await rest();
        return {...seen, reset: frames(), legend: document.getElementById("legend").innerText};'''

    @unittest.skipUnless(HAS_VIEWER, 'this build has no viewer: make viewer')
    @unittest.skipUnless(shutil.which('chromium'), 'chromium is not installed')
    def test_search_zoom_tooltip_and_widths(self):
        self.record(self.write('prog.py', PROGRAM))
        page = self.scratch / 'page.html'
        cli('flamegraph', '-i', self.data, '-o', page)
        text = page.read_text()
        self.assertNotRegex(text, r'(src|href)\s*=\s*"https?:')
        page.write_text(text.replace('<body>', '<body><script>const errors = []; addEventListener("error", '
                                     'event => errors.push(event.message));</script>'))
        browser = Browser(page, self.scratch / 'browser')
        self.addCleanup(browser.close)
        seen = browser.evaluate(self.DRIVER)
        self.assertEqual(seen['errors'], [])

        # The shares, from perf's own words, without our code but for the parser.
        samples = list(perf_script.samples(self.data))
        weight = sum(sample.period for sample in samples)
        for name in 'large', 'small', '<module>':
            share = 100 * sum(sample.period for sample in samples if any(
                frame.sym.startswith(f'py::{name}:') and frame.sym.endswith('prog.py') for frame in sample.stack)) / weight
            width = sum(width for frame, place, width in seen['frames'] if (frame, place) == (name, 'prog'))
            self.assertAlmostEqual(100 * width / seen['width'], share, delta=1, msg=name)

        # More than two if perf has lost a stack's outer part.
        self.assertEqual(seen['marked'], sum(name in ('large', 'small') for name, _, _ in seen['frames']))
        self.assertRegex(seen['found'], rf'^\d\d\.\d\d % in {seen["marked"]} frames$')
        self.assertRegex(seen['tip'], r'(?s)large.*Python · prog.*% of all')
        zoomed, reset = (max(width for frame, _, width in seen[when] if frame == 'large') for when in ('zoomed', 'reset'))
        self.assertGreater(zoomed, .98 * seen['width'])
        self.assertLess(reset, .8 * seen['width'])
        self.assertIn('Python', seen['legend'])

    @unittest.skipUnless(HAS_VIEWER, 'this build has no viewer: make viewer')
    def test_names_cannot_break_out_of_the_page(self):
        name = 'f</script><b>@D3@<!--'
        perf = self.perf_that_prints(('python', 7, 1, [python(name), *START]))
        page = self.scratch / 'page.html'
        cli('flamegraph', '-i', self.scratch / 'perf.data', '--perf', perf, '-o', page, '--title', '<i>"')
        text = page.read_text()
        self.assertNotIn('<i>', text)
        embedded = re.search(r'<script id="profile" type="application/json">(.*?)</script>', text)[1]
        self.assertIn(['python', name, 'app'], json.loads(embedded)['functions'])


# perf_event_open's number, for the filter below; asm/unistd.h.
PERF_EVENT_OPEN = {'x86_64': 298, 'aarch64': 241, 'riscv64': 241, 'ppc64le': 319, 's390x': 331}[os.uname().machine]
# Forbids perf_event_open in this process and what it starts: load the number, compare, EPERM or allow; linux/seccomp.h.
FORBID = f'''
import ctypes, os, struct, sys
code = b''.join(struct.pack('HBBI', *i) for i in (
    (0x20, 0, 0, 0), (0x15, 0, 1, {PERF_EVENT_OPEN}), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7fff0000)))
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(code)
filter = struct.pack('HP', 4, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
'''


class DoctorTest(WithPerf):
    """Machines made to fail, each in another way: the cause is named and a cure given."""

    def doctor(self, *options, status=1, **run_options):
        """{topic: its findings}"""
        answer = json.loads(cli('doctor', '--json', *options, status=status, **run_options).stdout)
        self.assertEqual(answer['ok'], not status)
        return answer['findings']

    def assert_problem(self, topic, text, findings):
        """There is this problem, it has a cure, and none is found beside it that is not there."""
        problems = [finding for finding in findings if finding['status'] == 'problem']
        self.assertEqual([finding['topic'] for finding in problems], [topic], problems)
        self.assertRegex(problems[0]['text'], text)
        self.assertGreater(len(problems[0]['cure']), 10)
        return problems[0]

    def test_a_good_machine(self):
        findings = self.doctor(status=0)
        self.assertEqual([finding for finding in findings if finding['status'] == 'problem'], [])
        self.assertRegex(findings[-1]['text'], r'\d+ samples of a known program .* 9\d\.\d%|100\.0%')
        text = cli('doctor').stdout
        self.assertRegex(text, '(?m)^ok +trial ')
        self.assertTrue(text.endswith('Python can be profiled here.\n'))

    def test_1_no_perf_in_path(self):
        empty = self.scratch / 'empty'
        empty.mkdir()
        self.assert_problem('perf', 'perf was not found in PATH', self.doctor(env=os.environ | {'PATH': str(empty)}))

    def test_2_a_perf_that_does_not_run(self):
        stub = self.write('perf', '#!/bin/sh\necho "WARNING: perf not found for kernel 9.9" >&2; exit 2\n', 0o755)
        self.assert_problem('perf', 'it says: WARNING: perf not found for kernel 9.9', self.doctor('--perf', stub))

    def proc(self, paranoid):
        self.write('proc/sys/kernel/perf_event_paranoid', f'{paranoid}\n')
        return self.scratch / 'proc'

    def test_3_paranoid_kernel(self):
        stub = self.write('perf', f"""#!/bin/sh
if [ "$1" = record ]; then echo "Access to performance monitoring is limited." >&2; exit 255; fi
exec {shutil.which('perf')} "$@"
""", 0o755)
        options = ['--perf', stub, '--proc', self.proc(4)]
        prefix = ['setpriv', '--bounding-set=-all', '--inh-caps=-all'] if os.geteuid() == 0 else []
        problem = self.assert_problem('kernel', 'kernel.perf_event_paranoid is 4: users may not profile',
                                      self.doctor(*options, prefix=prefix))
        self.assertIn('sysctl kernel.perf_event_paranoid=2', problem['cure'])

    def test_4_no_perf_events_in_the_kernel(self):
        self.assert_problem('kernel', 'perf_event_paranoid is missing', self.doctor('--proc', self.scratch))

    def test_5_seccomp(self):
        forbid = self.write('forbid.py', FORBID)
        problem = self.assert_problem('kernel', 'a seccomp filter is on', self.doctor(prefix=[sys.executable, forbid]))
        self.assertIn('seccomp=unconfined', problem['cure'])

    def test_6_read_only_directory(self):
        self.in_mount('ro', 'its file system is read-only')

    def test_7_noexec_directory(self):
        self.in_mount('noexec', 'its file system is mounted noexec')

    def test_8_full_directory(self):
        self.in_mount('size=16k', 'its file system is full', fill=True)

    def in_mount(self, options, text, fill=False):
        """Look at a directory for images that lies in a file system mounted so."""
        unshare = perf_support.unshare_mounts()
        place = self.scratch / 'place'
        place.mkdir()
        script = f'mount -t tmpfs -o {options} none {place} && {f"head -c 16384 /dev/zero >{place}/x;" if fill else ""} exec "$@"'
        findings = self.doctor('--images', place, prefix=[*unshare, 'sh', '-c', script, 'sh'])
        problem = self.assert_problem('directory', f'{place}: {text}', findings)
        self.assertIn('PERF_TRAMPOLINE_DIR', problem['cure'])

    def test_9_wrong_interpreters(self):
        problem = self.assert_problem('interpreter', 'is no Python', self.doctor('--python', '/bin/true'))
        self.assertIn('CPython 3.11 or later', problem['cure'])
        self.assert_problem('interpreter', 'there is no interpreter', self.doctor('--python', '/none'))

    def test_10_a_service_with_a_private_tmp(self):
        unshare = perf_support.unshare_mounts()
        service = subprocess.Popen([*unshare, 'sh', '-c', 'mount -t tmpfs none /tmp; echo; exec sleep 100'],
                                   stdout=subprocess.PIPE)
        self.addCleanup(service.communicate)
        self.addCleanup(service.kill)
        service.stdout.readline()
        problem = self.assert_problem('process', 'a /tmp of its own .PrivateTmp', self.doctor('--pid', service.pid))
        self.assertIn('PERF_TRAMPOLINE_DIR', problem['cure'])

    def test_11_an_architecture_without_trampoline(self):
        """A build for this machine with a table of architectures that does not have it."""
        table = self.write('archs.txt', '')
        build = self.scratch / 'build'
        build.mkdir()
        for command in [[perf_support.SOURCE / 'configure', '-q', f'--with-python={sys._base_executable}'], ['make', '-s']]:
            subprocess.run(command, cwd=build, check=True, capture_output=True,
                           env=os.environ | {'PERF_ARCHS': str(table), 'MAKEFLAGS': ''})
        problem = self.assert_problem('interpreter', 'no perf trampoline', self.doctor('--python', build / 'bin/python'))
        self.assertIn('architectures', problem['cure'])

    def test_12_a_perf_whose_stacks_are_wrong(self):
        """It unwinds nothing beyond the innermost frames."""
        stub = self.write('perf', f"""#!/bin/sh
if [ "$1" = script ]; then shift; exec {shutil.which('perf')} script --max-stack 4 "$@" --max-stack 4; fi
exec {shutil.which('perf')} "$@"
""", 0o755)
        self.assert_problem('trial', r'and --call-graph \S+: \d\.\d% of the stacks are whole', self.doctor('--perf', stub))


class CleanTest(Scratch):

    def setUp(self):
        super().setUp()
        ended = subprocess.Popen(['true'])
        ended.wait()
        self.pid = ended.pid
        self.directory = self.scratch / 'images'
        self.directory.mkdir()

    def left(self, **options):
        with unittest.mock.patch.dict(os.environ, {'PERF_TRAMPOLINE_DIR': str(self.directory)}):
            return {Path(file['path']).name: file for file in
                    _clean.left(tmp=self.scratch, **{'uid': os.geteuid()} | options)}

    def fill(self, pid):
        dump = (0x4A695444).to_bytes(4, sys.byteorder)
        for name, contents in {
                f'perf-{pid}.map': b'7f00 20 py::f:/x.py\n', f'jit-{pid}.dump': dump + b'py::f:/x.py',
                f'jit-{pid}.dump.window': dump + b'py::f:/x.py',        # of a process that was killed while it made it
                f'jitted-{pid}-1.so': b'\x7fELF..py::f:/x.py', f'images/{pid}-1-18ec.so': b'\x7fELF',
                f'images/{pid}-2-18ec.new': b''}.items():
            (self.scratch / name).write_bytes(contents)

    def test_all_kinds_of_ended_processes(self):
        self.fill(self.pid)
        self.fill(os.getpid())
        self.assertEqual({name: file['kind'] for name, file in self.left().items()}, {
            f'perf-{self.pid}.map': 'map', f'jit-{self.pid}.dump': 'dump',
            f'jit-{self.pid}.dump.window': 'dump', f'jitted-{self.pid}-1.so': 'injected',
            f'{self.pid}-1-18ec.so': 'image', f'{self.pid}-2-18ec.new': 'image'})

    def test_what_is_not_ours_stays(self):
        pid = self.pid
        for name, contents in {
                f'perf-{pid}.map': b'7f00 20 LazyCompile:~f /x.js\n',      # another runtime's
                f'jit-{pid}.dump': b'py::f',                                # no jitdump
                f'jitted-{pid}-1.so': b'py::f', f'perf-{pid}.map.txt': b'0 1 py::f', 'perf-x.map': b'0 1 py::f',
                f'images/{pid}-1-18ec.so': b'my notes', f'images/{pid}.so': b'\x7fELF'}.items():
            (self.scratch / name).write_bytes(contents)
        victim = self.write('victim', '0 1 py::f:/x.py\n')
        (self.scratch / 'perf-2.map').symlink_to(victim)
        os.mkfifo(self.scratch / f'jit-{pid}1.dump')
        (self.scratch / f'jit-{pid}2.dump').mkdir()
        self.write(f'perf-0{pid}.map', '0 1 py::f:/x.py\n')
        self.assertEqual(self.left(), {})

    def test_owner(self):
        self.fill(self.pid)
        self.assertEqual(self.left(uid=os.geteuid() + 1), {})
        self.assertEqual(len(self.left(uid=None)), 6)

    def test_age(self):
        self.fill(self.pid)
        os.utime(self.scratch / f'perf-{self.pid}.map', (0, time.time() - 100))
        self.assertEqual([*self.left(older_than=50)], [f'perf-{self.pid}.map'])

    def test_command(self):
        """In a /tmp of its own, where a wrong step removes nobody's files."""
        unshare = perf_support.unshare_mounts()
        if sys.prefix.startswith('/tmp/'):
            self.skipTest('the build is in the /tmp that is hidden')
        old, new = f'/tmp/perf-{self.pid}.map', f'/tmp/perf-{self.pid}0000000.map'
        image = f'/tmp/images/{self.pid}-1-18ec.so'

        def clean(*arguments, command='clean'):
            """Output, and what is left."""
            prepare = f"""mount -t tmpfs none /tmp && mkdir /tmp/images && printf '7f00 20 py::f:/x.py\\n' | tee {old} >{new}
                printf '\\177ELF' >{image}; touch -d '2 days ago' {old} {image}; "$@"; echo; ls -d /tmp/*.map /tmp/images/*"""
            done = cli(command, *arguments, prefix=[*unshare, 'sh', '-c', prepare, 'sh'], status=None,
                       env=os.environ | {'PERF_TRAMPOLINE_DIR': '/tmp/images', 'TMPDIR': '/var/tmp'})
            printed, _, rest = done.stdout.rpartition('\n\n') if '\n\n' in done.stdout else ('', '', done.stdout)
            return printed, set(rest.split())
        self.assertEqual(clean('--days', '1', '--dry-run'), (f'{image}\n{old}', {image, old, new}))
        self.assertEqual(clean('--days', '1'), (f'{image}\n{old}', {new}))
        self.assertEqual(clean(command='purge'), (f'{image}\n{old}\n{new}', set()))
        self.assertEqual(clean('--user', os.geteuid() + 1), ('', {image, old, new}))
        printed, rest = clean('-n', '--json')
        self.assertEqual([file['kind'] for file in json.loads(printed)], ['image', 'map', 'map'])
        self.assertEqual(rest, {image, old, new})
        self.assertIn('no user', cli('clean', '--user', 'nobody-of-that-name', status=1).stderr)


if __name__ == '__main__':
    unittest.main()
