#!/usr/bin/env python3
"""Profile a real job, by the commands that a user would take: `demo.py BUILD`, a build folder.

The job parses, compiles and unparses the standard library of the folder's Python for some seconds. Exit status 1,
and a sentence, if perf cannot be used or fewer than 95 % of the samples have their whole stack.
"""

import ast
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CPU_SECONDS = 7
FREQUENCY = 400
CALL_GRAPH = 'dwarf,65528'      # the most perf can copy: the unparser recurses deeply
WHOLE = 95
REPORT = '--no-native', '--min', '2', '--depth', '16'


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


def main(build):
    command, data = build / 'bin/perf-trampoline', build / 'demo.data'

    def run(*arguments, stdout=None):
        """What a command says on standard output; what it says of failure the user has seen."""
        done = subprocess.run([command, *arguments], stdout=stdout, text=True)
        if done.returncode:
            sys.exit(1)
        return done.stdout

    record = 'record', '-o', data, '--call-graph', CALL_GRAPH, '-F', str(FREQUENCY)
    recorded = json.loads(run(*record, '--json', __file__, '--job', stdout=subprocess.PIPE))
    run('report', '-i', data, *REPORT)
    whole = 100 * recorded['whole'] / max(recorded['samples'], 1)
    print(f"""
Your own program:
  {command} record --call-graph {CALL_GRAPH} prog.py
  {command} report
  {command} flamegraph
""", flush=True)
    if not recorded['functions']:
        sys.exit('demo: no sample shows a Python function.')
    if whole < WHOLE:
        sys.exit(f'demo: fewer than {WHOLE} % of the stacks are whole.')
    has_viewer = next(build.glob('lib/python*/site-packages/perf_trampoline/viewer'), None)
    if not has_viewer:
        print('no viewer for a page (make viewer, with npm, fetches it): for speedscope.app', flush=True)
    run('flamegraph', '-i', data, *([] if has_viewer else ['--format', 'speedscope']))


if __name__ == '__main__':
    if sys.argv[1:] == ['--job']:
        job()
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]).resolve())
    else:
        sys.exit(__doc__)
