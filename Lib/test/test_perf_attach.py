"""Trampolines switched on and off in processes that run: they do what they would do without, and their functions have names.

The attaching side runs under the interpreter that runs this file; what is attached to runs under each that can be had.
"""

import glob
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
from perf_support import ProgramTest, interpreter, map_entries, pyenv_interpreter, times

# A checksum by threads, forks and signals whose handler raises: what it prints does not depend on time.
BUSY = '''
import os, signal, sys, threading, time, zlib
def leaf(n): return (n * 2654435761) & 0xffffffff
def node(n): return leaf(n) ^ leaf(n + 1)
def checksum(count):
    value = 0
    for i in range(count): value = zlib.crc32(b'%d' % node(i), value)
    return value
class Alarm(Exception): pass
state = {'armed': False, 'raised': 0, 'caught': 0, 'forks': 0, 'stop': False}
def on_alarm(*_):
    if state['armed']:
        state['armed'] = False
        state['raised'] += 1
        raise Alarm
def on_stop(*_): state['stop'] = True
sums = set()
def work():
    while not state['stop']: sums.add(checksum(100))
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
signal.signal(signal.SIGTERM, on_stop)
signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
print('ready', flush=True)
while not state['stop'] or not state['raised'] or state['forks'] < 3:
    try:
        state['armed'] = True
        for _ in range(20): sums.add(checksum(100))
        state['armed'] = False
    except Alarm:
        state['caught'] += 1
    child = os.fork()
    if child == 0: os._exit(checksum(100) & 63)
    sums.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for path in f'/tmp/perf-{child}.map', f'/tmp/jit-{child}.dump':
        if os.path.exists(path): os.unlink(path)
    state['forks'] += 1
signal.setitimer(signal.ITIMER_REAL, 0)
for thread in threads: thread.join()
print(sorted(sums), state['raised'] - state['caught'])
'''

# CPython loses what a handler raises before the first instruction of sys.remote_exec()'s script.
LOST = re.compile(r'Error executing debugger script .*\n.*\n  File "<string>", line 0, in <module>\n(?:  .*\n)*Alarm.*\n')

# It waits for each line of its input, and calls.
STEPS = '''
import sys
def old(): return older()
def older(): return 1
def never_called(): return [x for x in (lambda: 1)()]
print('ready', flush=True)
for line in sys.stdin:
    exec(line)
    print('done', flush=True)
'''


class AttachTest(ProgramTest):

    def setUp(self):
        images = tempfile.TemporaryDirectory()
        self.addCleanup(images.cleanup)
        self.images = images.name
        self.env = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON_PERF')}
        self.env['PERF_TRAMPOLINE_DIR'] = self.images

    def start(self, source, python=([sys.executable], None), **options):
        """Start a program, wait until it says that it is ready."""
        command, env = python
        env = (env or self.env) | {'PERF_TRAMPOLINE_DIR': self.images}
        process = subprocess.Popen([*command, '-c', source], env=env, text=True, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        self.addCleanup(perf_support.remove_files, process.pid)
        self.addCleanup(self.end, process)
        self.assertEqual(process.stdout.readline(), 'ready\n', process.poll() and process.stderr.read())
        return process

    def end(self, process):
        process.kill()
        process.communicate()

    def step(self, process, line='0'):
        process.stdin.write(line + '\n')
        process.stdin.flush()
        self.assertEqual(process.stdout.readline(), 'done\n')

    def attach(self, pid, *options, command='attach', check=True):
        done = perf_support.run(['-m', 'perf_trampoline', command, pid, *options], env=self.env, check=False)
        if check:
            self.assertEqual((done.returncode, done.stderr), (0, ''), done.stdout)
        return done

    def assert_refused(self, reason, pid, *options):
        done = self.attach(pid, *options, check=False)
        self.assertEqual((done.returncode, done.stdout), (1, ''))
        self.assertRegex(done.stderr, rf'\Aperf trampoline: .*{reason}.*\n\Z')

    def names(self, pid):
        return {name.split(':')[2] for _, _, name in map_entries(pid)}


class BusyTest(AttachTest):
    """A busy process is attached to at moments of chance: what it prints and how it ends are as without."""

    def check_attaching(self, python=([sys.executable], None), count=times(1, 100)):
        plain = self.start(BUSY, python)
        plain.send_signal(signal.SIGTERM)
        expected, expected_err = plain.communicate(timeout=60)
        process = self.start(BUSY, python)
        for i in range(count):
            time.sleep(random.random() / 10)
            backend = random.choice(['perf', 'perf_jit', 'perf_elf'])
            done = self.attach(process.pid, '--backend', backend)
            self.assertRegex(done.stdout, rf'\Aprocess {process.pid}: {backend} is on, \d{{3,}} functions have names\n\Z')
            if random.random() < 0.5:
                self.attach(process.pid, command='detach')
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        err, lost = LOST.subn('', err)
        self.assertEqual((process.returncode, out), (0, expected.replace(' 0\n', f' {lost}\n')))
        self.assertEqual(err.replace(str(process.pid), ''), expected_err.replace(str(plain.pid), ''))

    def test_this_interpreter(self):
        self.check_attaching()

    def test_pyenv_3_11(self):
        self.check_attaching(pyenv_interpreter('3.11'))

    def test_pyenv_3_12(self):
        self.check_attaching(pyenv_interpreter('3.12'))

    def test_pyenv_3_13(self):
        self.check_attaching(pyenv_interpreter('3.13'))

    def test_3_13_started_by_its_loader(self):
        self.check_attaching(interpreter('3.13'))

    def test_3_14(self):
        self.check_attaching(interpreter('3.14'))

    def test_3_15(self):
        self.check_attaching(interpreter('3.15'))

    def check_handlers(self, python):
        process = self.start('''
import signal
class Alarm(Exception): pass
armed, raised, caught, stop, inside = False, 0, 0, False, set()
def on_alarm(_, frame):
    global armed, raised
    while frame:
        if 'perf_trampoline' in frame.f_code.co_filename: inside.add(frame.f_code.co_filename)
        frame = frame.f_back
    if armed:
        armed, raised = False, raised + 1
        raise Alarm(raised)
def on_stop(*_): global stop; stop = True
signal.signal(signal.SIGTERM, on_stop)
signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
print('ready', flush=True)
while not stop or not raised:
    try:
        armed = True
        while not stop: sum(map(abs, range(20)))
        armed = False
    except Alarm as alarm:
        assert alarm.args == (raised,)
        caught += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(raised == caught, raised > 10, inside)
''', python)
        for backend in 'perf', 'perf_elf':
            self.attach(process.pid, '--backend', backend)
        process.send_signal(signal.SIGTERM)
        return (*process.communicate(timeout=60), process.returncode)

    def test_handlers_that_raise_are_heard(self):
        """What they raise belongs to the main thread, and not to our code that it waits for."""
        self.assertEqual(self.check_handlers(([sys.executable], None)), ('True True set()\n', '', 0))

    def test_handlers_that_raise_are_heard_by_3_14(self):
        python = interpreter('3.14')
        for _ in range(20):
            out, err, status = self.check_handlers(python)
            if not LOST.match(err):
                break
        self.assertEqual((out, err, status), ('True True set()\n', '', 0))

    def test_process_that_is_starting(self):
        """It holds the locks of the modules that it is importing, which our code wants too."""
        source = 'import asyncio, json, re, tempfile, time; time.sleep(0.1); print(json.dumps([re.sub("a", "b", "aaa")]))'
        for _ in range(times(3, 50)):
            process = subprocess.Popen([sys.executable, '-c', source], text=True, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, env=self.env)
            self.addCleanup(perf_support.remove_files, process.pid)
            time.sleep(random.random() / 5)
            self.attach(process.pid, '--timeout', '3', check=False)
            self.assertEqual((*process.communicate(timeout=60), process.returncode), ('["bbb"]\n', '', 0))

    def test_interrupted_or_killed_command_leaves_no_breakpoint(self):
        """While gdb waits for the process."""
        for number in signal.SIGINT, signal.SIGKILL:
            process = self.start(STEPS)
            attaching = subprocess.Popen(
                [sys.executable, '-m', 'perf_trampoline', 'attach', str(process.pid), '--timeout', '60'],
                env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            status = Path(f'/proc/{process.pid}/status')
            while sys.version_info < (3, 14) and attaching.poll() is None:
                text = status.read_text()
                if 'TracerPid:\t0' not in text and 'State:\tS' in text:      # gdb has let it go on, and waits
                    break
                time.sleep(0.01)
            attaching.send_signal(number)
            self.assertNotEqual(attaching.wait(timeout=20), 0)
            while number == signal.SIGKILL and 'TracerPid:\t0' not in status.read_text():
                time.sleep(0.01)
            for _ in range(3):
                self.step(process, 'import sys; list(map(lambda f: f(), [old, older]))')

    def test_no_directory_is_left(self):
        before = set(glob.glob('/tmp/python-attach-*'))
        process = self.start(STEPS)
        self.attach(process.pid, '--timeout', '0.2', check=False)       # it waits for input
        self.step(process)
        self.assertEqual(set(glob.glob('/tmp/python-attach-*')) - before, set())


class NamesTest(AttachTest):

    def attach_while_stepping(self, process, *options, **more):
        """Attach to a process that waits for lines, by giving it some."""
        arguments = ['-m', 'perf_trampoline', more.get('command', 'attach'), str(process.pid), *options]
        attaching = subprocess.Popen([sys.executable, *arguments], env=self.env, text=True, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE)
        while attaching.poll() is None:
            self.step(process)
            time.sleep(0.01)
        out, err = attaching.communicate()
        self.assertEqual((attaching.returncode, err), (0, ''))
        return out

    def test_functions_that_exist_are_named_at_once(self):
        process = self.start(STEPS)
        self.attach_while_stepping(process, '--backend', 'perf')
        self.assertLess({'old', 'older', 'never_called', 'never_called.<locals>.<lambda>',
                         'never_called.<locals>.<listcomp>'} - ({'never_called.<locals>.<listcomp>'}
                        if sys.version_info >= (3, 12) else set()), self.names(process.pid))

    def test_functions_are_named_at_their_next_call(self):
        process = self.start(STEPS)
        self.attach_while_stepping(process, '--backend', 'perf', '--no-existing')
        self.assertEqual(self.names(process.pid) & {'old', 'older', 'never_called'}, set())
        self.step(process, 'list(map(lambda f: f(), [old]))')
        self.assertEqual(self.names(process.pid) & {'old', 'older', 'never_called'}, {'old', 'older'})

    def test_detached_process_names_nothing(self):
        process = self.start(STEPS)
        self.attach_while_stepping(process, '--backend', 'perf')
        self.attach_while_stepping(process, command='detach')
        self.step(process, 'def late(): pass\nlate()'.replace('\n', '\\n').join(["exec('", "')"]))
        self.assertNotIn('late', self.names(process.pid))

    def test_filter(self):
        process = self.start(STEPS)
        self.attach_while_stepping(process, '--backend', 'perf', '--filter', '__main__')
        self.assertLess({'old', 'never_called'}, self.names(process.pid))
        self.assertEqual({name for _, _, name in map_entries(process.pid) if '<string>' not in name}, set())

    def test_perf_record_of_an_attached_process(self):
        process = self.start('''
import time
def burn(n):
    while n: n -= 1
def outer(): burn(20000)
print('ready', flush=True)
while True: list(map(lambda _: outer(), range(3)))
''')
        self.attach(process.pid)
        data = f'{self.images}/perf.data'
        env = self.env | {'HOME': self.images, 'PERF_CONFIG': '/dev/null'}
        record = subprocess.run(['perf', 'record', '-q', '-F', '499', '--call-graph', 'dwarf,32768', '-o', data,
                                 '-p', str(process.pid), 'sleep', '1'], env=env, text=True, capture_output=True)
        if record.returncode:
            self.skipTest(f'perf cannot record here: {record.stderr.strip()}')
        script = subprocess.run(['perf', 'script', '-i', data, '-F', 'ip,sym'], env=env, text=True, capture_output=True)
        stacks = [re.findall(r'py::([\w.<>]+):', stack) for stack in script.stdout.split('\n\n')]
        burning = [stack for stack in stacks if 'burn' in stack]
        self.assertGreater(len(burning), 50)
        whole = [stack for stack in burning if stack[:3] == ['burn', 'outer', '<lambda>']]
        self.assertGreater(len(whole), 0.9 * len(burning))


class WaitingTest(AttachTest):

    def check_parked_main(self, python):
        process = self.start('''
import threading, time
def busy(n): return sum(map(lambda x: x, range(n)))
def work():
    while True: busy(100)
threading.Thread(target=work, daemon=True).start()
print('ready', flush=True)
threading.Lock().acquire()
lock = threading.Lock(); lock.acquire(); lock.acquire()
''', python)
        self.attach(process.pid, '--backend', 'perf')
        self.assertLess({'busy', 'work'}, self.names(process.pid))
        self.attach(process.pid, command='detach')

    def test_main_thread_waits_and_another_works(self):
        if sys.version_info >= (3, 14):
            self.skipTest('sys.remote_exec() is for the main thread')
        self.check_parked_main(([sys.executable], None))

    def test_the_same_in_3_13(self):
        self.check_parked_main(pyenv_interpreter('3.13'))

    def test_root_attaches_to_a_process_of_another_user(self):
        if os.geteuid() != 0:
            self.skipTest('needs root')
        os.chmod(self.images, 0o777)
        nobody = ['setpriv', '--reuid=nobody', '--regid=nogroup', '--clear-groups']
        look = subprocess.run([*nobody, sys.executable, '-c', 'import perf_trampoline'], capture_output=True, env=self.env)
        if look.returncode:
            self.skipTest('another user does not see this build')
        process = self.start(BUSY, ([*nobody, sys.executable], None))
        self.attach(process.pid, '--backend', 'perf')
        self.assertEqual(os.stat(f'/tmp/perf-{process.pid}.map').st_uid, os.stat(f'/proc/{process.pid}').st_uid)
        self.assertIn('checksum', self.names(process.pid))


class ExistingTest(ProgramTest):
    """name_existing(), in the process itself."""

    def check_named(self, expected, source):
        done = self.run_program(f'''
import perf_trampoline
{source}
perf_trampoline.activate('perf')
number = perf_trampoline.name_existing()
assert number == perf_trampoline.name_existing() > 100, number
perf_trampoline.deactivate()
''')
        self.assertEqual((done.stdout, done.stderr), ('', ''))
        names = {name.split(':')[2] for _, _, name in map_entries(done.pid)}
        self.assertEqual({name for name in names if name.startswith('mine')}, expected)

    def test_functions_methods_and_those_yet_to_be_made(self):
        methods = {f'mine_C.{name}' for name in ('method', 'static', 'value', '<lambda>')}
        self.check_named({'mine', 'mine.<locals>.inner', 'mine_C'} | methods, '''
def mine():
    def inner(): pass
class mine_C:
    def method(self): pass
    @staticmethod
    def static(): pass
    @property
    def value(self): pass
    hidden = [lambda: 1]
''')

    def test_generators_and_coroutines_without_a_function(self):
        self.check_named({f'mine_{kind}{inner}' for kind in ('gen', 'co', 'agen') for inner in ('', '.<locals>.inner')}, '''
def mine_gen():
    def inner(): pass
    yield
async def mine_co():
    def inner(): pass
async def mine_agen():
    def inner(): pass
    yield
kept = mine_gen(), mine_co(), mine_agen()
next(kept[0])
import atexit; atexit.register(kept[1].close)
del mine_gen, mine_co, mine_agen
''')

    def test_what_frames_under_way_are_about_to_define(self):
        self.check_named({'mine_later'}, '''
import threading
under_way, go_on = threading.Event(), threading.Event()
source = "under_way.set(); go_on.wait()\\ndef mine_later(): pass"
threading.Thread(target=lambda: exec(source, globals())).start()
under_way.wait()
import atexit; threading._register_atexit(go_on.set)
''')

    def test_no_destructor_runs_elsewhere(self):
        """Objects die in the thread that lets them go."""
        images = tempfile.TemporaryDirectory()
        self.addCleanup(images.cleanup)
        done = self.run_program('''
import perf_trampoline, threading, types
perf_trampoline.activate('perf_elf')
wrong, stop = [], []
class Mine:
    def __init__(self): self.thread = threading.get_ident(); self.cycle = []
    def __del__(self):
        if threading.get_ident() != self.thread: wrong.append(self)
def work():
    while not stop:
        def gen(m):
            try: yield m
            finally: m.__del__()
        g = gen(Mine()); next(g)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
plain = (lambda: 1).__code__
for i in range(30):
    kept = [types.FunctionType(plain.replace(co_name=f'n{i}_{j}'), {}) for j in range(1000)]
    perf_trampoline.name_existing()
stop.append(1)
for thread in threads: thread.join()
print(len(wrong))
''', env={'PERF_TRAMPOLINE_DIR': images.name})
        self.assertEqual((done.stdout, done.stderr), ('0\n', ''))


class RefusalTest(AttachTest):
    """One sentence says why not, and the process has not noticed."""

    def check_untouched(self, process):
        self.step(process, "import sys; assert 'perf_trampoline' not in sys.modules")
        self.step(process, "import os; assert not any('perf-' in os.readlink(f'/proc/self/fd/{fd}') for fd in range(3, 9) "
                           "if os.path.exists(f'/proc/self/fd/{fd}'))")

    def test_no_process(self):
        process = subprocess.Popen(['true'])
        process.wait()
        self.assert_refused('there is no process', process.pid)

    def test_zombie(self):
        process = subprocess.Popen(['true'])
        self.addCleanup(process.wait)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self.assert_refused('is zombie', process.pid)

    def test_stopped(self):
        process = self.start(STEPS)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        self.assert_refused('is stopped', process.pid)
        process.send_signal(signal.SIGCONT)
        self.check_untouched(process)

    def test_no_cpython(self):
        process = subprocess.Popen(['sleep', '100'])
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        time.sleep(0.1)
        self.assert_refused(r'is not a CPython whose symbols can be seen \(sleep\)', process.pid)

    def test_itself(self):
        done = perf_support.run(['-c', 'import os, perf_trampoline; perf_trampoline.attach(os.getpid())'], check=False)
        self.assertIn('this is the process itself', done.stderr)

    def test_debugged(self):
        process = self.start(STEPS)
        gdb = subprocess.Popen(['gdb', '-nx', '-q', '-batch', '-p', str(process.pid), '-ex', 'shell sleep 100'],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(gdb.wait)
        self.addCleanup(os.killpg, gdb.pid, signal.SIGKILL)
        status = Path(f'/proc/{process.pid}/status')
        while 'TracerPid:\t0' in status.read_text():
            time.sleep(0.05)
        self.assert_refused('(is being debugged by process|is tracing stop)', process.pid)

    def test_remote_debugging_disabled(self):
        for command, env in (([sys.executable], {'PYTHON_DISABLE_REMOTE_DEBUG': '1'}),
                             ([sys.executable, '-X', 'disable-remote-debug'], {})):
            process = self.start(STEPS, (command, self.env | env))
            self.assert_refused('PYTHON_DISABLE_REMOTE_DEBUG or -X disable-remote-debug', process.pid)
            self.check_untouched(process)

    def test_without_gdb(self):
        process = self.start(STEPS)
        if sys.version_info >= (3, 14):
            self.skipTest('from 3.14 on gdb is not needed')
        self.env = self.env | {'PATH': self.images}
        self.assert_refused('needs gdb to attach: install gdb', process.pid)
        self.check_untouched(process)

    def test_main_thread_that_waits(self):
        process = self.start(STEPS)
        self.assert_refused('has not (come to run Python code|answered) for 0.5 seconds', process.pid, '--timeout', '0.5')
        self.check_untouched(process)

    def test_package_that_does_not_fit(self):
        command, env = pyenv_interpreter('3.12')
        process = self.start(STEPS, (command, {key: env[key] for key in env if key != 'PYTHONUSERBASE'}))
        self.assert_refused('runs Python 3.12 and finds no perf_trampoline built for it', process.pid)
        self.check_untouched(process)

    def test_old_python(self):
        process = self.start(STEPS.replace('f\'', '\''), (pyenv_program('3.10'), None))
        self.assert_refused('runs Python 3.10: trampolines need 3.11 or later', process.pid)
        self.check_untouched(process)

    def test_another_user(self):
        if os.geteuid() != 0:
            self.skipTest('needs a process of another user')
        process = self.start(STEPS)
        nobody = ['setpriv', '--reuid=nobody', '--regid=nogroup', '--clear-groups']
        done = subprocess.run([*nobody, sys.executable, '-m', 'perf_trampoline', 'attach', str(process.pid)], text=True,
                              capture_output=True, env=self.env)
        if 'No module' in done.stderr or 'not permitted' in done.stderr or 'denied' in done.stderr:
            self.skipTest('another user does not see this build')
        self.assertEqual(done.stderr, f"perf trampoline: process {process.pid} is another user's: "
                                      'attach as that user or as root\n')
        self.check_untouched(process)

    def test_other_process_numbers(self):
        unshare = ['unshare', '-p', '-f', '--kill-child', *([] if os.geteuid() == 0 else ['-r'])]
        if subprocess.run([*unshare, 'true'], capture_output=True).returncode:
            self.skipTest('this user cannot make a namespace of process numbers')
        process = self.start(STEPS, ([*unshare, sys.executable], None))
        inner = int(Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text())
        self.assert_refused('has process numbers of its own: attach from inside its container', inner)
        self.check_untouched(process)


def pyenv_program(version):
    home = Path(os.environ.get('PYENV_ROOT') or Path.home() / '.pyenv')
    programs = sorted(home.glob(f'versions/{version}.*/bin/python{version}'))
    if not programs:
        raise unittest.SkipTest(f'pyenv has no Python {version} here')
    return [str(programs[-1])]


if __name__ == '__main__':
    unittest.main()
