"""What the tests share: builds for other interpreters, and a look at what a process wrote."""

import contextlib
import fcntl
import glob
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import unittest
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / 'Tools' / 'perf'))

import archs
import roots

FULL = os.environ.get('PERF_TRAMPOLINE_FULL') == '1'
# An emulator shows itself here; what it takes of memory and stack says nothing of ours.
EMULATED = 'qemu' in os.readlink('/proc/thread-self/exe')
# An interpreter of a root of its own; what perf and gdb see of such ones is tested from outside, version by version.
IN_ROOT = os.path.basename(os.readlink('/proc/self/exe')).startswith('ld-')
# An emulator keeps something of each piece of code, a sanitizer each block for a while after it was freed.
GROWS_ANYWAY = EMULATED or 'libasan' in os.environ.get('LD_PRELOAD', '')

# A shell's command in the background ignores it, and so would all that it starts: CPython's own tests, and ours.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def times(daily, full=None):
    """How often to repeat something: every day, and with PERF_TRAMPOLINE_FULL=1; an emulator takes ten times as long."""
    return full if FULL and full else -(-daily // 5) if EMULATED else daily


def build_for(python):
    """Build the package for `python`, a roots.Python; return the command that runs it and its environment.

    The build folder stands in for the user's own site directory, so the start-up line is read as if installed.
    """
    arch = next(arch for arch in archs.load().values() if arch.triplet in python.ext_suffix)
    cross = [] if arch == archs.host() else [f'--host={arch.triplet}']
    build = _build(f'{python.root.name}{python.ext_suffix}', python.program, *cross)
    return python.command, python.env | {'PYTHONUSERBASE': str(build)}


def _build(name, program, *options):
    """The folder of a build for that interpreter."""
    checkout = hashlib.sha256(str(SOURCE).encode()).hexdigest()[:12]
    build = roots.cache() / 'builds' / checkout / name
    build.mkdir(parents=True, exist_ok=True)
    with open(build / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / 'Makefile').exists():
            _run([SOURCE / 'configure', '-q', f'--with-python={program}', *options], build)
        _run(['make', '-s'], build)
    return build


def pyenv_interpreter(version):
    """Command and environment of the newest pyenv CPython of that version, with our package."""
    home = Path(os.environ.get('PYENV_ROOT') or Path.home() / '.pyenv')
    programs = sorted(home.glob(f'versions/{version}.*/bin/python{version}'))
    if not programs:
        raise unittest.SkipTest(f'pyenv has no Python {version} here')
    build = _build(f'pyenv-{programs[-1].parents[1].name}', programs[-1])
    env = {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'LD_'))}
    return [str(programs[-1])], env | {'PYTHONUSERBASE': str(build)}


def _run(command, directory):
    done = subprocess.run(list(map(str, command)), cwd=directory, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f'{command[0]} failed in {directory}:\n{done.stdout}')


def interpreter(version, arch=None):
    """Command and environment of a Debian CPython with our package; skips the test when the root cannot be had."""
    try:
        return build_for(roots.python(version, arch=arch))
    except roots.Unavailable as error:
        raise unittest.SkipTest(str(error))


def run(arguments, python=(sys.executable,), env=None, check=True, input=None, timeout=600, **options):
    """Run an interpreter; return its subprocess.CompletedProcess, with text output and `pid`."""
    started = time.time()
    process = subprocess.Popen([*python, *map(str, arguments)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, **options)
    for path in files_of(process.pid):      # of an earlier process of this number
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime < started - 1:
                os.unlink(path)
    try:
        out, err = process.communicate(input, timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f'killed after {timeout} seconds'
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    done.pid = process.pid
    if check and done.returncode != 0:
        raise AssertionError(f'exit status {done.returncode} of {process.args}\n{out}\n{err}')
    return done


def map_entries(pid):
    """The entries of a perf map as (start, size, name), read as perf reads them: other lines are skipped."""
    entries = []
    with open(f'/tmp/perf-{pid}.map', encoding='utf-8') as file:
        for line in file:
            fields = line.rstrip('\n').split(' ', 2)
            if len(fields) == 3:
                entries.append((int(fields[0], 16), int(fields[1], 16), fields[2]))
    return entries


def files_of(pid):
    return [f'/tmp/perf-{pid}.map', *glob.glob(f'/tmp/jit-{pid}.dump*'), *glob.glob(f'/tmp/jitted-{pid}-*.so')]


def remove_files(*pids):
    """Remove what processes of these numbers left in /tmp; another user's of the same number stays."""
    for pid in pids:
        for path in files_of(pid):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(path)


def _in_the_way(pid):
    """Did another user's process of this number leave files?"""
    return any(os.path.exists(path) and os.stat(path).st_uid != os.geteuid() for path in files_of(pid))


def can_mount(unshare):
    """May this user, by this command, have a /tmp of its own?"""
    try:
        return subprocess.run([*unshare, 'mount', '-t', 'tmpfs', 'none', '/tmp'], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def unshare_mounts():
    """The command after which a program has mounts of its own; skips the test where this user may not."""
    for unshare in ['unshare', '-m'], ['unshare', '-rm']:
        if can_mount(unshare):
            return unshare
    raise unittest.SkipTest('this user cannot mount a /tmp of its own')


def growth_program(num_before, num_functions):
    """Source that prints by how many KiB a process grows over so many functions, made by function() and dropped."""
    return f'''
def resident():
    with open('/proc/self/status') as status:
        return next(int(line.split()[1]) for line in status if line.startswith('VmRSS'))
def churn(begin, end):
    for i in range(begin, end): function(f'f_{{i}}')()
churn(0, {num_before})
before = resident()
churn({num_before}, {num_before + num_functions})
print(resident() - before)
'''


class ProgramTest(unittest.TestCase):
    """Runs small programs under the interpreter that runs the test, and removes what they leave in /tmp."""

    @classmethod
    def setUpClass(cls):
        import perf_trampoline
        if reason := perf_trampoline.status()['unavailable']:
            raise unittest.SkipTest(reason)

    def run_program(self, source, *options, env=(), **run_options):
        """Run `source` with the interpreter's `options`; see run()."""
        switches = 'PYTHONPERFSUPPORT', 'PYTHON_PERF_JIT_SUPPORT', 'PYTHON_PERF_ELF_SUPPORT', 'PYTHON_PERF_NATIVE'
        env = {name: value for name, value in os.environ.items() if name not in switches} | dict(env)
        for _ in range(10):
            done = run([*options, '-c', textwrap.dedent(source)], env=env, **run_options)
            self.addCleanup(remove_files, done.pid)
            if not _in_the_way(done.pid):
                break
        return done

    def run_in_private_tmp(self, mount_options, source, **run_options):
        """Run `source`, which calls mount_tmp() to get a /tmp of its own: not before it has imported what lies below."""
        unshare = unshare_mounts()
        mount = ['mount', '-t', 'tmpfs', '-o', mount_options, 'none', '/tmp']
        prelude = f'import subprocess, perf_trampoline\ndef mount_tmp(): subprocess.run({mount}, check=True)\n'
        return self.run_program(prelude + textwrap.dedent(source), python=[*unshare, sys.executable], **run_options)

    def killed_programs(self, prelude, **options):
        """Processes ended by SIGKILL earlier or later, each with the names of all that had certainly been called."""
        program = prelude + '''
for i in range(10 ** 9):
    function(f'killed_{i}', '/x' * 200)()
    os.write(1, b'%d\\n' % i)
'''
        for turn in range(times(8, 50)):
            with subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, **options) as process:
                process.stdout.readline()
                time.sleep(turn * 0.003)
                process.kill()
                last = int((b'0\n' + process.stdout.read()).rpartition(b'\n')[0].split()[-1])
            self.addCleanup(remove_files, process.pid)
            yield process, {f'py::killed_{i}' for i in range(last + 1)}
