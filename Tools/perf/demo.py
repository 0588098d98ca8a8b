#!/usr/bin/env python3
"""Profile a real job with perf and print its Python call tree: `demo.py PYTHON`.

The job parses, compiles and unparses PYTHON's own standard library for some seconds. Exit status 1,
and a sentence, if perf cannot be used or fewer than 95 % of the samples have their whole stack.
"""

import ast
import collections
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import perf_script

CPU_SECONDS = 7
FREQUENCY = 400
CALL_GRAPH = 'dwarf,65528'      # the most perf can copy: the unparser recurses deeply
WHOLE = 0.95
TREE_LINES = 32
DEPTH = 16
FLAT_LINES = 8
COLUMNS = 96


def parse(path):
    return ast.parse(path.read_bytes(), path)


def compile_(tree, path):
    return compile(tree, path, 'exec')


def unparse(tree):
    return ast.unparse(tree)


def job():
    for path in itertools.cycle(sorted(Path(os.__file__).parent.glob('*.py'))):
        if time.process_time() > CPU_SECONDS:
            return
        tree = parse(path)
        compile_(tree, path)
        unparse(tree)


class Node:
    """A function at one place of the call tree; its time in samples."""

    def __init__(self):
        self.total = self.own = 0
        self.callees = collections.defaultdict(Node)

    def below(self, depth=0):
        """(depth, name, node) of all below, each callee before its own callees, the most costly first."""
        for name, node in sorted(self.callees.items(), key=lambda item: -item[1].total):
            yield depth, name, node
            yield from node.below(depth + 1)


def profile(python):
    """The samples of the job: the call tree, the time of each function itself, and how many are whole."""
    root, own = Node(), collections.Counter()
    whole = 0
    with tempfile.TemporaryDirectory(prefix='python-demo-') as directory:
        data = os.path.join(directory, 'perf.data')
        perf_script.record([python, '-X', f'perf_elf={directory}', __file__, '--job'], data,
                           call_graph=CALL_GRAPH, freq=FREQUENCY)
        for sample in perf_script.samples(data):
            frames, is_whole = perf_script.walk(sample.stack)
            whole += is_whole
            root.total += 1
            if not is_whole:
                continue        # its place in the tree is not known
            node = root
            for frame in reversed(frames):
                if at := perf_script.python_name(frame):
                    name = at
                    node = node.callees[name]
                    node.total += 1
            if node is not root:
                node.own += 1
                own[name] += 1
    return root, own, whole


def label(name):
    qualname, filename = name
    return f'{qualname}  {os.path.basename(filename)}'


def main(python):
    perf_script.check()
    # Past any starting script: perf 6.1 may unwind with the C library of the shell that a script was run by.
    python = subprocess.run([python, '-c', 'import sys; print(sys.executable)'], check=True, text=True,
                            stdout=subprocess.PIPE).stdout.strip()
    root, own, whole = profile(python)
    if not root.total:
        raise perf_script.PerfError('perf recorded no sample')
    percent = 100 / root.total
    # A function costs at least what its callees cost: the most costly nodes form a tree.
    nodes = [entry for entry in root.below() if entry[0] < DEPTH]
    least = sorted((node.total for _, _, node in nodes), reverse=True)[:TREE_LINES][-1] if nodes else 0
    print('Python call tree (per cent of the samples)\n\n total   self')
    for depth, name, node in nodes:
        if node.total >= least:
            print(f'{node.total * percent:6.1f} {node.own * percent:6.1f}  {"  " * depth}{label(name)}'[:COLUMNS])
    print('\nMost time in the function itself\n')
    for name, count in own.most_common(FLAT_LINES):
        print(f'{count * percent:6.1f}         {label(name)}'[:COLUMNS])
    print(f'\n{root.total} samples, {whole * percent:.1f} % with their whole stack')
    if not nodes:
        raise perf_script.PerfError('no sample shows a Python function')
    if whole < WHOLE * root.total:
        raise perf_script.PerfError(f'fewer than {WHOLE:.0%} of the stacks are whole')
    print(f"""
Your own program:
  perf record --call-graph {CALL_GRAPH} {python} -X perf_elf prog.py
  perf report --no-inline""")


if __name__ == '__main__':
    if sys.argv[1:] == ['--job']:
        job()
    elif len(sys.argv) == 2:
        try:
            main(sys.argv[1])
        except (perf_script.PerfError, OSError, subprocess.CalledProcessError) as error:
            sys.exit(f'demo: {error}.')
    else:
        sys.exit(__doc__)
