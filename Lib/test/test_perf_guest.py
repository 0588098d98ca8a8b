"""perf, end to end, on a real kernel of every architecture in the table: each an emulated machine with Debian's programs.

Tools/perf/guest/expected.txt says beforehand what each profile must show. By default a guest records with sid's perf and
the newest Python; with PERF_TRAMPOLINE_FULL=1 there are more of both, and CPython built with the core in its own tree.
PERF_TRAMPOLINE_ARCH=riscv64 boots that guest alone.
PERF_TRAMPOLINE_RESULTS names a folder for the shares, of which Tools/perf/results.py makes the matrix in Doc.
"""

import bisect
import concurrent.futures
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import perf_support
from perf_support import FULL

import archs
import guest
import perf_judge
import perf_script
import roots

HERE = Path(__file__).resolve().parent
LEAST = 1000            # samples: an emulated processor takes some seconds for them
WHOLE = 0.98
STACKS = [('dwarf', 'perf_elf'), ('fp', 'perf_elf'), ('dwarf', 'perf_jit'), ('fp', 'perf_jit'), ('fp', 'perf')]
PYTHONS = ['3.15', '3.14'] if FULL else ['3.15']
PERFS = ['sid', 'trixie'] if FULL else ['sid']
INTREE = ['riscv64', 's390x'] if FULL else []       # for which CPython itself has no trampoline for
FRAME_POINTERS = ['3.15', guest.INTREE]     # those built with them, where the architecture's table line has the option
CHOSEN = os.environ.get('PERF_TRAMPOLINE_ARCH') or ' '.join(archs.load())

pool = concurrent.futures.ThreadPoolExecutor(2)


def tearDownModule():
    pool.shutdown(cancel_futures=True)


def kinds(name):
    """(Python, perf) of an architecture's guests."""
    return [*itertools.product(PYTHONS, PERFS), *([(guest.INTREE, 'sid')] if name in INTREE else [])]


@functools.cache
def runs():
    """Every guest, (architecture, Python, perf) -> what run() returns in future; begun when a test first asks."""
    return {(name, python, perf): pool.submit(run, archs.get(name), python, perf)
            for name in CHOSEN.split() for python, perf in kinds(name)}


def run(arch, python, perf):
    builds = [] if python == guest.INTREE else [
        Path(perf_support.build_for(roots.python(python, arch=arch.name))[1]['PYTHONUSERBASE'])]
    modes = [guest.Mode(stacks, backend, python, perf) for stacks, backend in STACKS]
    return guest.run(arch, modes, builds, HERE / 'perf_workload.py')


@functools.cache
def red_zone(name, python):
    """Addresses of an interpreter where its unwind data changes, and whether it finds registers below the stack pointer."""
    arch, changes = archs.get(name), {}
    listing = subprocess.check_output([f'{arch.prefix}readelf', '-wF', guest.interpreter(arch, python)], text=True,
                                      stderr=subprocess.DEVNULL)
    for line in listing.splitlines():
        if end := re.search(r' FDE .*\.\.(\w+)$', line):
            changes.setdefault(int(end[1], 16), False)
        elif row := re.match(r'(\w{16}) r(\d+)\+(\d+) ', line):
            places = map(int, re.findall(r' c(-\d+)', line))
            changes[int(row[1], 16)] = int(row[2]) == arch.sp.dwarf and int(row[3]) + min(places, default=0) < 0
    addresses = sorted(changes)
    return addresses, [changes[address] for address in addresses]


def verdict(arch, mode, result):
    """The main thread's Verdict, and what is wrong with it in view of expected.txt, as a list of sentences."""
    word, _ = guest.expected(arch, mode)
    frame_pointers = mode.python in FRAME_POINTERS and '-fno-omit-frame-pointer' in arch.chain_cflags
    addresses, below_sp = red_zone(arch.name, mode.python) if word == 'redzone' else ([0], [False])
    with mock.patch.multiple(perf_judge, WHOLE={'stale': 0.95, 'leaf': 0.9}.get(word, WHOLE), EXCUSED=0.05):
        found = perf_judge.judge(result['report'], perf_script.parse(result['script'].splitlines(True)), least=LEAST,
                                 mode=mode.stacks, frame_pointers=frame_pointers,
                                 innermost_may_be_missing=word in ('innermost', 'leaf'),
                                 below_sp=lambda at: below_sp[bisect.bisect(addresses, at) - 1])[0]
    if word != 'cut':
        return found, found.problems
    if not found.problems:
        return found, ['whole, though expected.txt says cut']
    return found, [f'{found.samples} samples, not {LEAST}'] if found.samples < LEAST else []


class Guests:
    """One architecture's modes; below a class is made for each."""

    arch = None

    @classmethod
    def setUpClass(cls):
        if not shutil.which(cls.arch.qemu_system):
            raise unittest.SkipTest(f'{cls.arch.qemu_system} is missing')
        cls.cells = []
        cls.addClassCleanup(cls.write_results)

    @classmethod
    def write_results(cls):
        if (directory := os.environ.get('PERF_TRAMPOLINE_RESULTS')) and cls.cells:
            path = Path(directory, 'guests', f'{cls.arch.name}.json')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(cls.cells, indent=2) + '\n')

    def check(self, mode):
        word, reason = guest.expected(self.arch, mode)
        cell = {'stacks': mode.stacks, 'backend': mode.backend, 'python': mode.python, 'suite': mode.perf,
                'perf': '', 'expected': word, 'whole': None, 'samples': 0, 'reason': reason}
        try:
            results, console = runs()[self.arch.name, mode.python, mode.perf].result()
        except roots.Unavailable as error:
            self.cells.append(cell | {'reason': f'No perf of {mode.perf} could be had for {self.arch.debian}.'})
            self.skipTest(str(error))
        result = results.get(str(mode), {'error': f'the guest sent no result; its console:\n{console[-6000:]}'})
        if 'error' in result:
            self.cells.append(cell | {'reason': 'Failed: ' + result['error'].splitlines()[0]})
            self.fail(result['error'])
        found, problems = verdict(self.arch, mode, result)
        if result['lost']:
            problems = [*problems, f'perf lost {result["lost"]} samples']
        share = 100 * found.whole / max(found.samples, 1)
        stops = (found.stops + found.excused).most_common(2)
        excused = ', '.join(f'{count} of {found.samples} ended: {stop}' for stop, count in stops)
        self.cells.append(cell | {
            'perf': result['perf'], 'whole': share, 'samples': found.samples, 'unexpected': problems,
            'reason': ' '.join(filter(None, [reason, excused and f'({excused}.)']))})
        if os.environ.get('PERF_VERBOSE'):
            print(f'\n{self.arch.name} {mode} in {result["seconds"]:.0f} s\n{found}')
        self.assertEqual(problems, [], f'\n{mode}, expected {word}\n{found}')


def _tests(name):
    for python, perf in kinds(name):
        for stacks, backend in STACKS:
            mode = guest.Mode(stacks, backend, python, perf)
            yield 'test_' + str(mode).replace(' ', '_').replace('.', '_'), lambda self, mode=mode: self.check(mode)


for _arch in archs.load().values():
    if _arch.name in CHOSEN.split():
        globals()[f'GuestTest_{_arch.name}'] = type(f'GuestTest_{_arch.name}', (Guests, unittest.TestCase),
                                                    dict(_tests(_arch.name), arch=_arch, __module__=__name__))


class EndTest(unittest.TestCase):
    """A guest that goes wrong ends, and says how."""

    def run_program(self, program, limit=60):
        """What guest.run() returns of a machine that is this shell program."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        machine = directory / 'machine'
        machine.write_text(f'#!/bin/sh\n{program}\n')
        machine.chmod(0o755)
        arch = mock.Mock(**{'qemu_system': str(machine), 'board': ('', ''), 'console': ''})
        (directory / 'root').mkdir()
        self.enterContext(mock.patch.multiple(guest, kernel=lambda arch: '', _base=lambda arch: directory / 'root',
                                              _image=lambda at, inside: machine))
        return guest.run(arch, [], [], HERE / 'perf_workload.py', limit)

    def test_hung_guest_is_ended_and_its_console_told(self):
        results, console = self.run_program('echo last words; exec sleep 300', limit=1)
        self.assertEqual((results, console), ({}, 'last words\n\nended after 1 seconds'))

    def test_torn_result_is_missing(self):
        results, _ = self.run_program("printf '@@ eNqr\\n@@.\\n'")
        self.assertEqual(results, {})

    def test_kernel_messages_between_lines_do_no_harm(self):
        text = guest.base64.b64encode(guest.zlib.compress(json.dumps({'mode': 'm', 'x': 1}).encode())).decode()
        results, console = self.run_program(f"printf '@@ %s\\n[ 1.0] oops\\n@@ %s\\n@@.\\n' {text[:20]} {text[20:]}")
        self.assertEqual((results, console), ({'m': {'mode': 'm', 'x': 1}}, '[ 1.0] oops'))


if __name__ == '__main__':
    unittest.main()
