#!/usr/bin/env python3
"""Damage what our readers read and our writers are given, and see what they make of it: `make fuzz [SECONDS=600]`.

    build/python Tools/perf/fuzz/fuzz.py --seconds 60 [--seed N] [TARGET ...]

A target takes examples from Hypothesis. What a reader accepts must be what a decoder of our own, oracle.py, finds in the
same bytes, and nothing that it finds unsound. What it refuses, it refuses in its own words: another exception, no answer
for long or a gigabyte of memory is a fault. The first fault ends its target; Hypothesis has made the example small.

The targets share the time, in rounds of some dozen examples. The last lines are the numbers of examples, and of those
refused. `--seed N TARGET`, with the number beside a fault, begins with it.
"""

import argparse
import collections
import itertools
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from common import PATIENCE, TARGETS, Hang, scratch

# The targets, in the order of their names in the output.
import extractor
import readers
import runtime

MEMORY = 1 << 30

outcomes = collections.defaultdict(collections.Counter)


def run_round(name, number):
    strategy, size, function = TARGETS[name]

    def body(example):
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            outcomes[name][function(example)] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    body.__qualname__ = body.__name__ = name
    check = given(strategy)(body)
    check = settings(max_examples=size, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                     phases=[Phase.generate, Phase.shrink])(check)
    seed(number)(check)()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", default=list(TARGETS), help=" ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()

    def hang(*_):
        raise Hang(f"no answer for {PATIENCE} seconds")

    signal.signal(signal.SIGALRM, hang)
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory + MEMORY, memory + MEMORY))
    spent, faulty = dict.fromkeys(options.targets, 0.0), []
    end = time.monotonic() + options.seconds
    print(f"seed {options.seed}", flush=True)
    for number in itertools.count(options.seed):
        going = {name: seconds for name, seconds in spent.items() if name not in faulty}
        begin = time.monotonic()
        if not going or begin >= end and all(going.values()):
            break
        name = min(going, key=going.get)        # the one that has had least
        try:
            run_round(name, number)
        except Exception:
            traceback.print_exc()
            print(f"{name}, seed {number}: a fault; what was read last is in {scratch()}", file=sys.stderr)
            faulty.append(name)
        spent[name] += time.monotonic() - begin
    if not faulty:
        shutil.rmtree(scratch())
    for name, seconds in spent.items():
        print(f"{name:10} {sum(outcomes[name].values()):8} examples  {outcomes[name][False]:8} refused  {seconds:6.1f} s"
              f"{'  A FAULT' if name in faulty else ''}")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
