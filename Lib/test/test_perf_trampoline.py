"""The trampoline's life: switches, threads, forks, interpreters, recursion; and that no program is the worse for it.

Programs run under the interpreter that runs this file; what the files say is tested in test_perf_map and
test_perf_jitdump.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
from perf_support import EMULATED, ProgramTest, map_entries, times

import archs
import jitdump

BACKENDS = 'perf', 'perf_jit', 'perf_elf'

PRELUDE = '''\
import gc, os, sys, threading, types
activate, deactivate = sys.activate_stack_trampoline, sys.deactivate_stack_trampoline
def status():
    import perf_trampoline
    return perf_trampoline.status()
def functions(count, prefix, plain=(lambda: None).__code__):
    return [types.FunctionType(plain.replace(co_name='f', co_qualname=f'{prefix}_{i}'), {}) for i in range(count)]
def wait(pid):
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, status
'''


class TrampolineTest(ProgramTest):

    def setUp(self):
        images = tempfile.TemporaryDirectory()
        self.addCleanup(images.cleanup)
        self.images = images.name

    def run_program(self, source, *options, env=(), **run_options):
        env = {'PERF_TRAMPOLINE_DIR': self.images} | dict(env)
        return super().run_program(PRELUDE + source, *options, env=env, **run_options)

    def files(self, pid):
        """By backend, the files of that process."""
        patterns = f'/tmp/perf-{pid}.map', f'/tmp/jit-{pid}.dump', f'{self.images}/{pid}-*.so'
        return {backend: files for backend, pattern in zip(BACKENDS, patterns) if (files := glob.glob(pattern))}

    def check(self, source, *options, stdout='', stderr='', **run_options):
        """The program ends well and says this."""
        done = self.run_program(source, *options, **run_options)
        self.assertEqual((done.stdout, done.stderr), (stdout, stderr))
        return done

    def check_each_backend(self, source, **run_options):
        for backend in BACKENDS:
            with self.subTest(backend):
                self.check(f'activate({backend!r})\n{source}', **run_options)

    def check_same_as_plain(self, source, *options, same_error=True, **run_options):
        """With each backend the program does what it does without: output, error output and exit status."""
        backends = BACKENDS[-1:] if EMULATED else BACKENDS      # an emulator takes a second to start
        results = {backend: self.run_program(source, *backend, *options, check=False, **run_options)
                   for backend in [(), *(('-X', backend) for backend in backends)]}
        plain = results.pop(())
        for backend, done in results.items():
            with self.subTest(backend[1]):
                self.assertEqual((done.returncode, done.stdout), (plain.returncode, plain.stdout))
                if same_error:
                    self.assertEqual(done.stderr, plain.stderr)
        return plain

    def remove_files_of(self, *pids):
        self.addCleanup(perf_support.remove_files, *pids)

    def names(self, pid, backend='perf'):
        """The names in that process's files of one backend."""
        if backend == 'perf':
            return {name for _, _, name in map_entries(pid)}
        if backend == 'perf_jit':
            return {record.name for record in jitdump.read(f'/tmp/jit-{pid}.dump')[1] if hasattr(record, 'name')}
        return {name.decode(errors='replace') for path in glob.glob(f'{self.images}/{pid}-*.so')
                for name in Path(path).read_bytes().split(b'\0') if name.startswith(b'py::')}


class SwitchTest(TrampolineTest):

    def check_backend(self, backend, *options, env=()):
        done = self.check('print(sys.is_stack_trampoline_active() and status()["backend"])', *options, env=env,
                          stdout=f'{backend or False}\n')
        files = self.files(done.pid)
        if sys.version_info[:2] == (3, 12) and backend != 'perf':
            files.pop('perf', None)         # an interpreter that knows -X perf only has begun a map by itself
        self.assertEqual([*files], [backend] if backend else [])

    def check_ignored_by(self, option):
        if self.run_program('import perf_trampoline', option, check=False).returncode:
            self.skipTest('the package is found through the environment here')
        self.check_backend(None, option, env={'PYTHONPERFSUPPORT': '1'})
        self.check_backend('perf', option, '-X', 'perf')

    def test_option(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                self.check_backend(backend, '-X', backend)

    def test_variable(self):
        self.check_backend('perf', env={'PYTHONPERFSUPPORT': '1'})
        self.check_backend('perf_jit', env={'PYTHON_PERF_JIT_SUPPORT': '1'})
        self.check_backend('perf_elf', env={'PYTHON_PERF_ELF_SUPPORT': '1'})

    def test_variable_that_is_0_or_empty(self):
        for value in '0', '':
            self.check_backend(None, env={'PYTHONPERFSUPPORT': value, 'PYTHON_PERF_JIT_SUPPORT': value})

    def test_richer_of_two_options(self):
        self.check_backend('perf_jit', '-X', 'perf', '-X', 'perf_jit')
        self.check_backend('perf_jit', '-X', 'perf_jit', '-X', 'perf')
        self.check_backend('perf_elf', '-X', 'perf_jit', '-X', 'perf_elf')

    def test_richer_of_two_variables(self):
        self.check_backend('perf_jit', env={'PYTHONPERFSUPPORT': '1', 'PYTHON_PERF_JIT_SUPPORT': '1'})

    def test_option_goes_before_variable(self):
        self.check_backend('perf', '-X', 'perf', env={'PYTHON_PERF_JIT_SUPPORT': '1'})

    def test_ignored_environment(self):
        self.check_ignored_by('-E')

    def test_isolated_mode(self):
        self.check_ignored_by('-I')

    def test_nothing_is_imported_when_nothing_is_switched_on(self):
        self.check("print([name for name in sys.modules if 'perf' in name])", stdout='[]\n')

    def test_interpreters_own_stays_where_it_is_wanted(self):
        for options, env in (['-X', 'perf_native'], {}), ([], {'PYTHON_PERF_NATIVE': '1'}):
            done = ProgramTest.run_program(self, '''
import sys, perf_trampoline
print(perf_trampoline.status()['active'], type(getattr(sys, 'activate_stack_trampoline', None)).__name__)
''', *options, '-X', 'perf', env=env)
            own = 'NoneType' if sys.version_info < (3, 12) else 'builtin_function_or_method'
            self.assertEqual((done.stdout, done.stderr), (f'False {own}\n', ''))


class SysTest(TrampolineTest):

    def test_functions_are_there_without_an_import(self):
        self.check('''
for switch in deactivate, activate, deactivate: switch(); print(sys.is_stack_trampoline_active())
''', stdout='False\nTrue\nFalse\n')

    def test_default_backend_is_the_map(self):
        self.check('activate(); print(status()["backend"])', stdout='perf\n')

    def test_wrong_arguments_raise_as_in_cpython(self):
        self.check('''
for arguments in ('gprof',), (1,), (b'perf',), (None,), ('perf', 2):
    try: activate(*arguments)
    except (ValueError, TypeError) as error: print(type(error).__name__, *error.args[:len(arguments) == 1])
print(sys.is_stack_trampoline_active())
''', stdout='''\
ValueError invalid backend: gprof
TypeError activate_stack_trampoline() argument must be str, not int
TypeError activate_stack_trampoline() argument must be str, not bytes
TypeError activate_stack_trampoline() argument must be str, not NoneType
TypeError
False
''')

    def test_activation_again_changes_nothing(self):
        """CPython 3.13.12 and 3.14.3 lost a watcher each time and crashed at exit."""
        self.check_each_backend('''
import json
for _ in range(20): activate(status()['backend'])
functions(1, 'f')[0]()
''')

    def test_backend_asked_for_is_the_one_used(self):
        for backend in BACKENDS:
            done = self.run_program(f'activate({backend!r}); print(status()["files"])')
            self.assertEqual(done.stdout, f'{self.files(done.pid)[backend]}\n')

    def test_status(self):
        done = self.run_program('''
before = status()
activate('perf')
live = functions(10, 'f')
for f in live: f()
during = status()
del live, f
dead = status()
deactivate()
after = status()
for state in before, during, after: print(state['active'], state['backend'], state['files'], state['displaced'],
                                          state['chained'], state['failure'], state['unavailable'])
print(sorted(before), before['architecture'])
print(during['functions'] >= 10, during['slots'] - dead['slots'], after['functions'] >= during['functions'])
''')
        file = f"['/tmp/perf-{done.pid}.map']"
        self.assertEqual(done.stdout.splitlines(), [
            'False None [] False False None None',
            f'True perf {file} False False None None',
            f'False None {file} False False None None',
            "['active', 'architecture', 'backend', 'chained', 'displaced', 'failure', 'files', 'filter', 'functions', "
            f"'slots', 'unavailable'] {archs.host().name}",
            'True 10 True'])

    def test_status_tells_a_failure_until_the_next_activation(self):
        self.check('''
path = f'/tmp/perf-{os.getpid()}.map'
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
os.mkdir(path)
activate('perf'); print(sys.is_stack_trampoline_active(), path in status()['failure'])
os.rmdir(path)
activate('perf'); print(sys.is_stack_trampoline_active(), status()['failure'])
''', stdout='False True\nTrue None\n')


class ToggleTest(TrampolineTest):

    def test_deactivation_inside_traced_functions(self):
        """CPython once freed the code into which they return."""
        self.check_each_backend('''
backend = status()['backend']
def leave(depth):
    if depth: return leave(depth - 1) + 1
    deactivate()
    return 0
for _ in range(1000):
    activate(backend)
    assert leave(3) == 3
''')

    def test_toggling_while_threads_call(self):
        """CPython: SIGSEGV, and SystemError 'error return without exception set'."""
        self.check(f'''
stop = []
def call(depth):
    if depth: return call(depth - 1)
    return sum(x for x in range(3))
def work():
    while not stop:
        assert call(5) == 3
        functions(1, threading.get_ident())[0]()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for _ in range({times(10000)}): activate('perf'); deactivate()
for _ in range({times(1000)}): activate('perf'); activate('perf_jit'); activate('perf_elf')
stop.append(1)
for thread in threads: thread.join()
''')

    def test_going_to_and_fro_between_backends(self):
        done = self.run_program('''
f, = functions(1, 'f')
for _ in range(1000):
    for backend in 'perf', 'perf_jit', 'perf_elf':
        activate(backend); f(); assert status()['backend'] == backend
''')
        names = [getattr(record, 'name', '') for record in jitdump.read(f'/tmp/jit-{done.pid}.dump')[1]]
        self.assertEqual(sum(name.startswith('py::f_0:') for name in names), 1)
        self.assertEqual(sum(name.startswith('py::f_0:') for _, _, name in map_entries(done.pid)), 1)

    def test_threads_that_still_run_at_exit(self):
        self.check_each_backend('''
def work():
    while True: functions(1, 'f')[0]()
for _ in range(4): threading.Thread(target=work, daemon=True).start()
import time; time.sleep(0.1)
''')

    def test_activation_from_a_signal_handler(self):
        self.check_each_backend('''
import signal
deactivate()
def handler(*_): deactivate() if sys.is_stack_trampoline_active() else activate('perf')
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
assert fib(20) == 6765
signal.setitimer(signal.ITIMER_REAL, 0)
''')

    def test_activation_in_a_destructor_and_at_exit(self):
        self.check_each_backend('''
import atexit
activate, deactivate = sys.activate_stack_trampoline, sys.deactivate_stack_trampoline
class Late:
    def __del__(self): deactivate(); activate('perf_jit'); functions(1, 'late')[0]()
kept = Late()
atexit.register(lambda: (deactivate(), activate('perf')))
''')


class ProgramsTest(TrampolineTest):
    """The same output and exit status as without."""

    def test_generators_coroutines_and_pending_exceptions(self):
        self.check_same_as_plain('''
import asyncio, contextlib
def generator():
    try:
        while True:
            try: yield 1
            except KeyError as error: yield repr(error.__context__)
    finally: print('closed', sys.exc_info()[0])
g = generator(); next(g)
try: 1 / 0
except ZeroDivisionError: print(g.throw(KeyError('thrown into')))
g.close()
h = generator(); next(h)
try: h.throw(OSError('thrown through'))
except OSError as error: print(error)
fresh = generator()
try: fresh.throw(ValueError('before the first step'))
except ValueError as error: print(error)
async def agen():
    try:
        for i in range(3): yield i; await asyncio.sleep(0)
    finally: await asyncio.sleep(0); print('agen closed')
async def main():
    async for i in agen():
        if i == 1: break
    async def fail(): raise LookupError('in a task')
    print(await asyncio.gather(fail(), asyncio.sleep(0, 'slept'), return_exceptions=True))
    try: await asyncio.wait_for(asyncio.sleep(9), 0.001)
    except TimeoutError: print('timed out')
asyncio.run(main())
class Unraisable:
    def __del__(self): raise RuntimeError('in a destructor')
sys.unraisablehook = lambda u: print('unraisable', u.exc_value)
try:
    kept = Unraisable(); raise KeyError(kept)
except KeyError: pass
del kept
delegated = (lambda: (yield from generator()))(); next(delegated); del delegated; gc.collect()
''')

    def test_first_call_by_throw_keeps_the_exception(self):
        self.check_each_backend('''
backend = status()['backend']
def generator(): yield 1
for error in KeyError('a'), OSError(1, 'b'), SystemExit(3):
    deactivate()
    made = types.FunctionType(generator.__code__.replace(co_name=repr(error)), {})()
    activate(backend)
    try: made.throw(error)
    except BaseException as caught: assert caught is error, caught
''')

    def test_classes_lambdas_comprehensions_and_replaced_code(self):
        self.check_same_as_plain('''
class Base(type):
    def __prepare__(name, bases): return {'prepared': name}
class C(metaclass=Base):
    items = [(lambda x=x: x)() for x in range(3)]
    nested = {k: [v for v in range(k)] for k in range(3)}
    def method(self): return __class__.__name__, super().__repr__()[:5]
    __slots__ = ()
print(C.items, C.nested, C.prepared, C().method())
def f(x): return x
f.__code__ = f.__code__.replace(co_consts=(None,), co_name='g', co_qualname='h')
for _ in range(100): assert f(5) == 5
f.__code__ = (lambda x: -x).__code__
print(f(5), sorted([3, 1, 2], key=lambda x: -x), max(map(f, range(3))))
''')

    def test_exec_of_code_in_a_loop(self):
        self.check_same_as_plain('''
total = 0
for i in range(3000):
    exec(f'def f(): return {i}\\ntotal += f()')
print(total, eval('sum(x for x in range(9))'), os.path.basename(__file__) if '__file__' in globals() else 'no file')
''')

    def test_many_code_objects_alive(self):
        self.check_each_backend('''
alive = functions(20000, 'alive')
for _ in range(2):
    for f in alive: f()
assert status()['slots'] >= 20000
del alive[::2]
assert 10000 <= status()['slots'] < 12000
for f in alive: f()
''')

    def test_uncaught_exception(self):
        plain = self.check_same_as_plain('''
def f(): g()
def g(): 1 / 0
f()
''')
        self.assertEqual(plain.returncode, 1)

    def test_exit_status(self):
        expected = {'sys.exit(3)': 3, 'os._exit(4)': 4, 'sys.exit("text")': 1, 'raise SystemExit': 0}
        for statement, status in expected.items():
            with self.subTest(statement):
                self.assertEqual(self.check_same_as_plain(f'def f(): {statement}\nf()').returncode, status)

    def test_abort_and_other_signals_kill(self):
        for signal in 'SIGABRT', 'SIGSEGV', 'SIGTERM':
            with self.subTest(signal):
                plain = self.check_same_as_plain(f'''
import resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def f(): {'os.abort()' if signal == 'SIGABRT' else f'os.kill(os.getpid(), signal.{signal})'}
f()
''')
                self.assertLess(plain.returncode, 0)

    def test_exec_of_another_program(self):
        self.check_same_as_plain('def f(): os.execv("/bin/echo", ["echo", "replaced"])\nf()')

    def test_module_script_and_standard_input(self):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, 'program.py').write_text('import sys\ndef f(): print(__name__, sys.argv[1:])\nf()\n')
            for arguments in ['-m', 'program', 'x'], ['program.py', 'x'], ['-', 'x']:
                outputs = set()
                for options in [], ['-X', 'perf'], ['-X', 'perf_jit']:
                    done = perf_support.run([*options, *arguments], cwd=directory, input='from program import f\nf()\n')
                    self.remove_files_of(done.pid)
                    outputs.add((done.stdout, done.stderr))
                self.assertEqual(len(outputs), 1)

    def test_closed_standard_streams(self):
        self.check_same_as_plain('def f(): return 1\nf()', preexec_fn=lambda: [os.close(fd) for fd in range(3)])

    def test_tracing_and_profiling_functions_see_the_same(self):
        self.check_same_as_plain('''
seen = []
def tracer(frame, event, argument):
    place = event, frame.f_code.co_name, frame.f_lineno
    # 3.12 tells a line again after a call, unless an evaluator is installed: its own does so too.
    if frame.f_code.co_filename == '<string>' and (event != 'line' or place not in seen): seen.append(place)
    return tracer
def f(n): return n and f(n - 1)
def g(): yield 1
for install in sys.settrace, sys.setprofile:
    install(tracer); f(3); list(g()); install(None)
print(seen)
''')


class RecursionTest(TrampolineTest):

    def test_deep_recursion_is_as_deep(self):
        self.check_same_as_plain('''
sys.setrecursionlimit(200000)
def down(n): return n and down(n - 1) + 1
print(down(100000))
class C:
    def down(self, n): return n and self.down(n - 1) + 1
print(C().down(50000), down(100000))
''')

    def test_recursion_error_at_the_same_depth(self):
        self.check_same_as_plain('''
def down():
    global depth
    depth += 1
    down()
for limit in 50, 1000, 3000, 30000:
    sys.setrecursionlimit(limit)
    depth = 0
    try: down()
    except RecursionError as error: print(limit, depth, error)
''')

    def test_recursion_through_c_is_as_deep(self):
        """Each of these takes C stack without us, too."""
        self.check_same_as_plain('''
class C:
    def __getattr__(self, name): return getattr(self, name + 'x')
class D:
    def __repr__(self): return repr([self])
for attempt in lambda: C().a, lambda: repr(D()), lambda: sorted([1, 2], key=lambda x: attempt()):
    try: attempt()
    except RecursionError: print('RecursionError')
''')

    def test_small_stacks(self):
        for kib in 64, 256, 8192:
            with self.subTest(kib):
                self.check_same_as_plain(f'''
threading.stack_size({kib} * 1024)
sys.setrecursionlimit(100000)
def down(n): return n and down(n - 1) + 1
def work():
    try: print(down(5), down(30000))
    except RecursionError: print('RecursionError')
for _ in range(3):
    thread = threading.Thread(target=work); thread.start(); thread.join()
''')

    def test_names_after_deep_recursion(self):
        done = self.run_program('''
activate('perf')
sys.setrecursionlimit(200000)
def down(n): return n and down(n - 1) + 1
for _ in range(3): down(100000)
functions(1, 'after')[0]()
print(sys.is_stack_trampoline_active())
''')
        self.assertEqual(done.stdout, 'True\n')
        self.assertIn('py::after_0:<string>', self.names(done.pid))


class ForkTest(TrampolineTest):

    def test_childs_names_are_in_its_own_file_only(self):
        done = self.run_program('''
import warnings; warnings.simplefilter('ignore')
activate('perf')
shared, = functions(1, 'shared'); shared()
if pid := os.fork():
    wait(pid)
    functions(1, 'parent')[0]()
    print(pid)
else:
    shared()
    functions(1, 'child')[0]()
''')
        child = int(done.stdout)
        self.remove_files_of(child)
        self.assertEqual([f'py::{name}_0:<string>' in self.names(pid)
                          for pid in (done.pid, child) for name in ('shared', 'parent', 'child')],
                         [True, True, False, True, False, True])

    def test_parents_file_is_left_alone(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                done = self.run_program(f'''
activate({backend!r})
def content(): return open(path, 'rb').read()
path = status()['files'][0]
content(); before = content()
if pid := os.fork():
    print(pid, os.waitpid(pid, 0)[1])
else:
    for f in functions(1500, 'child'): f()
    assert content() == before
''')
                pid, status = done.stdout.split()
                self.remove_files_of(pid)
                self.assertEqual(status, '0')

    def test_child_returns_through_the_parents_frames(self):
        """CPython unmapped inherited arenas in the child, whose stack was in them."""
        for backend in BACKENDS:
            with self.subTest(backend):
                done = self.run_program(f'''
activate({backend!r})
def fork(depth): return fork(depth - 1) if depth else os.fork()
def work():
    pid = fork(5)
    for f in functions(60, 'both'): f()
    gc.collect()
    return pid
pids = []
for _ in range({times(5, 50)}):
    if not (pid := work()): break
    wait(pid); pids.append(pid)
else: print(*pids)
''')
                self.remove_files_of(*done.stdout.split())

    def test_child_that_drops_the_parents_functions(self):
        """CPython 3.13.12: two watchers decremented one counter."""
        for backend in BACKENDS:
            with self.subTest(backend):
                done = self.run_program(f'''
activate({backend!r})
made = functions(50, 'parent')
for f in made: f()
if pid := os.fork(): wait(pid); print(pid)
else:
    more = functions(50, 'child')
    for f in more + made: f()
    del f, more, made
    gc.collect()
''')
                self.remove_files_of(done.stdout.strip())

    def test_fork_chain_keeps_no_files_open(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                done = self.run_program(f'''
activate({backend!r})
pids, counts = [], []
for i in range({times(40, 200)}):
    functions(1, f'generation_{{i}}')[0]()
    counts.append(len(os.listdir('/proc/self/fd')))
    if pid := os.fork(): os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    pids.append(os.getpid())
functions(1, 'last')[0]()
print(set(counts), sys.is_stack_trampoline_active()); print(*pids)
''')
                counts, _, pids = done.stdout.partition('\n')
                self.remove_files_of(*pids.split())
                self.assertRegex(counts, r'^\{\d+\} True$')

    @unittest.skipIf(EMULATED, '300 emulators at a time')
    def test_named_after_long_fork_chain(self):
        """Each generation takes a number of a code extra, and CPython has 255 of them."""
        done = self.run_program('''
activate('perf')
pids = []
def kept(): pass
for i in range(300):
    if pid := os.fork(): os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    pids.append(os.getpid())
    kept()
functions(1, 'last')[0]()
print(*pids)
''')
        pids = done.stdout.split()
        self.remove_files_of(*pids)
        self.assertEqual(done.stderr, '')
        self.assertIn('py::last_0:<string>', self.names(pids[-1]))

    def test_fork_while_threads_register(self):
        done = self.run_program(f'''
import warnings; warnings.simplefilter('ignore')
activate('perf')
stop, pids = [], []
def work():
    while not stop: functions(1, threading.get_ident())[0]()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for _ in range({times(20)}):
    if pid := os.fork(): wait(pid); pids.append(pid)
    else:
        for f in functions(20, 'child'): f()
        os._exit(0)
stop.append(1)
for thread in threads: thread.join()
print(*pids)
''')
        pids = done.stdout.split()
        self.remove_files_of(*pids)
        for pid in pids:
            self.assertLessEqual({f'py::child_{i}:<string>' for i in range(20)}, self.names(pid))


class InterpretersTest(TrampolineTest):

    NEW = '''
try: import _interpreters as interpreters
except ImportError: import _xxsubinterpreters as interpreters
def new(own_gil=False):
    if sys.version_info >= (3, 13): return interpreters.create('isolated' if own_gil else 'legacy')
    return interpreters.create(isolated=own_gil)
def run(interpreter, code):
    failure = interpreters.run_string(interpreter, code)
    assert failure is None, failure
'''

    def check_interpreters(self, source):
        self.check(self.NEW + source)

    def test_interpreter_that_activates_and_ends(self):
        self.check_interpreters(f'''
for i in range({times(100, 500)}):
    sub = new(own_gil=i % 2)
    backend = {BACKENDS!r}[i % 3]
    run(sub, f"import sys; sys.activate_stack_trampoline({{backend!r}})\\ndef f(): return 1\\nassert f() == 1")
    interpreters.destroy(sub)
    f, = functions(1, f'main_{{i}}'); f()
    assert not sys.is_stack_trampoline_active()
activate('perf'); f(); assert sys.is_stack_trampoline_active()
''')

    def test_interpreters_are_switched_one_by_one(self):
        self.check_interpreters('''
one, other = new(), new()
activate('perf')
for sub in one, other: run(sub, 'import sys; assert not sys.is_stack_trampoline_active()')
run(one, "sys.activate_stack_trampoline('perf')")
deactivate()
run(one, 'assert sys.is_stack_trampoline_active()')
run(other, 'sys.deactivate_stack_trampoline(); assert not sys.is_stack_trampoline_active()')
for sub in one, other: interpreters.destroy(sub)
''')

    def test_interpreters_that_outlive_their_last_call(self):
        self.check_interpreters('''
activate('perf_jit')
for own_gil in False, True: run(new(own_gil), "import sys; sys.activate_stack_trampoline('perf')\\ndef f(): pass\\nf()")
functions(1, 'f')[0]()
for sub in list(interpreters.list_all())[1:]: interpreters.destroy(sub[0] if isinstance(sub, tuple) else sub)
''')

    @unittest.skipIf(sys.version_info < (3, 12), 'an interpreter has no GIL of its own before 3.12')
    def test_interpreters_that_run_at_the_same_time(self):
        done = self.run_program(self.NEW + '''
activate('perf')
subs = [new(own_gil=True) for _ in range(4)]
code = """
import sys, types
sys.activate_stack_trampoline('perf')
plain = (lambda: None).__code__
for i in range(1000):
    types.FunctionType(plain.replace(co_name='f', co_qualname=f'sub_%d_{i}', co_filename='/x.py'), {})()
"""
threads = [threading.Thread(target=run, args=(sub, code % i)) for i, sub in enumerate(subs)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for sub in subs: interpreters.destroy(sub)
''')
        self.assertEqual(done.stderr, '')
        names = [name for _, _, name in map_entries(done.pid)]
        self.assertCountEqual([name for name in names if name.startswith('py::sub_')],
                              [f'py::sub_{i}_{j}:/x.py' for i in range(4) for j in range(1000)])


class OtherEvaluatorTest(TrampolineTest):
    """Another frame evaluator (PEP 523), before us and after us: a debugger's, a compiler's."""

    EVALUATOR = '''
typedef void *evaluator(void *tstate, void *frame, int throwflag);
evaluator *next;
unsigned long num_calls;
void *hook(void *tstate, void *frame, int throwflag) { num_calls++; return next(tstate, frame, throwflag); }
'''

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        arch = archs.host()
        compiler = shutil.which(f'{arch.prefix}gcc') or (not EMULATED and shutil.which('cc'))
        if not compiler:
            raise unittest.SkipTest(f'no C compiler for {arch.name}')
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        library = Path(directory.name) / 'evaluator.so'
        subprocess.run([compiler, '-shared', '-fPIC', '-nostdlib', '-x', 'c', '-o', library, '-'], text=True,
                       input=cls.EVALUATOR, check=True)
        cls.library = f'''
import ctypes
ctypes.pythonapi.PyInterpreterState_Get.restype = ctypes.c_void_p
interp = ctypes.c_void_p(ctypes.pythonapi.PyInterpreterState_Get())
get, set = ctypes.pythonapi._PyInterpreterState_GetEvalFrameFunc, ctypes.pythonapi._PyInterpreterState_SetEvalFrameFunc
get.restype = ctypes.c_void_p
set.restype = None
library = ctypes.CDLL({str(library)!r})
hook = ctypes.cast(library.hook, ctypes.c_void_p).value
next_one = ctypes.c_void_p.in_dll(library, 'next')
num_calls = ctypes.c_ulong.in_dll(library, 'num_calls')
def install_hook():
    next_one.value = get(interp)
    set(interp, ctypes.c_void_p(hook))
def installed(): return get(interp) == hook
def counted(count=10):
    before = num_calls.value
    for f in functions(count, 'counted'): f()
    return num_calls.value - before >= count
def state(): return [key for key in ('active', 'displaced', 'chained') if status()[key]]
'''

    def check_hook(self, source, stdout=''):
        return self.check(self.library + source, stdout=stdout)

    def test_one_before_us_is_chained(self):
        done = self.check_hook('''
install_hook()
activate('perf')
print(state(), counted(), sys.is_stack_trampoline_active())
deactivate()
print(state(), counted(), installed())
''', "['active', 'chained'] True True\n[] True True\n")
        self.assertIn('py::counted_9:<string>', self.names(done.pid))

    def test_one_after_us_displaces_us_and_stays(self):
        self.check_hook('''
activate('perf')
install_hook()
print(state(), counted(), sys.is_stack_trampoline_active())
deactivate()
print(state(), counted(), installed())
''', "['active', 'displaced'] True False\n[] True True\n")

    def test_one_after_us_that_calls_us_keeps_names(self):
        done = self.check_hook("activate('perf'); install_hook(); counted()")
        self.assertIn('py::counted_9:<string>', self.names(done.pid))

    def test_one_that_takes_the_interpreters_place_after_us_stays(self):
        self.check_hook('''
default = get(interp)
activate('perf')
install_hook()
next_one.value = default
counted()
activate('perf')
print(counted(), installed())
deactivate()
print(installed())
''', 'True True\nTrue\n')

    def test_activation_again_makes_no_circle(self):
        self.check_hook('''
for _ in range(5):
    activate('perf'); install_hook() if not installed() else None
    activate('perf_jit'); print(counted(), end=' ')
    deactivate(); activate('perf'); print(counted())
deactivate()
print(installed())
''', 'True True\n' * 5 + 'True\n')

    def test_one_that_leaves_again(self):
        self.check_hook('''
default = get(interp)
activate('perf')
ours = get(interp)
install_hook()
set(interp, ctypes.c_void_p(ours))
print(state())
deactivate()
print(get(interp) == default)
''', "['active']\nTrue\n")

    def test_one_before_us_that_leaves_while_we_are_there(self):
        """He puts back what he found, not knowing of us; activation finds the place again."""
        self.check_hook('''
default = get(interp)
install_hook()
activate('perf')
set(interp, ctypes.c_void_p(default))
print(state())
activate('perf')
print(state(), counted())
deactivate()
print(get(interp) == default)
''', "['active', 'displaced', 'chained']\n['active'] False\nTrue\n")


if __name__ == '__main__':
    unittest.main()
