"""Run perf, and read the call stacks it recorded.

    data = directory / 'perf.data'
    record([python, '-X', 'perf_jit', 'prog.py'], data)
    for sample in samples(inject(data)):
        print(sample.tid, [frame.sym for frame in sample.stack])

Neither the user's perf configuration nor debuginfod nor the build-id cache takes part. perf writes
a lot of noise to standard error (addr2line, missing kernel maps): only exit statuses and symbols
count. Standard library only, any Python 3.8+, nothing of the package: this file is copied into bare
guests, and Tools/perf has it under the same name.
"""

import collections
import io
import os
import re
import shutil
import subprocess
import tempfile

Frame = collections.namedtuple('Frame', 'ip sym dso')
# The leaf is stack[0]. The time is that of the clock given to record(), in nanoseconds. `period` is what
# the sample stands for, in units of its event: nanoseconds for cpu-clock; `comm` is the thread's name.
Sample = collections.namedtuple('Sample', 'pid tid time_ns stack comm period event', defaults=('', 1, ''))

# User mode only: perf_event_paranoid 2, most distributions' setting, allows no more.
EVENT = 'cpu-clock:u'
# The kernel stops a frame-pointer walk at 127 frames, perf's own DWARF walk stops where we say.
MAX_STACK = 1024

_HEADER = re.compile(r'\s*(.*?)\s*(-?\d+)/(-?\d+)\s+(\d+)\.(\d{9}):\s+(?:(\d+)\s+)?(\S+?):\s')
# A symbol may hold spaces, colons and parentheses; a path may hold balanced ones, "(x (deleted))", and seldom others.
_FRAMES = [re.compile(rf'\s+([0-9a-f]+) {symbol_and_path}\n?')
           for symbol_and_path in (r'(.*) \(((?:[^()]|\([^()]*\))*)\)', r'(.*?) \((.*)\)')]
_UNREADABLE = '0', '[unknown]', '[unknown]'
_START = re.compile(r'_start|__libc_start_main.*|(__)?clone3?(@.*)?|__thread_start')


class PerfError(Exception):
    """perf cannot do it; the message is one sentence that says why and what to do."""


def _run(perf, *arguments, env, config='/dev/null', **options):
    env = {**env, 'PERF_CONFIG': config, 'PERF_PAGER': 'cat'}
    try:
        return subprocess.Popen([*perf, *map(str, arguments)], env=env, **options)
    except OSError as error:
        raise PerfError(f'{perf[0]} cannot be run ({error.strerror}): install perf '
                        "(Debian: apt install linux-perf)") from None


def _read(perf, *arguments):
    """The lines that a reading subcommand prints."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as noise:
        # Recent `perf inject` looks up source lines through addr2line, and dies where that fails.
        config = os.path.join(home, 'config')
        with open(config, 'w') as file:
            file.write('[addr2line]\nstyle = libdw\n')
        process = _run(perf, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=noise,
                       env={**os.environ, 'HOME': home, 'DEBUGINFOD_URLS': ''}, config=config)
        # A carriage return in a name ends no line.
        with process, io.TextIOWrapper(process.stdout, 'utf-8', 'surrogateescape', newline='\n') as lines:
            yield from lines
        if process.returncode:
            noise.seek(0)
            raise PerfError(f'perf {arguments[0]} failed: {_last_line(noise.read())}')


def _last_line(noise):
    lines = noise.decode(errors='replace').split('\n')
    return next((line.strip() for line in reversed(lines) if line.strip()), 'it said nothing')


def check(perf=('perf',), **how):
    """Raise PerfError unless perf can record a program of this user, as record() is told to; its attributes()."""
    if not shutil.which(perf[0]):
        raise PerfError(f'{perf[0]} was not found: install perf (Debian: apt install linux-perf)')
    with tempfile.TemporaryDirectory() as directory:
        try:
            data = os.path.join(directory, 'perf.data')
            record(['true'], data, perf=perf, **{'call_graph': 'fp', **how})
            return attributes(data, perf)
        except PerfError as error:
            try:
                with open('/proc/sys/kernel/perf_event_paranoid') as setting:
                    paranoid = int(setting.read())
            except OSError:
                raise PerfError('this kernel has no perf events (CONFIG_PERF_EVENTS, '
                                'or a container that hides /proc/sys)') from None
            if paranoid > 2:
                raise PerfError(f'kernel.perf_event_paranoid is {paranoid}, so users may not profile: '
                                'run "sysctl kernel.perf_event_paranoid=2" as root') from None
            raise error


def buffers():
    """Options for perf record: a buffer that holds some hundred copied stacks loses none.

    More than half a MiB is root's privilege; root of a user namespace does not have it.
    """
    try:
        with open('/proc/self/uid_map') as uid_map:
            is_root = os.geteuid() == 0 and uid_map.read().split() == ['0', '0', str(2 ** 32 - 1)]
    except OSError:
        is_root = False
    return ['-m', '16M'] if is_root else []


def record(command, out, *, perf=('perf',), call_graph='dwarf,32768', freq=1000, clock='mono',
           event=EVENT, env=None, options=()):
    """Profile a command into the file `out`; return what it wrote to standard output.

    A clock of None leaves perf's own; `clock='mono'` is what a jitdump needs. `call_graph` is
    'fp' or 'dwarf,BYTES'.
    """
    with tempfile.TemporaryFile() as noise:
        # -N: no copies of the program's files in ~/.debug.
        process = _run(perf, 'record', '-N', '-o', out, '-e', event, '-F', freq, '--call-graph', call_graph,
                       *(['-k', clock] if clock else []), *buffers(), *options, '--', *command,
                       stdout=subprocess.PIPE, stderr=noise, env=os.environ if env is None else env)
        with process:
            output = process.stdout.read().decode(errors='replace')
        if process.returncode:
            noise.seek(0)
            raise PerfError(f'perf record {command[0]}: status {process.returncode}: {_last_line(noise.read())}')
    return output


def inject(data, perf=('perf',)):
    """Bring the names and unwind data of /tmp/jit-PID.dump into a recording: a new file's name."""
    injected = f'{data}.jit'
    for _ in _read(perf, 'inject', '--jit', '-i', data, '-o', injected):
        pass
    return injected


def lost(data, perf=('perf',)):
    """How many samples (with old kernels: gaps) are missing because perf could not keep up."""
    return max((int(number) for line in _read(perf, 'report', '--stats', '-i', data)
                for number in re.findall(r'LOST(?:_SAMPLES)? events:\s+(\d+)', line)), default=0)


def features(perf=('perf',)):
    """What this perf was built with: a set of perf's own words."""
    try:
        text = ''.join(_read(perf, 'version', '--build-options'))
    except PerfError:
        return set()
    return set(re.findall(r'(?m)^\s*(\S+): \[ on', text))


def unwinders(perf=('perf',)):
    """The libraries that this perf can unwind copied stacks with."""
    return {'libunwind', 'libdw-dwarf-unwind', 'libdw'} & features(perf)


def attributes(data, perf=('perf',)):
    """How a recording was made: perf's own listing of its events."""
    return ''.join(_read(perf, 'evlist', '-v', '-i', data))


def lines(data, perf=('perf',), *options):
    """A recording as perf prints it, for parse()."""
    # --no-inline: otherwise perf starts addr2line for each address, and dies where there is none.
    return _read(perf, 'script', '-i', data, '--ns', '--no-inline', '--max-stack', MAX_STACK,
                 '-F', 'comm,pid,tid,time,period,event,ip,sym,dso', *options)


def samples(data, perf=('perf',)):
    """All samples of a recording, oldest first."""
    return parse(lines(data, perf))


def parse(lines):
    """The samples that lines() printed."""
    frames = {}         # one object for each distinct line: some hundred of them make a profile
    sample = None
    for line in lines:
        if line.startswith('\t'):
            if line not in frames:
                match = _FRAMES[0].fullmatch(line) or _FRAMES[1].fullmatch(line)
                ip, sym, dso = match.groups() if match else _UNREADABLE
                frames[line] = Frame(int(ip, 16), sym, dso)
            if sample:
                sample.stack.append(frames[line])
            continue
        if sample:
            yield sample
            sample = None
        if header := _HEADER.match(line):
            comm, pid, tid, seconds, nanoseconds, period, event = header.groups()
            sample = Sample(int(pid), int(tid), int(seconds + nanoseconds), [], comm, int(period or 1), event)
    if sample:
        yield sample


def python_name(frame):
    """The qualified name and the file of a frame called `py::QUALNAME:FILE`, or None."""
    if frame.sym.startswith('py::'):
        qualname, _, filename = frame.sym[4:].partition(':')
        return qualname, filename
    return None


def in_libc(frame):
    return re.match(r'\[vdso\]|(libc|libm|libpthread|ld)\b', os.path.basename(frame.dso))


def is_nowhere(frame):
    """Whether the address is no code at all: the walk had gone astray."""
    return frame.sym == '[unknown]' and frame.dso in ('[unknown]', '[heap]', '[stack]')


def walk(stack, mode='dwarf'):
    """The frames before a walk went astray, and whether it had come to the start of its thread by then.

    A frame-pointer walk (mode 'fp') ends in libc's start code, or strays from there: it has no frame pointers.
    """
    end = len(stack)
    while end and is_nowhere(stack[end - 1]):
        end -= 1
    frames = stack[:end]
    if not frames:
        return frames, False
    if _START.fullmatch(frames[-1].sym):
        return frames, True
    # A stripped libc names none of its start functions.
    return frames, end > 1 and bool(in_libc(frames[-1])) and (mode == 'fp' or frames[-1].sym == '[unknown]')
