"""Each command in the documents, `$ ` before it, is run: with a /tmp, a home and a folder of its own, in their order."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import perf_support
from perf_support import SOURCE

PROGRAM = '''\
import ast, pathlib, sys, time
def parse(text): return ast.unparse(ast.parse(text))
def work(seconds):
    text = pathlib.Path(ast.__file__).read_text()
    end = time.process_time() + seconds
    while time.process_time() < end: parse(text)
if __name__ == "__main__": work(float(sys.argv[1]) if len(sys.argv) > 1 else 1)
'''
# What the words around the commands take for granted.  The build folder may be below /tmp.
PREPARE = '''\
set -eu
mkdir bin build
mount --bind {build} build
mount -t tmpfs none /tmp
printf '#!/bin/sh\\nexec %s/build/bin/python "$@"\\n' "$PWD" >bin/python3
printf '#!/bin/sh\\nexec %s/build/bin/python -m perf_trampoline "$@"\\n' "$PWD" >bin/perf-trampoline
chmod +x bin/*
{base} -m venv --without-pip venv
python3 prog.py 600 & PID=$!
trap 'kill $PID' EXIT
sleep 1
'''


class CommandsTest(unittest.TestCase):
    def check_document(self, path):
        commands = re.findall(r'(?m)^    \$ (.+)$', (SOURCE / path).read_text())
        self.assertTrue(commands)
        if not list(Path(sys.prefix).glob('lib/python*/site-packages/perf_trampoline/viewer')):
            self.skipTest('no viewer for flamegraph: make viewer, with npm')
        if not perf_support.can_mount(['unshare', '-m']):
            self.skipTest('this user cannot mount a /tmp of its own')
        with tempfile.TemporaryDirectory(dir='/var/tmp') as scratch:
            Path(scratch, 'prog.py').write_text(PROGRAM)
            Path(scratch, 'data.json').write_text('[1, 2]')
            script = PREPARE.format(build=shlex.quote(sys.prefix), base=shlex.quote(sys._base_executable))
            for number, command in enumerate(commands):
                script += f"echo; echo '{number}:' >&2\n{command}\n"
            env = {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'PERF_', 'XDG_'))}
            done = subprocess.run(['unshare', '-m', 'sh', '-c', script], cwd=scratch, capture_output=True, errors='replace',
                                  stdin=subprocess.DEVNULL,
                                  env=env | {'HOME': scratch, 'PATH': f'{scratch}/bin:{env["PATH"]}', 'PAGER': 'cat'})
        words = re.split(r'(?m)^(\d+):\n', done.stderr)[1:]
        last = commands[int(words[-2])] if words else 'the preparations'
        self.assertEqual(done.returncode, 0, f'{last}\n{done.stderr[-5000:]}')
        self.assertEqual(len(words) // 2, len(commands))
        self.assertNotRegex(done.stderr + done.stdout, r'Traceback|unrecognized|[Ii]nvalid')
        return done.stdout

    def test_howto(self):
        self.assertIn('py::parse:', self.check_document('Doc/howto/perf_profiling.rst'))


if __name__ == '__main__':
    unittest.main()
