#!/usr/bin/env python3
"""Measure the trampolines against the interpreter's own and against the floor: `bench.py BUILD/python`.

The floor is a frame evaluator that does nothing but call the interpreter's (floor.c).  All that is compared is run in
turn, again and again, each time in a fresh process, so that a machine that is busy or changes its frequency is so for
all; the table shows medians, and half of the distance between the quartiles.  Times are processor times.  Counts of
instructions come from valgrind and repeat exactly.  What follows the version of an interpreter is measured there.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(SOURCE / 'Tools' / 'perf'), str(SOURCE / 'Lib' / 'test')]

import perf_script
import perf_support
import roots

HERE = Path(__file__).resolve().parent
OURS = 'perf', 'perf_jit', 'perf_elf'
OWN = {'own perf': (3, 12), 'own perf_jit': (3, 13)}        # since which version
COLUMNS = ['floor', *OURS, *OWN]
# Ours are compared with what gives the same profile.
RIVALS = {'perf': 'own perf', 'perf_jit': 'own perf_jit', 'perf_elf': 'own perf_jit'}


@dataclass
class Row:
    """One figure: `samples` has a list for each column that was measured."""
    interpreter: str
    name: str
    unit: str
    aim: str
    samples: dict
    known: dict = field(default_factory=dict)       # CPython's, where this interpreter has none of its own
    limit: str = ''

    @property
    def medians(self):
        return {column: statistics.median(samples) for column, samples in self.samples.items()}

    @property
    def spreads(self):
        return {column: (lambda q: (q[2] - q[0]) / 2)(statistics.quantiles(samples, method='inclusive'))
                if len(samples) > 1 else 0 for column, samples in self.samples.items()}

    @property
    def ratios(self):
        medians = self.medians
        return {ours: medians[ours] / medians[own] for ours, own in RIVALS.items()
                if medians.get(own) and ours in medians}

    def as_json(self):
        return {'interpreter': self.interpreter, 'name': self.name, 'unit': self.unit, 'aim': self.aim,
                'limit': self.limit, 'median': self.medians, 'spread': self.spreads, 'samples': self.samples,
                'ratio_to_own': self.ratios, 'cpython_known': self.known}


class Interpreter:
    """A CPython, with our package in a build folder that stands in for the user's own site directory."""

    def __init__(self, build, command=None, env=None):
        self.build = Path(build)
        self.command = command or self._make('@echo $(PYTHON_RUN) $(PYTHON)').split()
        self.env = (env or os.environ) | {'PYTHONUSERBASE': str(self.build), 'PYTHONHASHSEED': '0'}
        self.env.pop('PYTHONDONTWRITEBYTECODE', None)       # an installed package is compiled
        version = subprocess.run([*self.command, '-c', 'import sys; print(*sys.version_info[:3])'], env=self.env,
                                 check=True, text=True, stdout=subprocess.PIPE).stdout
        self.version = tuple(map(int, version.split()))
        self.name = '.'.join(map(str, self.version))
        # With the flags of the package, by the build folder's own Makefile.
        self._make('@mkdir -p bench && $(CC) $(PY_INCLUDES) $(CPPFLAGS) $(CFLAGS) $(BASECFLAGS) $(LDFLAGS) -shared '
                   f'-o bench/floor$(EXT_SUFFIX) {HERE}/floor.c')
        self.columns = ['plain', 'floor', *OURS, *(own for own, since in OWN.items() if self.version >= since)]

    def _make(self, recipe):
        return subprocess.run(['make', '-s', '-C', self.build, '--eval', f'bench-recipe: ; {recipe}', 'bench-recipe'],
                              check=True, text=True, stdout=subprocess.PIPE).stdout

    def start(self, column, arguments, wrapper=(), env=(), **options):
        """Start this interpreter with what `column` names switched on."""
        _, own, backend = column.rpartition('own ')
        switch = ['-X', backend] if backend in OURS else []
        env = self.env | ({'PYTHON_PERF_NATIVE': '1'} if own else {}) | dict(env)
        return subprocess.Popen([*map(str, wrapper), *self.command, *switch, *map(str, arguments)], env=env, **options)

    def program(self, column, *arguments, wrapper=()):
        """Run one of programs.py; return its answer, with the bytes of the files it left and what it said."""
        floor = ['--floor', self.build / 'bench'] if column == 'floor' else []
        with tempfile.TemporaryDirectory(prefix='bench-') as images:
            process = self.start(column, [HERE / 'programs.py', *floor, *arguments], wrapper, text=True,
                                 env={'PERF_TRAMPOLINE_DIR': images}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            out, noise = process.communicate()
            if process.returncode:
                raise RuntimeError(f'{process.args}: exit status {process.returncode}\n{noise}')
            answer = json.loads(out.splitlines()[-1])
            files = [f'/tmp/perf-{answer["pid"]}.map', f'/tmp/jit-{answer["pid"]}.dump']
            files = [*filter(Path.exists, map(Path, files)), *Path(images).glob('**/*.so')]
            answer |= {'noise': noise, 'bytes': sum(path.stat().st_size for path in files)}
            perf_support.remove_files(answer['pid'])
        return answer

    def instructions(self, column, arguments):
        """How many instructions `arguments` take, by valgrind."""
        answer = self.program(column, *arguments, wrapper=VALGRIND)
        return int(re.search(r'Collected : (\d+)', answer['noise'])[1])


VALGRIND = 'valgrind', '--tool=callgrind', '--callgrind-out-file=/dev/null'


def interleaved(rounds, columns, measure):
    """measure(column) for each column, in turn, `rounds` times: a list for each."""
    samples = collections.defaultdict(list)
    for _ in range(rounds):
        for column in columns:
            samples[column].append(measure(column))
    return samples


def counted(columns, measure):
    """The same for what repeats exactly, and may therefore be counted side by side."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return {column: [value] for column, value in zip(columns, pool.map(measure, columns))}


def over(base, samples):
    """What each sample has more than that of the column `base` in the same round."""
    return {column: [value - least for value, least in zip(values, samples[base])]
            for column, values in samples.items() if column not in ('plain', base)}


def measurement(function):
    """A generator of rows, whose docstring says what limits them."""
    @functools.wraps(function)
    def rows(interpreter, options):
        for name, unit, aim, samples, *known in function(interpreter, options):
            yield Row(interpreter.name, name, unit, aim, samples, *known,
                      limit=' '.join(function.__doc__.split('\n\n')[-1].split()))
    return rows


@measurement
def calls(python, options):
    """Time per Python call.

    Limit: one predicted indirect jump, one call and return more than the floor, the saving of the frame pointer, and
    the loads of code object, extras and slot, two of whose three cache lines the evaluator needs anyway: about 1 ns.
    The floor itself is the interpreter's: an evaluator per call instead of a jump within one.
    """
    samples = interleaved(options.rounds, python.columns, lambda column: python.program(column, 'calls')['result'])
    for workload in samples['plain'][0]:
        these = {column: [result[workload] for result in results] for column, results in samples.items()}
        yield (f'call over floor, {workload}', 'ns', 'own/2', over('floor', these),
               {'own perf': {'fib': 3.9, 'methods': 4.8, 'nested': 3.6}[workload]})
        yield (f'slowdown, {workload}', 'x', '',
               {column: [value / plain for value, plain in zip(values, these['plain'])]
                for column, values in these.items() if column != 'plain'})


@measurement
def call_instructions(python, options):
    """Instructions per Python call over the floor: the difference between two numbers of repetitions.

    Limit: the trampoline has six or seven; the evaluator must load code object, extras and slot, test each, test the
    stack, and jump: about 20 together.
    """
    def per_call(column, workload):
        few, many = (python.instructions(column, ('repeat', workload, times)) for times in (2, 6))
        return (many - few) / 4

    for workload, num_calls in ('fib', 3193), ('methods', 3002), ('nested', 3001):
        samples = counted(python.columns[1:], lambda column: per_call(column, workload) / num_calls)
        yield f'instructions of it, {workload}', '', '20', over('floor', samples), {'own perf': 42}


@measurement
def registration(python, options):
    """The first call of a function less a later one.

    Limit: the name must be copied once (75 bytes: some 5 ns) into a page of the file, each page of which the kernel
    must provide and map (0.25 us to clear it, 0.5 to 1 us for the fault, per 4096 bytes), and two or three cold cache
    lines are touched (slot, symbol, code object's extras: 100 ns if they come from memory).
    """
    number = options.functions
    samples = interleaved(options.rounds, python.columns[1:], lambda column: python.program(column, 'register', number))
    for name, unit, aim, known in (('registration', 'ns', '200-350', {'own perf': 755, 'own perf_jit': 704}),
                                   ('registration', 'page faults', '', {})):
        yield (name, unit, aim, {column: [answer['result'][unit] for answer in answers]
                                 for column, answers in samples.items()}, known)
    yield ('registration', 'bytes in files', '',
           {column: [answer['bytes'] / number for answer in answers] for column, answers in samples.items()
            if column != 'floor'}, {'own perf': 72, 'own perf_jit': 245})

    def system_calls(column, number):
        with tempfile.NamedTemporaryFile(mode='r') as log:
            python.program(column, 'once', number, 'alive', wrapper=['strace', '-f', '-c', '-o', log.name])
            return int(re.search(r'(\d+)(?:\s+\d+)?\s+total', log.read())[1])

    samples = counted(python.columns[1:], lambda column: (
        system_calls(column, number) - system_calls(column, number // 10)) / (number - number // 10))
    yield 'registration', 'system calls', '0.05', over('floor', samples), {'own perf': 1.0, 'own perf_jit': 2.06}


@measurement
def registration_instructions(python, options):
    """Instructions, in user mode, for the first call of a function over the floor, and for its death.

    Limit: the copy of the name, 75 characters of which each must be looked at, eight or sixteen at a time.
    """
    def count(column, end):
        few, many = (python.instructions(column, ('once', number, end)) for number in (500, 1500))
        return (many - few) / 1000

    alive = counted(python.columns[1:], lambda column: count(column, 'alive'))
    yield 'registration', 'instructions', '', over('floor', alive)
    both = counted(python.columns[1:], lambda column: count(column, 'dead') - alive[column][0])
    yield 'death', 'instructions', '', over('floor', both)


@measurement
def growth(python, options):
    """Resident memory that functions with distinct names leave when they are made and dropped, more than without.

    Limit: none; what a function needs can be given back when it is dead.
    """
    samples = interleaved(1, ['plain', *python.columns[2:]], lambda column: (
        python.program(column, 'churn', options.churn)['result'] / 1024))
    yield f'growth by {options.churn}', 'MB', '2', over('plain', samples), {'own perf': 32, 'own perf_jit': 97}


@contextlib.contextmanager
def not_installed(python):
    """An environment in which the user's own site directory is there, and empty."""
    with tempfile.TemporaryDirectory(prefix='bench-') as base:
        for directory in python.build.glob('lib/python*/site-packages'):
            (Path(base) / directory.relative_to(python.build)).mkdir(parents=True)
        yield {'PYTHONUSERBASE': base}


def startup_environments(python, directory):
    """What a start-up is measured in: CPython's own, and `bare`, without our package."""
    images, bare = {'PERF_TRAMPOLINE_DIR': directory}, {'PYTHONUSERBASE': directory}
    for site in python.build.glob('lib/python*/site-packages'):
        (Path(directory) / site.relative_to(python.build)).mkdir(parents=True)
    return {'bare': bare} | {column: bare if column in OWN else images for column in python.columns if column != 'floor'}


@measurement
def startup(python, options):
    """Processor time of `-c pass`, and of a program that imports much, over that without our package.

    Limit: where the interpreter has the option itself its own trampoline has begun before site.py reads our line, so
    ours is what more there is: that line, and a package, a start-up module and an extension to import. A function is
    cheaper with us, so a program that calls some thousands is even with CPython's own, and what calls more is ahead.
    """
    def processor_time(column, env, program):
        process = python.start('plain' if column == 'bare' else column, ['-c', program], env=env)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        perf_support.remove_files(process.pid)
        return (usage.ru_utime + usage.ru_stime) * 1000

    with tempfile.TemporaryDirectory(prefix='bench-') as directory:
        environments = startup_environments(python, directory)
        for name, program in (('start-up', 'pass'),
                              ('start-up, importing', 'import asyncio, http.server, logging.config, unittest.mock')):
            samples = interleaved(options.rounds * 4, environments,
                                  lambda column: processor_time(column, environments[column], program))
            yield name, 'ms', 'own', over('bare', samples) | {'plain': [
                value - least for value, least in zip(samples['plain'], samples['bare'])]}


@measurement
def startup_instructions(python, options):
    """Instructions, in user mode, of `-c pass`, in per cent more than where the package is not installed.

    Limit: see start-up. Any line in a .pth, an empty one, costs 3.15 2.2 per cent: site.py imports a codec to read it.
    """
    def count(column, env):
        process = python.start('plain' if column == 'bare' else column, ['-c', 'pass'], VALGRIND, env, text=True,
                               stderr=subprocess.PIPE)
        noise = process.communicate()[1]
        perf_support.remove_files(process.pid)
        return int(re.search(r'Collected : (\d+)', noise)[1])

    with tempfile.TemporaryDirectory(prefix='bench-') as directory:
        environments = startup_environments(python, directory)
        for column, env in environments.items():        # each module is compiled once
            python.start('plain' if column == 'bare' else column, ['-c', 'pass'], env=env).wait()
        samples = counted(environments, lambda column: count(column, environments[column]))
        least, = samples.pop('bare')
        yield 'start-up', '% instructions', 'off 1', {
            column: [(value / least - 1) * 100] for column, (value,) in samples.items()}


def perf_command():
    try:
        return roots.perf()
    except roots.Unavailable:
        return ['perf']


@contextlib.contextmanager
def recorded(python, column, *arguments, call_graph, freq):
    """Record one of programs.py; a recording, and the directory of the images."""
    with tempfile.TemporaryDirectory(prefix='bench-') as directory:
        _, own, backend = column.rpartition('own ')
        images = Path(directory) / 'images'
        env = python.env | {'PERF_TRAMPOLINE_DIR': str(images)} | ({'PYTHON_PERF_NATIVE': '1'} if own else {})
        data = os.path.join(directory, 'perf.data')
        output = perf_script.record([*python.command, '-X', backend, HERE / 'programs.py', *arguments], data,
                                    perf=perf_command(), call_graph=call_graph, freq=freq, env=env,
                                    clock='mono' if backend == 'perf_jit' else None)
        pid = json.loads(output)['pid']
        try:
            yield data, images, pid
        finally:
            perf_support.remove_files(pid)


@measurement
def frames(python, options):
    """Native frames for each Python call, and Python frames in the 127 that perf keeps, by frame pointers.

    Limit: the trampoline, and what the interpreter has between two evaluators, where our evaluator leaves nothing:
    two frames, three in 3.15 (evaluator, vectorcall of a stack of references, vectorcall of a function).
    """
    if python.version < (3, 15):
        return                          # built without frame pointers
    stacks = collections.defaultdict(list)
    for column in 'perf', 'perf_elf', 'own perf':
        with recorded(python, column, 'deep', 300, 2, call_graph='fp', freq=200) as (data, _, _):
            for sample in perf_script.samples(data, perf_command()):
                at = [i for i, frame in enumerate(sample.stack) if perf_script.python_name(frame)]
                if len(at) > 20:
                    stacks[column].append(at)
    yield ('native frames for a call', '', '3', {
        column: [statistics.median(b - a for a, b in zip(stack, stack[1:])) for stack in of]
        for column, of in stacks.items()}, {'own perf': 4})
    yield ('Python frames in 127', '', '42', {column: list(map(len, of)) for column, of in stacks.items()},
           {'own perf': 32})


@measurement
def reporting(python, options):
    """From the end of a recording to the report, of a program that saw many functions; how many files that took.

    Limit: perf's own reading and unwinding, the same for all; an inject step copies the recording and writes an ELF
    file for each function (0.16 ms each), and the report opens those that were hit.
    """
    seconds, files = {}, {}
    for column in [column for column in python.columns if column.endswith(('perf_jit', 'perf_elf'))]:
        with recorded(python, column, 'busy', options.reported, 3, call_graph='dwarf,8192', freq=200) as (
                data, images, pid):
            started = time.monotonic()
            injected = data if column == 'perf_elf' else perf_script.inject(data, perf_command())
            report = ['report', '--stdio', '--no-inline', '-g', 'none', '-i', injected]
            collections.deque(perf_script._read(perf_command(), *report), maxlen=0)
            seconds[column] = [time.monotonic() - started]
            names = os.listdir('/tmp') + (os.listdir(images) if images.exists() else [])
            files[column] = [sum(name.endswith('.so') and str(pid) in name for name in names)]
    yield f'report of {options.reported}', 's', 'own', seconds
    yield 'shared objects left', '', '', files


MEASUREMENTS = {function.__name__: function for function in (
    calls, registration, growth, startup, frames, reporting,
    call_instructions, registration_instructions, startup_instructions)}
COUNTING = 'call_instructions', 'registration_instructions', 'startup_instructions'


def number(value):
    return f'{value:.0f}' if abs(value) >= 1000 else f'{value:.3g}'


def cell(row, column):
    if column == 'floor' and column not in row.samples:      # where there is no floor: with nothing switched on
        column = 'plain'
    if column not in row.samples:
        return f'({number(row.known[column])})' if column in row.known else ''
    median, spread = row.medians[column], row.spreads[column]
    if spread < abs(median) / 200:
        return number(median)
    return f'{number(median)}±' + (f'{spread / abs(median):.0%}' if spread < abs(median) else f'{spread:.2g}')


def line(name, aim, cells):
    return (f'{name:<27}{aim:>8}' + ''.join(f'{text:>10}' for text in cells[:4])
            + ''.join(f'{text:>13}' for text in cells[4:])).rstrip()


def lines(row):
    """A row as text, 100 columns wide."""
    yield line(row.name + (f', {row.unit}' if row.unit else ''), row.aim, [cell(row, column) for column in COLUMNS])
    if row.ratios:
        ratios = (f'{row.ratios[ours]:.2f}' if ours in row.ratios else '' for ours in OURS)
        yield line('    in relation to own', '', ['', *ratios])


def interpreters(options):
    for python in options.python:
        yield Interpreter(Path(python).resolve().parent)
    for version in options.interpreters:
        try:
            command, env = perf_support.build_for(roots.python(version))
        except roots.Unavailable as error:
            print(f'bench: no Python {version}: {error}', file=sys.stderr)
        else:
            yield Interpreter(env['PYTHONUSERBASE'], command, env)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('python', nargs='+', help="./python of a build folder; also the folders' own")
    parser.add_argument('--interpreters', nargs='*', default=['3.13', '3.14', '3.15'], metavar='VERSION',
                        help="Debian's, in roots of their own")
    parser.add_argument('--measure', nargs='+', choices=MEASUREMENTS, default=list(MEASUREMENTS), metavar='NAME',
                        help=', '.join(MEASUREMENTS))
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--functions', type=int, default=20000, help='to register')
    parser.add_argument('--churn', type=int, default=1000000, help='functions to make and drop')
    parser.add_argument('--reported', type=int, default=10000, help='functions in the recording to report')
    parser.add_argument('--json', metavar='FILE')
    options = parser.parse_args()

    pythons, rows = list(interpreters(options)), []
    for python in pythons:
        print('', line(f'CPython {python.name}', 'aim', ['floor/off', *OURS, *OWN]), sep='\n')
        for name in options.measure:
            # Counts are exact, and take long: of the first and the last interpreter.
            if name in COUNTING and (python not in (pythons[0], pythons[-1]) or not shutil.which('valgrind')):
                continue
            for row in MEASUREMENTS[name](python, options):
                rows.append(row)
                print(*lines(row), sep='\n', flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([row.as_json() for row in rows], indent=1) + '\n')


if __name__ == '__main__':
    main()
