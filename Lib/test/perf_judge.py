"""The verdict on a profile of perf_workload: was every sample's stack whole, and the share right?

The denominator is every sample of a thread between its two stamps. Counting only samples that show
a Python frame would drop exactly those that lost their frames.

A sample is *whole* when its Python frames are exactly a leaf's expected stack, or the callers' part
of one (then the "driver" was running: call machinery, the clock), and the native part goes on to the
start of the process or thread. Each other sample is counted under the place where its walk stopped.
A walk that stopped in or beside a trampoline or our hook is our fault, and there must be none.

Some samples cannot be whole whatever a trampoline does; they are listed apart, as "excused", and few:
  - `mode='fp'`: libc and the vdso are built without frame pointers. The kernel that interrupts them
    finds whatever they keep in that register, and the walk ends at its first frame.
  - `mode='dwarf'` with an interpreter that keeps frame pointers (`frame_pointers=True`): at a return
    instruction the caller's frame pointer has just been popped, and compilers describe it by its old
    place below the stack pointer. perf copies the stack from the stack pointer up.
  - `mode='dwarf'` where `below_sp(address)` says of the innermost frame that its unwind data finds registers below the
    stack pointer: on ppc64le whole prologues, which save into the 288 bytes there before they make their frame.
Besides, a frame-pointer walk misses the caller of a C function that has not yet set up its frame (where
that caller is the innermost trampoline, the sample counts as the driver's), and it ends in libc's start
code, or runs on from there over what `_start` left in the register.
On riscv64 the kernel takes the first caller from the return-address register, which is stale in any
function that has made a call: the innermost trampoline is skipped. `innermost_may_be_missing=True`
accepts that; the leaf is then known by its caller.
"""

import collections
import math
import os
import re

from perf_script import in_libc, is_nowhere, python_name, walk

LEAST = 6000        # five shares with a limit of 2 points fail by chance 0.08 % of the time
WHOLE = 0.99
EXCUSED = 0.03
POINTS = 2.0

EXTENSION = '_perf_trampoline'
# Stops that are our fault.
TRAMPOLINE, HOOK, BESIDE, NAMELESS = OURS = (
    'trampoline', 'hook', 'beside trampoline or hook', 'trampoline without name')


def _is_ours(frame):
    return python_name(frame) or EXTENSION in frame.dso


def _is_nameless(frame):
    """Executable memory that belongs to no program file: in this workload, a trampoline."""
    return frame.sym == '[unknown]' and (
        frame.dso.startswith(('[anon', '//anon', '/memfd:', '/dev/zero', '/tmp/jitted-')) or frame.dso.endswith('.map')
        or re.search(r'/\d+-\d+-[0-9a-f]+\.so$', frame.dso))


def _in_interpreter(frame):
    return re.match(r'(lib)?python', os.path.basename(frame.dso))


def _fault(stack, walked, reached_start):
    """Which of our faults a stack shows, or None."""
    if any(map(_is_nameless, walked)):
        return NAMELESS
    if any(_is_ours(inner) and is_nowhere(outer) for inner, outer in zip(stack, stack[1:])):
        return BESIDE
    if not reached_start and walked and _is_ours(walked[-1]):
        return TRAMPOLINE if python_name(walked[-1]) else HOOK
    return None


def _place(walked):
    """Where any other walk stopped, as a word for the table."""
    if not walked:
        return 'no stack'
    last = walked[-1]
    return ('libc' if in_libc(last) else 'interpreter' if _in_interpreter(last)
            else 'kernel' if last.dso.startswith('[k') else os.path.basename(last.dso))


def _is_part(names, stack):
    """Whether the names occur in the stack, in that order."""
    rest = iter(stack)
    return all(name in rest for name in names)


class Verdict:
    """One thread's samples: counts, shares in percent, and `problems`, empty if all is well."""

    def __init__(self, thread, samples, *, least=LEAST, mode='dwarf', frame_pointers=False,
                 innermost_may_be_missing=False, below_sp=lambda address: False):
        self.tid = thread['tid']
        expected = {leaf: entry['stack'] for leaf, entry in thread['leaves'].items()}
        callers = len(os.path.commonprefix(list(expected.values())))
        driver = {tuple(stack[:depth]) for stack in expected.values() for depth in range(callers, len(stack))}
        leaves = {tuple(stack): leaf for leaf, stack in expected.items()}
        leaves.update({(*expected[leaf], callee): leaf
                       for leaf, entry in thread['leaves'].items() for callee in entry['callees']})
        owner = {names[-1]: leaf for names, leaf in leaves.items()}
        if innermost_may_be_missing:
            leaves.update({tuple(stack[:-1]): leaf for leaf, stack in expected.items()})

        self.samples = self.whole = 0
        self.stops = collections.Counter()
        self.excused = collections.Counter()
        found = collections.Counter()
        for sample in samples:
            if sample.tid != self.tid or not thread['start'] <= sample.time_ns <= thread['end']:
                continue
            self.samples += 1
            stack = sample.stack
            walked, reached_start = walk(stack, mode)
            names = tuple(name[0] for frame in reversed(walked) if (name := python_name(frame)))
            if names:
                found[leaves.get(names) or owner.get(names[-1], 'driver')] += 1
            if mode == 'dwarf' and walked and not reached_start and below_sp(walked[0].ip):
                self.excused['registers below the stack pointer'] += 1
            elif fault := _fault(stack, walked, reached_start):
                self.stops[fault] += 1
            elif not reached_start:
                if mode == 'fp' and not names and walked and in_libc(walked[0]):
                    self.excused['libc keeps no frame pointers'] += 1
                elif mode == 'dwarf' and frame_pointers and 1 <= len(walked) <= 2 and _in_interpreter(walked[0]):
                    self.excused['at a return instruction'] += 1
                else:
                    self.stops[_place(walked)] += 1
            elif names in leaves or names in driver:
                self.whole += 1
            elif any(_is_part(names, stack) for stack in leaves):
                self.stops['none, but a frame is missing'] += 1
            else:
                self.stops['none, but a frame is wrong'] += 1

        # (function, share of CPU time, share of samples), in percent
        measured = {leaf: entry['cpu'] for leaf, entry in thread['leaves'].items()}
        measured['driver'] = thread['cpu'] - sum(measured.values())
        self.shares = [(name, 100 * cpu / thread['cpu'], 100 * found[name] / max(self.samples, 1))
                       for name, cpu in measured.items()]
        self.problems = list(self._problems(least))

    def _problems(self, least):
        if self.samples < least:
            yield f'{self.samples} samples, not {least}'
        excused = sum(self.excused.values())
        if self.whole < WHOLE * (self.samples - excused):
            yield f'{self.whole} of {self.samples} stacks are whole, not {WHOLE:.0%}'
        if excused > EXCUSED * self.samples:
            yield f'{excused} of {self.samples} stacks are excused, more than {EXCUSED:.0%}'
        for stop in OURS:
            if self.stops[stop]:
                yield f'{self.stops[stop]} walks stopped at: {stop}'
        # A smaller sample scatters more.
        limit = POINTS * max(1, math.sqrt(LEAST / max(self.samples, 1)))
        for name, cpu, share in self.shares:
            # A leaf's frame that gets lost makes its sample look like the driver's: those, too, are few.
            if abs(share - cpu) > (limit if name != 'driver' else limit / 2):
                yield f'{name} has {share:.1f} % of the samples and used {cpu:.1f} % of the time'

    def __str__(self):
        lines = [f'thread {self.tid}: {self.samples} samples, '
                 f'{100 * self.whole / max(self.samples, 1):.2f} % whole',
                 f'  {"function":30} {"CPU %":>7} {"samples %":>9}']
        lines += [f'  {name:30} {cpu:7.2f} {share:9.2f}' for name, cpu, share in self.shares]
        lines += [f'  stopped: {stop}: {count}' for stop, count in self.stops.most_common()]
        lines += [f'  excused: {stop}: {count}' for stop, count in self.excused.most_common()]
        lines += [f'  WRONG: {problem}' for problem in self.problems]
        return '\n'.join(lines)


def judge(report, samples, *, least=LEAST, **options):
    """A Verdict for each thread of the workload's report; the later ones ran a tenth of the time."""
    samples = list(samples)
    return [Verdict(thread, samples, least=least if number == 0 else least // 12, **options)
            for number, thread in enumerate(report['threads'])]
