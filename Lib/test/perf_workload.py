"""A program whose CPU time is known function by function: what a profile of it must show.

    perf_workload.py [CPU_SECONDS [TURNS]]

The main thread, then a second one, call each leaf below in turn through callers of its own, in
blocks of milliseconds, and measure them with the thread's CPU clock (on a slow machine fewer TURNS keep
them that short). Between the two stamps of a thread's window nothing else of weight runs in it. The report, JSON on standard output:

    {"pid": PID, "threads": [{"tid": TID, "start": NS, "end": NS, "cpu": NS, "leaves": {
        QUALNAME: {"cpu": NS, "stack": [QUALNAME, ...], "callees": [QUALNAME, ...]}}}]}

The stamps are CLOCK_MONOTONIC, `cpu` is CPU time, a stack begins at its outermost frame. One of its
callees may follow the leaf, and belongs to it. A leaf's immediate caller calls no other leaf: where
a profiler cannot show the innermost frame, the one before it still tells whose sample it is.
"""

import json
import os
import sys
import threading
import time

TURNS = 100_000     # turns of a leaf's loop for one unit of weight: some milliseconds


# Leaf and callers: a plain function.
def plain_leaf(turns):
    total = 0
    for i in range(turns):
        total += i * 3 & 255
    return total


def plain_inner(turns):
    return plain_leaf(turns)


def plain_outer(turns):
    return plain_inner(turns)


# A method, below a class method.
class Sums:
    def leaf(self, turns):
        total = 0
        while turns:
            turns -= 1
            total ^= turns
        return total

    def inner(self, turns):
        return self.leaf(turns)

    @classmethod
    def outer(cls, turns):
        return cls().inner(turns)


# A closure, called back from a builtin written in C.
def closure_outer(turns):
    step = 7

    def leaf(turns):
        total = 0
        for i in range(turns):
            total = total + step & 1023
        return total

    def inner(turns):
        return leaf(turns)

    return list(map(inner, [turns]))


# A generator below a generator: each resumption enters the evaluator anew.
def generator_leaf(turns):
    total = 0
    for i in range(turns):
        total += i & 15
    yield total


def generator_inner(turns):
    yield from generator_leaf(turns)


def generator_outer(turns):
    return sum(generator_inner(turns))


# A coroutine that awaits a coroutine.
async def coroutine_leaf(turns):
    total = 0
    for i in range(turns):
        total -= i % 5
    return total


async def coroutine_inner(turns):
    return await coroutine_leaf(turns)


def coroutine_outer(turns):
    try:
        coroutine_inner(turns).send(None)
    except StopIteration as stop:
        return stop.value


# Many small calls: samples fall into the prologues and epilogues of everything on the way.
def callee(number):
    return number & 7


def calling_leaf(turns):
    total = 0
    for i in range(turns >> 2):
        total += callee(i)
    return total


def calling_inner(turns):
    return calling_leaf(turns)


def calling_outer(turns):
    return calling_inner(turns)


CALLEES = {'calling_leaf': ['callee']}
# (call, weight, the frames below `measure`). The weights differ, to tell the shares apart.
LEAVES = [
    (plain_outer, 5, ['plain_outer', 'plain_inner', 'plain_leaf']),
    (calling_outer, 4, ['calling_outer', 'calling_inner', 'calling_leaf']),
    (Sums.outer, 4, ['Sums.outer', 'Sums.inner', 'Sums.leaf']),
    (closure_outer, 3, ['closure_outer', 'closure_outer.<locals>.inner',
                        'closure_outer.<locals>.leaf']),
    (generator_outer, 2, ['generator_outer', 'generator_inner', 'generator_leaf']),
    (coroutine_outer, 2, ['coroutine_outer', 'coroutine_inner', 'coroutine_leaf']),
]


def measure(callers, cpu_seconds, turns, reports):
    for call, _, _ in LEAVES:
        call(1)         # each function has its trampoline before the window opens
    cpu = {stack[-1]: 0 for _, _, stack in LEAVES}
    start = time.monotonic_ns()
    cpu_start = now = time.thread_time_ns()
    while now - cpu_start < cpu_seconds * 1e9:
        for call, weight, stack in LEAVES:
            before = now
            call(int(weight * turns))
            now = time.thread_time_ns()
            cpu[stack[-1]] += now - before
    reports.append({
        'tid': threading.get_native_id(), 'start': start, 'end': time.monotonic_ns(),
        'cpu': now - cpu_start,
        'leaves': {stack[-1]: {'cpu': cpu[stack[-1]], 'stack': [*callers, 'measure', *stack],
                               'callees': CALLEES.get(stack[-1], [])}
                   for _, _, stack in LEAVES}})


def main(cpu_seconds=6, turns=TURNS):
    reports = []
    measure(['<module>', 'main'], cpu_seconds, turns, reports)
    callers = ['Thread._bootstrap', 'Thread._bootstrap_inner', 'Thread.run']
    thread = threading.Thread(target=measure, args=(callers, cpu_seconds / 10, turns, reports))
    thread.start()
    thread.join()
    print(json.dumps({'pid': os.getpid(), 'threads': reports}))


if __name__ == '__main__':
    main(*map(float, sys.argv[1:]))
