"""Lives that programs lead: servers that fork, coroutines on stacks of their own, users that change, refusals.

Each is lived with every backend: the program does what it does without, its functions have names, other people's bytes
stay, and of what goes wrong one line tells.
"""

import functools
import http.client
import itertools
import os
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
import test_perf_trampoline
from perf_support import EMULATED, FULL
from test_perf_map import parse
from test_perf_trampoline import BACKENDS, PRELUDE, TrampolineTest

import jitdump
import perf_script

VARIABLES = {'perf': 'PYTHONPERFSUPPORT', 'perf_jit': 'PYTHON_PERF_JIT_SUPPORT', 'perf_elf': 'PYTHON_PERF_ELF_SUPPORT'}
NOBODY = 65534
# Any Python code that runs for a message of ours would be seen.
SILENT = '''
import warnings
sys.unraisablehook = lambda unraisable: print('unraisable', unraisable, flush=True)
warnings.showwarning = lambda *warning: print('warning', *warning, flush=True)
'''
NO_SECCOMP = EMULATED or os.uname().machine == 's390x', 'an emulator makes its own code; s390x has another mmap()'


def each_backend(test):
    @functools.wraps(test)
    def run(self, *arguments, **options):
        for backend in BACKENDS:
            with self.subTest(backend):
                test(self, backend, *arguments, **options)
    return run


class LivesTest(TrampolineTest):

    def setUp(self):
        # Other users make their images below.
        scratch = tempfile.TemporaryDirectory(prefix='lives-')
        self.addCleanup(scratch.cleanup)
        self.scratch = Path(scratch.name)
        self.scratch.chmod(0o1777)
        self.images = f'{self.scratch}/images'

    def switched_on(self, backend):
        return {'PERF_TRAMPOLINE_DIR': self.images, VARIABLES[backend]: '1'}

    def functions(self, pid, backend):
        """The names of the functions in that process's files, which are whole, whatever became of it."""
        if backend == 'perf':
            parse(Path(f'/tmp/perf-{pid}.map').read_text('utf-8'), killed=True)
        elif backend == 'perf_jit':
            header, records = jitdump.read(f'/tmp/jit-{pid}.dump')
            self.assertEqual({header.pid} | {record.pid for record in records if hasattr(record, 'pid')}, {int(pid)})
        return {name[4:].partition(':')[0] for name in self.names(pid, backend)}

    def assert_named(self, pid, backend, present, absent=(), inherited=()):
        """Each process has files of its own, but an image names what it has for children as well."""
        found = self.functions(pid, backend)
        present, absent = {*present}, {*absent}
        (absent if backend == 'perf_elf' else present).update(inherited)
        self.assertEqual((present - found, absent & found), (set(), set()), (pid, backend))

    def assert_one_message(self, done, reason):
        """It says the reason, once, and so does status(), which the program has printed last."""
        self.assertRegex(done.stderr, rf'\Aperf trampoline: [^\n]*{reason}[^\n]*\n\Z')
        self.assertEqual(done.stdout.splitlines()[-1], done.stderr.removeprefix('perf trampoline: ').rstrip('\n'))


class MultiprocessingTest(LivesTest):

    PROGRAM = '''
import multiprocessing, os, sys
def before(n): return n + 1
def work(n): return os.getpid(), before(n)
def parent_later(): pass
if __name__ == '__main__':
    before(1)
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        workers = [process.pid for process in multiprocessing.active_children()]
        results = pool.map(work, range(50), 1)
        pool.close(); pool.join()
    parent_later()
    assert [number for _, number in results] == [*range(1, 51)]
    assert {pid for pid, _ in results} <= {*workers}
    print(*workers)
'''

    @each_backend
    def test_workers_of_every_kind(self, backend):
        program = self.scratch / 'program.py'
        program.write_text(self.PROGRAM)
        for method in ('fork', 'spawn', 'forkserver') if FULL or backend == 'perf_elf' else ['fork']:
            with self.subTest(method):
                done = perf_support.run([program, method], env=os.environ | self.switched_on(backend))
                workers = done.stdout.split()
                self.remove_files_of(done.pid, *workers)
                self.assertEqual(done.stderr, '')
                self.assert_named(done.pid, backend, {'before', 'parent_later'}, {'work'})
                worked = set.union(*(self.functions(pid, backend) for pid in workers))
                inherited = {'before'} if (backend, method) == ('perf_elf', 'fork') else set()
                self.assertEqual({'before', 'work'} - worked, inherited)
                self.assertNotIn('parent_later', worked)

    @each_backend
    def test_subprocess_inherits_what_the_environment_says(self, backend):
        done = self.run_program('''
import subprocess
source = """
def in_subprocess(): import perf_trampoline; print(perf_trampoline.is_active(), len(perf_trampoline.status()['files']))
in_subprocess()"""
plain = {name: value for name, value in os.environ.items() if 'PERF' not in name or 'DIR' in name}
for env in os.environ, plain, os.environ | dict.fromkeys(set(os.environ) - set(plain), '0'):
    with subprocess.Popen([sys.executable, '-c', source], env=env, stdout=subprocess.PIPE, text=True) as process:
        print(process.pid, process.stdout.read(), end='')
''', env={VARIABLES[backend]: '1'})
        self.assertEqual(done.stderr, '')
        found = [line.split() for line in done.stdout.splitlines()]
        self.remove_files_of(*(pid for pid, *_ in found))
        self.assertEqual([state for _, *state in found], [['True', '1'], ['False', '0'], ['False', '0']])
        self.assert_named(found[0][0], backend, {'in_subprocess'})
        self.assert_named(done.pid, backend, {'Popen.__init__'}, {'in_subprocess'})

    @each_backend
    def test_fork_that_python_is_not_told_of(self, backend):
        """A server that embeds Python, or an extension, calls the C library's."""
        done = self.check(f'''
import ctypes
activate({backend!r})
def shared(): pass
def child_only(): pass
def parent_only(): pass
libc = ctypes.PyDLL(None)
shared()
if pid := libc.fork():
    wait(pid); parent_only(); os.write(1, b'%d' % pid)
else:
    ctypes.pythonapi.PyOS_AfterFork_Child() if {FULL} else None
    shared(); child_only()
    for f in functions(3000, 'late'): f()
    os._exit(0)
''', stdout=unittest.mock.ANY)
        self.remove_files_of(done.stdout)
        self.assert_named(done.pid, backend, {'shared', 'parent_only'}, {'child_only', 'late_7'})
        self.assert_named(done.stdout, backend, {'child_only', 'late_2999'}, {'parent_only'}, {'shared'})


    @each_backend
    def test_fork_that_python_is_not_told_of_with_more_interpreters(self, backend):
        done = self.run_program(f"""{test_perf_trampoline.InterpretersTest.NEW}
import ctypes
subs = [new(), new()]
activate({backend!r})
def in_main(): pass
in_main()
run(subs[0], "import sys; sys.activate_stack_trampoline({backend!r})\\ndef in_sub(): pass\\nin_sub()")
if pid := ctypes.PyDLL(None).fork():
    wait(pid); print(pid)
    for sub in subs: interpreters.destroy(sub)
else:
    run(subs[1], "import sys; sys.activate_stack_trampoline({backend!r})\\ndef in_other(): pass\\nin_other()")
    for _ in range(2): before = status()['slots']
    run(subs[0], 'in_sub()')
    assert status()['slots'] - before == ({backend!r} != 'perf_elf')
    in_main()
    os._exit(0)
""")
        child = done.stdout.strip()
        self.remove_files_of(child)
        self.assertEqual(done.stderr, '')
        self.assert_named(done.pid, backend, {'in_main', 'in_sub'}, {'in_other'})
        self.assert_named(child, backend, {'in_other'}, (), {'in_main', 'in_sub'})


class ServerTest(LivesTest):
    """Servers that load their application, then fork."""

    APPLICATION = '''
import os
def shared(): return b'%d' % os.getpid()
def before_fork(): return shared()
before_fork()
def in_request(): return shared()
def application(environ, start_response):
    start_response('200 OK', [('Content-Type', 'text/plain')])
    return [in_request()]
'''

    def request(self, path):
        connection = http.client.HTTPConnection('localhost', timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request('GET', '/')
        try:
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    @each_backend
    def check_server(self, backend, *command, env=()):
        (self.scratch / 'app.py').write_text(self.APPLICATION)
        address = self.scratch / f'{backend}.socket'
        with open(self.scratch / 'log', 'w+') as log:
            server = subprocess.Popen([word.replace('SOCKET', str(address)) for word in command],
                                      env=os.environ | self.switched_on(backend) | dict(env),
                                      cwd=self.scratch, stdout=log, stderr=log)
            self.addCleanup(server.kill)
            end, workers = time.monotonic() + 30, set()
            while len(workers) < 2 and server.poll() is None and time.monotonic() < end:
                try:
                    workers.add(self.request(address))
                except (FileNotFoundError, ConnectionRefusedError):
                    time.sleep(0.02)
            server.terminate()
            status = server.wait(30)
            log.seek(0)
            said = log.read()
        self.remove_files_of(server.pid, *workers)
        self.assertEqual((status, len(workers)), (0, 2), said)
        self.assertNotRegex(said, 'perf trampoline|Traceback')
        self.assert_named(server.pid, backend, {'shared', 'before_fork'}, {'in_request', 'application'})
        for worker in workers:
            self.assert_named(worker, backend, {'in_request', 'application'}, {'before_fork'}, {'shared'})

    def test_gunicorn(self):
        if subprocess.run([sys.executable, '-c', 'import gunicorn'], capture_output=True).returncode:
            self.skipTest('gunicorn is missing')
        self.check_server(sys.executable, '-m', 'gunicorn', '--preload', '-w', '2', '-b', 'unix:SOCKET',
                          'app:application')

    def test_uwsgi(self):
        uwsgi = ['uwsgi', '--plugin', 'python3']
        if not shutil.which('uwsgi'):
            self.skipTest('uwsgi is missing')
        done = subprocess.run([*uwsgi, '--python-version'], capture_output=True, text=True)
        if done.stdout.strip() != '.'.join(map(str, sys.version_info[:3])):
            self.skipTest('uwsgi has another Python')
        self.check_server(*uwsgi, '--http-socket', 'SOCKET', '--master', '-p', '2', '--need-app', '--die-on-term',
                          '--no-orphans', '--wsgi-file', 'app.py', env={'PYTHONUSERBASE': sys.prefix})


class RefusalTest(LivesTest):
    """The kernel refuses something from some moment on."""

    # Functions are made before, so that only their naming needs anything.
    MADE = SILENT + """
import resource, signal
made = functions(4000, 'made')
before = functions(10, 'before')
def call(of):
    for f in of: assert f() is None
def results(): call(made); print(sys.is_stack_trampoline_active()); print(status()['failure'])
"""

    @each_backend
    def check_refused(self, backend, refuse, reason):
        """With `refuse` done after a first few functions, all goes on but names."""
        done = self.run_program(f"{self.MADE}activate({backend!r}); call(before); status()\n{refuse}\nresults()")
        self.assert_one_message(done, reason)
        self.assertEqual(done.stdout.splitlines()[-2:-1], ['False'])
        self.assert_named(done.pid, backend, {f'before_{i}' for i in range(10)})

    def test_limit_on_file_sizes_kills_nobody(self):
        """The signal for it is fatal unless the interpreter's way with it is left as it is."""
        self.check_refused("""
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
""", 'File too large')

    @each_backend
    def test_limit_on_file_sizes_from_the_beginning(self, backend):
        for size in 0, 20000:
            done = self.run_program(self.MADE + f"""
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
activate({backend!r}); results()
""")
            self.assert_one_message(done, 'File too large')

    def test_limit_on_descriptors(self):
        self.check_refused("""
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1,) * 2)
""", '(Too many open files|cannot open shared object file)')

    def test_limit_on_memory(self):
        self.check_refused("""
made += functions(8000, 'more')
gc.collect(); gc.disable()
size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size, size))
""", '(Cannot allocate memory|no memory)')

    # Refuse mprotect() that makes executable, as systemd's MemoryDenyWriteExecute and SELinux's execmem do; with `mmap`
    # mapping files so as well.
    FILTER = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
def refuse_executable(error, mmap):
    numbers = {'x86_64': (10, 329, 9), 'ppc64le': (125, 386, 90)}.get(os.uname().machine, (226, 288, 222))
    load, equal, set_bits, ret = 0x20, 0x15, 0x45, 0x06
    code = [(load, 0, 0, 0)]
    for number in numbers[:3 if mmap else 2]:
        low = 16 + 8 * 2 + (4 if sys.byteorder == 'big' else 0)
        code += [(equal, 0, 4, number), (load, 0, 0, low), (set_bits, 0, 1, 4), (ret, 0, 0, 0x50000 | error),
                 (ret, 0, 0, 0x7fff0000)]
    code += [(ret, 0, 0, 0x7fff0000)]
    filter = b''.join(struct.pack('HBBI', *one) for one in code)
    room = ctypes.create_string_buffer(filter, len(filter))
    program = struct.pack('HxxxxxxQ', len(code), ctypes.addressof(room))
    assert libc.prctl(38, 1, 0, 0, 0) == 0      # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, program, 0, 0):        # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        print('no seccomp'); sys.exit()
"""

    @unittest.skipIf(*NO_SECCOMP)
    def test_executable_memory_is_refused(self):
        for error, reason in (1, 'Operation not permitted'), (13, 'Permission denied'):
            for mmap, backends in (False, BACKENDS[:2]), (True, BACKENDS):
                for backend in backends:
                    with self.subTest(backend, error=error, mmap=mmap):
                        done = self.run_program(f"""{self.FILTER}{self.MADE}
import perf_trampoline.images
refuse_executable({error}, {mmap}); activate({backend!r}); results()""")
                        if done.stdout == 'no seccomp\n':
                            self.skipTest('this kernel has no seccomp')
                        self.assert_one_message(done, f'({reason}|executable mappings are forbidden)')
            done = self.run_program(f"""{self.FILTER}{self.MADE}
refuse_executable({error}, False); activate("perf_elf"); results()""")
            self.assertEqual((done.stdout, done.stderr), ('True\nNone\n', ''))
            self.assert_named(done.pid, 'perf_elf', {'made_3999'})

    @unittest.skipIf(*NO_SECCOMP)
    @each_backend
    def test_executable_memory_is_refused_later(self, backend):
        done = self.run_program(f"""{self.FILTER}{self.MADE}
activate({backend!r}); call(before); call(functions(2000, 'many')); refuse_executable(13, True); results()""")
        if done.stdout == 'no seccomp\n':
            self.skipTest('this kernel has no seccomp')
        self.assert_one_message(done, '(Permission denied|executable mappings are forbidden)')
        self.assert_named(done.pid, backend, {'before_9', 'many_1999', 'made_9'})

    @unittest.skipIf(EMULATED, 'an emulator makes its own code')
    def test_kernel_that_denies_writable_memory_to_become_executable(self):
        for backend in BACKENDS[:2]:
            with self.subTest(backend):
                done = self.run_program(f"""{self.MADE}
import ctypes
print(ctypes.CDLL(None).prctl(65, 1, 0, 0, 0))         # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
activate({backend!r}); results()""")
                if not done.stdout.startswith('0\n'):
                    self.skipTest('this kernel has no PR_SET_MDWE')
                self.assert_one_message(done, 'no executable memory for trampolines: Permission denied')


class DescriptorTest(LivesTest):
    """Descriptors are the program's: whatever it opens, closes or has under a number is none of ours."""

    @each_backend
    def test_all_are_closed_and_taken_for_other_files(self, backend):
        precious = self.scratch / 'precious'
        precious.write_text('precious')
        done = self.check(f"""
activate({backend!r})
for f in functions(100, 'before'): f()
print(*sorted(os.listdir('/proc/self/fd')))
fd = os.open({str(precious)!r}, os.O_RDWR)
for number in range(3, 100): os.dup2(fd, number)
for f in functions(4000, 'after'): f()
print(sum(os.fstat(number).st_ino == os.fstat(fd).st_ino for number in range(3, 100)))
os.closerange(3, 100)
for f in functions(4000, 'last'): f()
print(*sorted(os.listdir('/proc/self/fd')))
if (pid := os.fork()) == 0: functions(1, 'child')[0](); os._exit(0)
wait(pid)
""", stdout='0 1 2 3\n97\n0 1 2 3\n')
        self.assertEqual(precious.read_text(), 'precious')
        self.assert_named(done.pid, backend, {'before_99', 'after_3999', 'last_3999'})

    FAIL = RefusalTest.MADE + """
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
results()
"""

    @each_backend
    def test_message_is_not_written_into_a_file_that_has_the_number_of_stderr(self, backend):
        precious = self.scratch / 'precious'
        precious.write_text('precious')
        done = self.run_program(f"""
activate({backend!r})
os.dup2(os.open({str(precious)!r}, os.O_RDWR), 2)
os.closerange(3, 100)
{self.FAIL}""")
        self.assertEqual((precious.read_text(), done.stderr), ('precious', ''))
        self.assertRegex(done.stdout, r'\AFalse\n.*(Too many|cannot open).*\n\Z')

    def test_message_goes_into_a_log_that_stderr_is_led_to(self):
        log = self.scratch / 'log'
        done = self.run_program(f"""
activate('perf')
os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
os.closerange(3, 100)
{self.FAIL}""")
        done.stderr += log.read_text()
        self.assert_one_message(done, 'Too many open files')

    @each_backend
    def test_message_to_a_broken_pipe_kills_nobody(self, backend):
        done = self.run_program(f"""
import signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
reader, writer = os.pipe()
os.dup2(writer, 2); os.close(reader)
activate({backend!r})
os.closerange(3, 100)
{self.FAIL}""")
        self.assertRegex(done.stdout, r'\AFalse\n.*(Too many|cannot open).*\n\Z')

    @each_backend
    def test_message_to_a_full_pipe_keeps_nobody_waiting(self, backend):
        done = self.run_program(f"""
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True: os.write(writer, bytes(4096))
except BlockingIOError: os.set_blocking(writer, True)
os.dup2(writer, 2)
os.dup2(reader, 100)
activate({backend!r})
os.closerange(3, 100)
{self.FAIL}""", timeout=20)
        self.assertRegex(done.stdout, r'\AFalse\n.*(Too many|cannot open).*\n\Z')

    def test_closed_stderr_sends_no_message_elsewhere(self):
        """The start-up hook's sentence belongs into status() all the same."""
        done = self.run_program('print(status()["failure"])', '-X', 'perf_elf=/tmp/perf-x',
                                preexec_fn=lambda: os.close(2))
        self.assertRegex(done.stdout, r'\Aperf reads no images in /tmp/perf-x: .*\n\Z')


class UserTest(LivesTest):
    """Processes that begin as one user and go on as another."""

    BECOME_NOBODY = f'os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n'

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if os.geteuid():
            raise unittest.SkipTest('only root can become another user')
        if EMULATED:
            raise unittest.SkipTest('an emulator finds its own files no more when it has changed its user')

    @each_backend
    def test_umask_of_any_kind(self, backend):
        """Files are for their user alone, and for him always."""
        for umask in (0o777, 0o277, 0) if FULL else (0o777,):
            done = self.check(f"""
import perf_trampoline.images
for path in f'/tmp/perf-{{os.getpid()}}.map', f'/tmp/jit-{{os.getpid()}}.dump':
    if os.path.lexists(path): os.unlink(path)       # of an earlier process
{self.BECOME_NOBODY}os.umask({umask})
activate({backend!r})
for f in functions(1500, 'made'): f()
print(status()['failure'], {{oct(os.stat(path).st_mode & 0o777) for path in status()['files']}})
""", env={'PERF_TRAMPOLINE_DIR': f'{self.scratch}/of/{umask}'}, stdout="None {'0o600'}\n")
            self.images = f'{self.scratch}/of/{umask}'
            self.assert_named(done.pid, backend, {'made_1499'})
            shutil.rmtree(f'{self.scratch}/of', ignore_errors=True)

    def check_change(self, change, backend, reason):
        """All that was named before stays, and one sentence says that no name is added."""
        done = self.run_program(f"""
activate({backend!r})
for f in functions(100, 'before'): f()
{change}
for f in functions(4000, 'after'): f()
print(sys.is_stack_trampoline_active()); print(status()['failure'])
""")
        self.assert_one_message(done, reason)
        self.assert_named(done.pid, backend, {'before_99', 'after_0'})

    def test_files_of_the_former_user(self):
        for change in self.BECOME_NOBODY, f'os.seteuid({NOBODY})':
            for backend in BACKENDS[:2]:
                with self.subTest(backend, change=change):
                    self.check_change(change, backend, 'the process was another user when it was made')
            self.check_change(change, 'perf_elf', 'not a directory of this user alone')

    def test_another_root(self):
        for backend in BACKENDS[:2]:
            with self.subTest(backend):
                (self.scratch / backend).mkdir()
                self.check_change(f'os.chroot("{self.scratch}/{backend}")', backend, 'it was removed')

    def test_root_without_proc(self):
        """Nobody can tell which images are in use."""
        done = self.check(f"""
import perf_trampoline.images
os.chroot({str(self.scratch)!r})
os.mkdir('images', 0o700)
open('images/999999999-1-1.so', 'w').close()
os.utime('images/999999999-1-1.so', (0, 0))
activate('perf_elf')
for f in functions(2000, 'made'): f()
print(status()['failure'], os.path.exists('images/999999999-1-1.so'))
""", env={'PERF_TRAMPOLINE_DIR': '/images'}, cwd=self.scratch, stdout='None True\n')
        self.assert_named(done.pid, 'perf_elf', {'made_1999'})

    def test_user_without_a_home(self):
        user = 54321
        self.addCleanup(shutil.rmtree, f'/dev/shm/python-perf-{user}', ignore_errors=True)
        done = self.run_in_private_tmp('ro', PRELUDE + f"""
import perf_trampoline.images
mount_tmp()
for name in 'HOME', 'XDG_CACHE_HOME', 'PERF_TRAMPOLINE_DIR': os.environ.pop(name, None)
os.setgroups([]); os.setgid({user}); os.setuid({user})
activate('perf_elf')
print(os.listdir('.'), *map(os.path.dirname, status()['files'])); print(status()['failure'])
""", cwd=self.scratch)
        self.assert_one_message(done, 'Read-only file system')
        self.assertEqual(done.stdout.splitlines()[0], f'[] /dev/shm/python-perf-{user}')

    def test_images_of_the_later_user_are_in_a_directory_of_his(self):
        for change in self.BECOME_NOBODY, f'os.seteuid({NOBODY})\n':
            with self.subTest(change):
                done = self.run_in_private_tmp('mode=1777', PRELUDE + f"""
mount_tmp()
del os.environ['PERF_TRAMPOLINE_DIR']
activate('perf_elf')
for f in functions(100, 'before'): f()
{change}
for f in functions(4000, 'after'): f()
if (pid := os.fork()) == 0: functions(1, 'child')[0](); os._exit(0)
wait(pid)
print(sys.is_stack_trampoline_active(), status()['failure'], {{os.path.dirname(path) for path in status()['files']}})
print(os.stat('/tmp/python-perf-{NOBODY}').st_uid, len(os.listdir('/tmp/python-perf-{NOBODY}')))
""")
                self.assertEqual(done.stderr, '')
                self.assertRegex(done.stdout, rf"\ATrue None {{('/tmp/python-perf-({NOBODY}|0)'(, )?){{2}}}}\n"
                                              rf"{NOBODY} [23]\n\Z")

    @each_backend
    def test_server_whose_workers_become_another_user(self, backend):
        """The child opens its files as the first user, and goes on as the second."""
        done = self.run_program(f"""
activate({backend!r})
functions(1, 'parent')[0]()
if pid := os.fork(): wait(pid); print(pid)
else:
    functions(1, 'early')[0]()
    {self.BECOME_NOBODY.strip()}
    for f in functions(50, 'late'): f()
    os._exit(0)
""")
        self.remove_files_of(done.stdout.strip())
        self.assertEqual(done.stderr, '')
        self.assert_named(done.stdout.strip(), backend, {'early_0', 'late_49'}, {'parent_0'})


class NamespaceTest(LivesTest):

    @each_backend
    def test_process_numbers_of_its_own(self, backend):
        unshare = perf_support.unshare_mounts()
        done = perf_support.run(['-c', PRELUDE + f"""
import subprocess
subprocess.run(['mount', '-t', 'tmpfs', 'none', '/tmp'], check=True)
os.environ['PERF_TRAMPOLINE_DIR'] = '/tmp/images'
activate({backend!r})
def inside(): pass
inside()
print(os.getpid(), status()['failure'], *status()['files'])
for path in status()['files']: print(b'py::inside:' in open(path, 'rb').read())
"""], python=[*unshare, '-pf', '--kill-child', sys.executable])
        self.assertEqual(done.stderr, '')
        self.assertRegex(done.stdout, r'\A1 None /tmp/(perf-1\.map|jit-1\.dump|images/1-1-\w+\.so)\nTrue\n\Z')

    @each_backend
    def test_two_processes_of_one_number_share_a_directory(self, backend):
        """The later one has the name; the earlier one says so, and neither writes into the other's file."""
        if os.geteuid():
            self.skipTest('only root has two namespaces within one')
        program = PRELUDE + """
activate(sys.argv[1])
def call(name, count):
    for f in functions(count, name): f()
call(sys.argv[2], 10)
print('ready', flush=True); sys.stdin.readline()
call(sys.argv[2] + '_more', 4000)
print(status()['failure'] is None, os.path.exists(path := status()['files'][0]) and
      (sys.argv[2] + '_more_1:').encode() in open(path, 'rb').read(), flush=True)
"""
        done = self.run_in_private_tmp('mode=1777', f"""
import os, sys
mount_tmp()
os.environ['PERF_TRAMPOLINE_DIR'] = '/tmp/images'
def start(name):
    process = subprocess.Popen(['unshare', '-pf', '--kill-child', sys.executable, '-c', {program!r}, {backend!r}, name],
                               text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == 'ready\\n'
    return process
first = start('first')
second = start('second')
for process in second, first: print(*process.communicate('go on\\n'), process.returncode)
""")
        alone = 'True True\n  0\n'
        late = 'False False\n perf trampoline: cannot write .*: it was removed\n 0\n'
        late = alone if backend == 'perf_elf' else late
        self.assertRegex(done.stdout, rf'\A{alone}{late}\Z')
        self.assertEqual(done.stderr, '')


class NameTest(LivesTest):

    def test_names_that_are_no_text_in_any_locale(self):
        directory = os.fsencode(self.scratch) + b'/\xff\xe9'
        os.mkdir(directory)
        program = os.fsdecode(directory + b'/pr\xf6gram.py')
        Path(program).write_text("def größe(): return ascii(größe.__code__.co_filename)\nprint(größe())\n", 'utf-8')
        plain_c = {'LC_ALL': 'POSIX', 'PYTHONCOERCECLOCALE': '0', 'PYTHONUTF8': '0'}
        locales = [({'LC_ALL': 'C.UTF-8'}, r'\xff\xe9/pr\xf6gram.py'), ({'LC_ALL': 'C'}, r'\xff\xe9/pr\xf6gram.py'),
                   (plain_c, r'\xff\xe9/pr\xf6gram.py')]
        latin_1 = 'en_US.ISO-8859-1'
        make = ['localedef', '-c', '-i', 'en_US', '-f', 'ISO-8859-1', self.scratch / latin_1]
        if shutil.which('localedef') and not subprocess.run(make, capture_output=True).returncode:
            locales.append((plain_c | {'LC_ALL': latin_1, 'LOCPATH': str(self.scratch)}, 'ÿé/prögram.py'))
        for number, (locale, name) in enumerate(locales):
            env = os.environ | locale
            plain = perf_support.run([program], env=env)
            for backend in BACKENDS if FULL or 'LOCPATH' in locale else [BACKENDS[number]]:
                with self.subTest(backend, locale=locale):
                    done = perf_support.run([program], env=env | self.switched_on(backend))
                    self.remove_files_of(done.pid)
                    self.assertEqual((done.stdout, done.stderr), (plain.stdout, ''))
                    self.assertIn(f'py::größe:{self.scratch}/{name}', self.names(done.pid, backend))
                    if backend == 'perf_jit':
                        paths = {entry.name for record in jitdump.read(f'/tmp/jit-{done.pid}.dump')[1]
                                 for entry in getattr(record, 'entries', ())}
                        self.assertIn(program, paths)
        if len(locales) < 4:
            self.skipTest('latin-1 alone was left out: install locales')

    def test_message_is_one_line_whatever_a_path_is(self):
        done = self.run_program('print(status()["failure"])', '-X', f'perf_elf={self.scratch}/a\n\x1b[31m:b')
        self.assert_one_message(done, r'colon.*a\?\?\[31m:b')


class EndTest(LivesTest):
    """However a process ends, what it has named is in files that are whole."""

    ENDS = {
        'os._exit(3)': 3, 'os.abort()': -signal.SIGABRT, 'os.kill(os.getpid(), 9)': -9, 'os.kill(os.getpid(), 11)': -11,
        'os.execv("/bin/true", ["true"])': 0, 'sys.exit(3)': 3, 'raise KeyboardInterrupt': -signal.SIGINT,
        'threading.Thread(target=lambda: sys.exit(3)).start()': 0,
        'threading.Thread(target=lambda: os._exit(3)).start(); __import__("time").sleep(9)': 3,
        'ctypes.CDLL(None).exit(3)': 3, 'ctypes.CDLL(None).quick_exit(3)': 3,
    }

    def test_ends_of_all_kinds(self):
        for number, (end, status) in enumerate(self.ENDS.items()):
            for backend in BACKENDS if FULL else [BACKENDS[number % 3]]:
                with self.subTest(end, backend=backend):
                    done = self.run_program(f"""
import ctypes, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
activate({backend!r})
for f in functions(1500, 'made'): f()
def last(): {end}
last()
""", check=False)
                    self.assertEqual(done.returncode, status, done.stderr)
                    self.assertNotIn('perf trampoline', done.stderr)
                    self.assert_named(done.pid, backend, {'made_0', 'made_1499', 'last'})

    @each_backend
    def test_python_that_becomes_another_python(self, backend):
        """The same process number: the file of what was there before is an earlier process's."""
        done = self.run_program("""
def before(): os.execv(sys.executable, [sys.executable, '-c', 'def after(): print(1)\\nafter()'])
before()
""", env=self.switched_on(backend))
        self.assertEqual((done.stdout, done.stderr), ('1\n', ''))
        self.assert_named(done.pid, backend, {'after'}, {'before'} if backend != 'perf_elf' else ())

    @each_backend
    def test_nothing_of_it_is_seen_by_the_strictest_program(self, backend):
        """All warnings are errors, files that nobody closes are told, whatever becomes of the trampolines."""
        program = SILENT + """
sys.addaudithook(lambda event, arguments: event.startswith('perf') and print(event))
threads = [threading.Thread(target=lambda: [f() for f in functions(20, threading.get_ident())]) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if (pid := os.fork()) == 0: functions(1, 'child')[0](); os._exit(0)
wait(pid)
"""
        self.check(program, '-X', 'dev', '-W', 'error', '-X', backend)
        done = self.run_program(program, '-X', 'dev', '-W', 'error', '-X', backend,
                                preexec_fn=lambda: __import__('resource').setrlimit(
                                    __import__('resource').RLIMIT_FSIZE, (0, 0)))
        self.assertRegex(done.stderr, r'\Aperf trampoline: [^\n]*File too large[^\n]*\n\Z')
        self.assertEqual(done.stdout, '')


@unittest.skipIf(EMULATED, 'perf sees the emulator')
class WatchedTest(LivesTest):
    """A service of one user, and what others see of it with `perf record -p`."""

    SERVICE = """
import os, sys
def burn(n):
    while n: n -= 1
def outer(): burn(20000)
print('ready', os.getpid(), flush=True)
while True: outer()
"""
    PERFMON, PTRACE, READ = 'cap_38', 'cap_19', 'cap_2'
    OPERATOR = 12345

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if os.geteuid():
            raise unittest.SkipTest('only root can become other users')
        try:
            perf_script.check()
        except perf_script.PerfError as error:
            raise unittest.SkipTest(str(error))
        look = [*cls.become(NOBODY), sys.executable, '-c', 'import perf_trampoline']
        if subprocess.run(look, capture_output=True).returncode:
            raise unittest.SkipTest('another user does not see this build')

    @staticmethod
    def become(user, *more):
        return ['setpriv', f'--reuid={user}', f'--regid={user}', '--clear-groups', *more]

    def shares(self, backend, *capabilities):
        """Of the samples in burn(): which part shows it, and outer() too, to root or a user with these capabilities."""
        service = subprocess.Popen([*self.become(NOBODY), sys.executable, '-X', backend, '-c', self.SERVICE], text=True,
                                   stdout=subprocess.PIPE, env=os.environ | {'PERF_TRAMPOLINE_DIR': self.images},
                                   preexec_fn=lambda: perf_support.remove_files(os.getpid()))
        self.addCleanup(service.stdout.close)
        self.addCleanup(service.wait)
        self.addCleanup(service.kill)
        self.addCleanup(self.remove_files_of, service.pid)
        self.assertEqual(service.stdout.readline(), f'ready {service.pid}\n')
        granted = ','.join(f'+{capability}' for capability in capabilities)
        operator = self.become(self.OPERATOR, f'--inh-caps={granted}', f'--ambient-caps={granted}') if granted else []
        perf = [*operator, 'env', f'HOME={self.scratch}', 'PERF_CONFIG=/dev/null', 'perf']
        data = self.scratch / f'{service.pid}.data'
        record = subprocess.run([*perf, 'record', '-q', '-e', perf_script.EVENT, '-F', '499', '-k', 'mono', '-o', data,
                                 '--call-graph', 'dwarf,32768', '-p', str(service.pid), 'sleep', '1'],
                                text=True, capture_output=True)
        self.assertEqual(record.returncode, 0, record.stderr)
        self.assertIsNone(service.poll())
        if backend == 'perf_jit':
            data = perf_script.inject(data)
        stacks = [[name[0] for frame in sample.stack if (name := perf_script.python_name(frame))]
                  for sample in perf_script.samples(data, perf)]
        self.assertGreater(len(stacks), 20)
        return [sum(stack[:len(names)] == names for stack in stacks) / len(stacks)
                for names in (['burn'], ['burn', 'outer'])]

    def test_root_sees_all_of_a_service(self):
        for backend in BACKENDS if FULL else ['perf_elf']:
            with self.subTest(backend):
                leaf, whole = self.shares(backend)
                self.assertGreater(leaf, 0.9)
                if backend != 'perf':       # a map has no unwind data
                    self.assertGreater(whole, 0.9)

    def test_perfmon_alone_sees_samples_without_names(self):
        self.assertEqual(self.shares('perf_elf', self.PERFMON), [0, 0])
        if FULL:
            self.assertEqual(self.shares('perf', self.PERFMON), [0, 0])

    def test_perfmon_that_may_read_files_sees_all_of_images(self):
        leaf, whole = self.shares('perf_elf', self.PERFMON, self.PTRACE, self.READ)
        self.assertGreater(leaf, 0.9)
        self.assertGreater(whole, 0.9)


class BehindOurBackTest(LivesTest):
    """Somebody else has his hands on our files, or the program is never left in peace."""

    def check_all_goes_on(self, attack, backend, reason, **options):
        done = self.run_program(f"""
import shutil
activate({backend!r})
for f in functions(100, 'before'): f()
for path in status()['files']: {attack}
made = functions(4000, 'after')
for f in made * 2: assert f() is None
print(sys.is_stack_trampoline_active()); print(status()['failure'])
""", **options)
        if reason:
            self.assert_one_message(done, reason)
        else:
            self.assertEqual((done.stdout, done.stderr), ('True\nNone\n', ''))
        return done

    @each_backend
    def test_files_are_truncated(self, backend):
        self.check_all_goes_on('os.truncate(path, 0)', backend, 'was truncated')
        self.check_all_goes_on('''
    import faulthandler; faulthandler.enable()
    for f in functions(2000, 'between'): f()
    for path in status()['files']: os.truncate(path, 0)''', backend, 'was truncated')

    def test_signal_for_it_is_the_programs_all_the_same(self):
        lives = {'default': 'pass', 'ignored': 'signal.signal(signal.SIGBUS, signal.SIG_IGN)',
                 'handled': 'signal.signal(signal.SIGBUS, lambda *_: print("heard", flush=True))',
                 'fatal': 'import faulthandler; faulthandler.enable()'}
        fault = """
import mmap, tempfile
with tempfile.TemporaryFile() as file:
    file.write(b'0' * 4096); file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
    os.truncate(file.fileno(), 0)
    mapped[0]
"""
        for (life, source), when, what in itertools.product(
                lives.items(), ['before', 'after'][not FULL:], ['os.kill(os.getpid(), signal.SIGBUS)', fault]):
            if what == fault and life in ('ignored', 'handled'):
                continue        # a fault for ever
            with self.subTest(life, when=when, what=what[:7]):
                call = "for f in functions(2000, 'made'): f()"
                plain = self.check_same_as_plain(f"""
import resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{f"{call}; {source}" if when == 'after' else source}
{call}
for _ in range(2):
    {what.strip().replace(chr(10), chr(10) + '    ')}
    print('alive', flush=True)
""", same_error=life != 'fatal')
                self.assertEqual(plain.returncode, 0 if life in ('ignored', 'handled') else -signal.SIGBUS)

    @each_backend
    def test_files_are_removed(self, backend):
        self.check_all_goes_on('os.unlink(path)', backend, backend != 'perf_elf' and 'it was removed')

    def test_other_files_take_their_names(self):
        for backend in BACKENDS[:2]:
            for plant in ("open(path, 'w').write('precious')", "os.mkfifo(path)", "os.mkdir(path)",
                          "os.symlink('/etc/passwd', path)"):
                with self.subTest(backend, plant=plant):
                    done = self.check_all_goes_on(f'os.unlink(path); {plant}', backend,
                                                  '(it was removed|Is a directory|Too many levels)')
                    path, = self.files(done.pid)[backend]
                    if os.path.isdir(path):
                        os.rmdir(path)
                    elif 'precious' in plant:
                        self.assertEqual(Path(path).read_text(), 'precious')

    def test_directory_is_removed(self):
        self.check_all_goes_on('shutil.rmtree(os.path.dirname(path))', 'perf_elf', None)

    @unittest.skipIf(EMULATED, 'strace sees the emulator')
    def test_interrupted_allocation_is_made_again(self):
        """Of tmpfs, with many signals."""
        if not shutil.which('strace'):
            self.skipTest('strace is missing')
        strace = ['strace', '-f', '-qq', '-o', '/dev/null', '-e', 'inject=fallocate:error=EINTR:when=1..5']
        self.check_all_goes_on('pass', 'perf_elf', None, python=[*strace, sys.executable])

    @each_backend
    def test_signals_that_come_all_the_time(self, backend):
        done = self.check(f"""
import signal
num_heard = 0
def hear(*_):
    global num_heard
    num_heard += 1
signal.signal(signal.SIGALRM, hear)
activate({backend!r})
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
for f in functions(8000, 'made'): f()
signal.setitimer(signal.ITIMER_REAL, 0)
print(num_heard > 10, status()['failure'])
""", stdout='True None\n')
        self.assert_named(done.pid, backend, {'made_0', 'made_7999'})


class GreenletTest(LivesTest):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if subprocess.run([sys.executable, '-c', 'import greenlet'], capture_output=True).returncode:
            raise unittest.SkipTest('greenlet is missing')

    def test_switch_throw_and_death_within_traced_functions(self):
        self.check_same_as_plain('''
from greenlet import GreenletExit, getcurrent, greenlet
log = []
def deep(n, then): return deep(n - 1, then) + 1 if n else then()
def work(name):
    try:
        for i in range(50):
            functions(1, f'{name}_{i}')[0]()
            log.append(deep(i, lambda: main.switch(i) and 0))
    except (KeyError, GreenletExit) as error:
        log.append(repr(error))
        raise
main = getcurrent()
lets = [greenlet(lambda name=name: work(name)) for name in 'abc']
for i in range(30):
    for let in lets: assert let.switch(1) in (i, None)
try: lets[0].throw(KeyError('thrown'))
except KeyError as error: log.append(str(error))
lets[1].throw(GreenletExit)
del lets[2], let
gc.collect()
thread = threading.Thread(target=lambda: greenlet(lambda: log.append(deep(100, lambda: 0))).switch())
thread.start(); thread.join()
late = greenlet(lambda: deep(3000, lambda: main.switch(0)))
late.switch()
print(log, late.dead)
''')

    def test_each_sample_shows_its_own_greenlet_only(self):
        try:
            perf_script.check()
        except perf_script.PerfError as error:
            self.skipTest(str(error))
        program = self.scratch / 'program.py'
        program.write_text('''
import time
from greenlet import getcurrent, greenlet
def burn():
    end = time.process_time() + 0.004
    while time.process_time() < end: sum(range(100))
def one(): one_deeper()
def one_deeper(): run()
def two(): two_deeper()
def two_deeper(): two_deepest()
def two_deepest(): run()
def three(): run()
def run():
    while True:
        burn()
        hub.switch()
hub = getcurrent()
lets = [greenlet(f) for f in (one, two, three)]
while time.process_time() < 0.8:
    for let in lets: let.switch()
''')
        expected = ['one', 'one_deeper', 'run'], ['two', 'two_deeper', 'two_deepest', 'run'], ['three', 'run']
        for backend in ['perf_elf', 'perf_jit'][:1 + FULL]:
            with self.subTest(backend):
                data = self.scratch / f'{backend}.data'
                perf_script.record([sys.executable, '-X', backend, program], data, freq=500, call_graph='dwarf,32768',
                                   env=os.environ | {'PERF_TRAMPOLINE_DIR': self.images})
                if backend == 'perf_jit':
                    data = perf_script.inject(data)
                stacks = [[name[0] for frame in reversed(sample.stack) if (name := perf_script.python_name(frame))]
                          for sample in perf_script.samples(data)]
                burning = [stack[1:-1] for stack in stacks if stack[-1:] == ['burn']]
                self.assertGreater(len(burning), 30)
                for stack in burning:
                    self.assertIn(stack, expected)
                for stack in expected:
                    self.assertGreater(burning.count(stack), 0.2 * len(burning))


if __name__ == '__main__':
    unittest.main()
