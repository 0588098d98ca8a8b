"""In a guest: record the workload in each mode of job.json, and print what perf makes of it on the console.

Each result is a JSON object, compressed and in base64, behind a mark on every line: kernel messages may come between.
Its verdict is found outside, where a processor is not emulated.
"""

import base64
import json
import os
import subprocess
import textwrap
import time
import zlib

import perf_script

MARK, END = '@@ ', '@@.'
HERE = os.path.dirname(os.path.abspath(__file__))


def record(mode, frequency, cpu_seconds, turns):
    data = '/tmp/perf.data'
    env = os.environ | {'PYTHONUSERBASE': HERE}
    report = json.loads(perf_script.record(
        [mode['python'], '-X', mode['backend'], f'{HERE}/perf_workload.py', str(cpu_seconds), str(turns)], data,
        perf=mode['perf'], freq=frequency, call_graph=mode['call_graph'], env=env, options=mode['options']))
    lost = perf_script.lost(data, mode['perf'])
    if mode['backend'] == 'perf_jit':
        data = perf_script.inject(data, mode['perf'])
    # What lies outside the threads' windows is most of it, and of no interest.
    window = [edge(thread[key] for thread in report['threads']) / 1e9 for edge, key in ((min, 'start'), (max, 'end'))]
    script = ''.join(perf_script.lines(data, mode['perf'], '--time', '{:.9f},{:.9f}'.format(*window)))
    version = subprocess.run([*mode['perf'], 'version'], capture_output=True, text=True).stdout.split()[-1]
    return {'report': report, 'lost': lost, 'script': script, 'perf': version}


def main():
    with open(f'{HERE}/job.json') as file:
        job = json.load(file)
    for mode in job['modes']:
        began = time.monotonic()
        print(f'{mode["name"]}: begun {began:.0f} s after the start of the kernel', flush=True)
        try:
            result = record(mode, job['frequency'], job['cpu_seconds'], job['turns'])
        except (perf_script.PerfError, ValueError) as error:
            result = {'error': str(error)}
        result |= {'mode': mode['name'], 'seconds': time.monotonic() - began}
        text = base64.b64encode(zlib.compress(json.dumps(result).encode('utf-8', 'surrogateescape'), 6)).decode()
        print(*(MARK + line for line in textwrap.wrap(text, 1000)), END, sep='\n', flush=True)


if __name__ == '__main__':
    main()
