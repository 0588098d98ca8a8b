"""perf, end to end: does a profile show the true Python stacks, all of them, in the right proportion?

The interpreter under test is the one that runs this file. perf_workload knows what its profile must
show, perf_judge compares; a judge that has never said no is worth nothing, so it is tested as well.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / 'Tools' / 'perf')]

import perf_judge
import perf_script
import perf_support
import roots
from perf_judge import BESIDE, HOOK, NAMELESS, TRAMPOLINE
from perf_script import Frame, Sample

FREQUENCY = 2000        # with 32 KiB of stack a sample, 64 MB/s: no losses on an idle machine
CPU_SECONDS = 3.5       # some more than perf_judge.LEAST samples


class Profiles(unittest.TestCase):
    """What the end-to-end tests share."""

    def setUp(self):
        try:
            perf_script.check()
        except perf_script.PerfError as error:
            self.skipTest(str(error))

    def check_profile(self, backend, *, python=(sys.executable,), env=None, perf=('perf',), call_graph='dwarf,32768',
                      **judging):
        for slowness in 1, 2, 4:
            with tempfile.TemporaryDirectory(prefix='perf-profile-') as directory:
                data = Path(directory) / 'perf.data'
                report = json.loads(perf_script.record(
                    [*python, '-X', backend, HERE / 'perf_workload.py', str(CPU_SECONDS * slowness)], data,
                    perf=perf, freq=FREQUENCY // slowness, call_graph=call_graph, env=env))
                self.addCleanup(perf_support.remove_files, report['pid'])
                lost = perf_script.lost(data, perf)
                if not lost:
                    if backend == 'perf_jit':
                        data = perf_script.inject(data, perf)
                    verdicts = perf_judge.judge(report, perf_script.samples(data, perf), **judging)
                    break
                print(f'perf lost {lost} samples at {FREQUENCY // slowness} Hz', file=sys.stderr)
        else:
            self.fail(f'perf loses samples even at {FREQUENCY // slowness} Hz')
        for verdict in verdicts:
            with self.subTest(tid=verdict.tid):
                self.assertEqual(verdict.problems, [], f'\n{verdict}')
        if os.environ.get('PERF_VERBOSE'):
            print('', *verdicts, sep='\n', file=sys.stderr)


class DwarfTest(Profiles):

    def test_dwarf_stacks_are_whole(self):
        self.check_profile('perf_jit')

    def test_dwarf_stacks_are_whole_with_libdw(self):
        try:
            perf = roots.perf('sid')
        except roots.Unavailable as error:
            self.skipTest(str(error))
        options = subprocess.run([*perf, 'version', '--build-options'], capture_output=True, text=True).stdout
        self.assertRegex(options, r'libunwind: \[ OFF')
        self.check_profile('perf_jit', perf=perf)


class FramePointerTest(Profiles):
    """Python 3.15 keeps frame pointers, and perf record -g can follow them."""

    def setUp(self):
        super().setUp()
        self.python, self.env = perf_support.interpreter('3.15')

    def check_profile(self, backend, **options):
        return super().check_profile(backend, python=self.python, env=self.env, frame_pointers=True, **options)

    def test_frame_pointer_stacks_are_whole_with_a_map(self):
        self.check_profile('perf', call_graph='fp', mode='fp')

    def test_frame_pointer_stacks_are_whole_with_a_jitdump(self):
        self.check_profile('perf_jit', call_graph='fp', mode='fp')

    def test_dwarf_stacks_are_whole_too(self):
        self.check_profile('perf_jit')


class PerfScriptTest(unittest.TestCase):

    def read(self, script, status=0):
        """What samples() makes of a perf that prints this."""
        with tempfile.TemporaryDirectory() as directory:
            perf = Path(directory) / 'perf'
            perf.write_text(f'#!/bin/sh\ncat <<"END"\n{script}END\necho noise >&2\nexit {status}\n', encoding='utf-8')
            perf.chmod(0o755)
            return list(perf_script.samples('perf.data', [str(perf)]))

    def test_names_survive(self):
        frames = [
            Frame(0x10, 'py::f:/a b/x.py', '/tmp/jitted-1-2.so'),
            Frame(0x11, 'py::C.<locals>.größe:/tmp/a (b)/x: y.py', '/tmp/perf-1.map'),
            Frame(0x12, '[unknown]', '/memfd:jit (deleted)'),
            Frame(0x13, 'operator()(int) const', '/opt/my (old) app/lib.so'),
            Frame(0xffffffffffffffff, '[unknown]', '[unknown]'),
        ]
        script = '    71/72    1051.000000009: cpu-clock:u: \n' + ''.join(
            f'\t{frame.ip:16x} {frame.sym} ({frame.dso})\n' for frame in frames)
        self.assertEqual(self.read(script), [Sample(71, 72, 1051_000000009, frames, event='cpu-clock:u')])

    def test_samples_without_a_stack_are_kept(self):
        script = '\n'.join(['  7/7  1.000000001: cpu-clock:u: ', '', '  7/8  1.000000002: cpu-clock:u: ', ''])
        self.assertEqual([(sample.tid, sample.stack) for sample in self.read(script)], [(7, []), (8, [])])

    def test_failure_is_told_in_perfs_words(self):
        with self.assertRaisesRegex(perf_script.PerfError, 'perf script failed: noise'):
            self.read('', status=1)

    def test_missing_perf_says_what_to_install(self):
        with self.assertRaisesRegex(perf_script.PerfError, 'install perf'):
            perf_script.check(['no-such-perf'])


class JudgeTest(unittest.TestCase):
    """A good profile passes; each way to spoil it is noticed."""

    CALLERS = ['<module>', 'main']
    SHARES = {'a': 50, 'b': 30, 'c': 20}
    MAIN = Frame(1, 'Py_BytesMain', '/usr/bin/python3')
    EVALUATOR = Frame(2, '_PyEval_EvalFrameDefault', '/usr/bin/python3')
    EVAL_HOOK = Frame(3, 'evaluate', '/lib/_perf_trampoline.cpython-311-x86_64-linux-gnu.so')
    NOWHERE = Frame(4, '[unknown]', '[unknown]')
    NAMELESS = Frame(5, '[unknown]', '//anon')
    LIBC = Frame(6, 'memcpy', '/lib/libc.so.6')
    START = Frame(7, '_start', '/usr/bin/python3')

    def setUp(self):
        self.report = {'threads': [{
            'tid': 7, 'start': 100, 'end': 200, 'cpu': 10_000,
            'leaves': {leaf: {'cpu': share * 100, 'stack': self.stack_of(leaf), 'callees': [f'{leaf}_callee']}
                       for leaf, share in self.SHARES.items()},
        }]}
        self.samples = [self.sample(self.stack_of(leaf))
                        for leaf, share in self.SHARES.items() for _ in range(share * 70)]

    def stack_of(self, leaf):
        return [*self.CALLERS, f'{leaf}_inner', leaf]

    def sample(self, names, tid=7, time=150):
        stack = [self.START, self.MAIN]
        for name in names:
            stack += [self.EVAL_HOOK, Frame(9, f'py::{name}:/x.py', '/tmp/jitted-1-1.so'), self.EVALUATOR]
        return Sample(7, tid, time, stack[::-1])

    def spoil(self, number, change):
        """Replace the stacks of some samples of the leaf `a`; change gets and returns one, leaf first."""
        for index in range(number):
            sample = self.samples[index]
            self.samples[index] = sample._replace(stack=change(list(sample.stack)))

    def problems(self, **options):
        return '\n'.join(perf_judge.judge(self.report, self.samples, **options)[0].problems)

    def test_good_profile_passes(self):
        self.assertEqual(self.problems(), '')

    def test_callees_belong_to_their_leaf(self):
        self.samples[:1000] = [self.sample([*self.stack_of('a'), 'a_callee'])] * 1000
        self.assertEqual(self.problems(), '')
        self.samples[:1000] = [self.sample([*self.stack_of('a'), 'b_callee'])] * 1000
        self.assertIn('whole', self.problems())

    def test_callers_alone_are_whole_but_few(self):
        self.samples[:60] = [self.sample(self.stack_of('a')[:-1])] * 60
        self.assertEqual(self.problems(), '')
        self.samples[:140] = [self.sample(self.stack_of('a')[:-1])] * 140
        self.assertIn('driver', self.problems())

    def test_other_threads_and_times_do_not_count(self):
        self.samples += [self.sample(['x'], tid=8), self.sample(['x'], time=99), self.sample(['x'], time=201)] * 1000
        self.assertEqual(self.problems(), '')

    def test_too_few_samples(self):
        del self.samples[::4]
        self.assertIn('samples, not 6000', self.problems())

    def test_dropped_frame(self):
        for name in 'a_inner', 'main', '<module>':
            with self.subTest(name):
                self.setUp()
                self.spoil(100, lambda stack: [frame for frame in stack if f'::{name}:' not in frame.sym])
                self.assertIn('whole', self.problems())

    def test_swapped_frames(self):
        def swap(stack):
            stack[1], stack[4] = stack[4], stack[1]
            return stack
        self.spoil(100, swap)
        self.assertIn('whole', self.problems())

    def test_foreign_frame(self):
        self.spoil(100, lambda stack: [Frame(9, 'py::wrong:/x.py', '/tmp/jitted-1-2.so'), *stack])
        self.assertIn('whole', self.problems())

    def test_no_python_frame_at_all(self):
        self.spoil(100, lambda stack: [self.EVALUATOR, self.MAIN, self.START])
        self.assertIn('whole', self.problems())

    def test_no_stack_at_all(self):
        self.spoil(100, lambda stack: [])
        self.assertIn('whole', self.problems())

    def test_walk_that_ends_in_the_interpreter(self):
        self.spoil(100, lambda stack: stack[:-1])
        self.assertIn('whole', self.problems())

    def test_single_stop_at_ours(self):
        for stop, change in [
                (TRAMPOLINE, lambda stack: stack[:2]),
                (HOOK, lambda stack: stack[:3]),
                (BESIDE, lambda stack: [*stack[:2], self.NOWHERE]),
                (BESIDE, lambda stack: [*stack[:3], self.NOWHERE, self.NOWHERE]),
                (BESIDE, lambda stack: [*stack[:2], self.NOWHERE, *stack[2:]]),
                (NAMELESS, lambda stack: [stack[0], self.NAMELESS]),
                (NAMELESS, lambda stack: [*stack[:3], self.NAMELESS, *stack[3:]]),
                (NAMELESS, lambda stack: [stack[0], self.NAMELESS, *stack[2:4]])]:
            with self.subTest(stop):
                self.setUp()
                self.spoil(1, change)
                self.assertEqual(self.problems(), f'1 walks stopped at: {stop}')

    def test_wrong_share(self):
        self.samples += [self.sample(self.stack_of('a'))] * 400
        self.assertIn('a has', self.problems())

    def test_innermost_missing_passes_only_where_it_may(self):
        self.samples = [self.sample(self.stack_of(leaf)[:-1])
                        for leaf, share in self.SHARES.items() for _ in range(share * 70)]
        self.assertIn('driver', self.problems())
        self.assertEqual(self.problems(innermost_may_be_missing=True), '')

    def test_frame_pointer_walk_may_run_past_the_start(self):
        start = Frame(8, '[unknown]', '/lib/libc.so.6')
        for sample in self.samples:
            sample.stack[-1:] = [start, self.NOWHERE, self.NOWHERE]
        self.assertEqual(self.problems(mode='fp'), '')

    def test_excuses_are_few_and_belong_to_a_mode(self):
        for stack, options in [([self.LIBC, self.NOWHERE], {'mode': 'fp'}),
                               ([self.EVALUATOR, self.EVALUATOR], {'frame_pointers': True})]:
            with self.subTest(**options):
                self.setUp()
                self.spoil(100, lambda _: stack)
                self.assertIn('whole', self.problems())
                self.assertEqual(self.problems(**options), '')
                self.spoil(300, lambda _: stack)
                self.assertIn('excused', self.problems(**options))


if __name__ == '__main__':
    unittest.main()
