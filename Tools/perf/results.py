#!/usr/bin/env python3
"""Put what test_perf_foreign found into a table: results.py DIRECTORY README"""

import json
import re
import sys
from pathlib import Path

import archs

LEVELS = ['all', 'most', 'smoke']       # best first, as the tests name what they ran
LEGEND = '''\
CPython versions tested with all three backends. *all*: whole test files; *most*: those tests in them that an
architecture could break; *smoke*: names, unwind data and deep recursion; *-*: not tested.
'''


def cell(backends):
    """Of one interpreter; a skip counts as nothing."""
    failed = [backend for backend, ran in backends.items() if 'failed' in ran.values()]
    if failed:
        return 'fails: ' + ', '.join(failed)
    if len(backends) < 3:
        return '-'
    reached = [[level for level in LEVELS if ran.get(level) == 'passed'] for ran in backends.values()]
    return next((level for level in LEVELS if all(level in levels for levels in reached)), '-')


def table(directory):
    results = {path.stem: json.loads(path.read_text()) for path in directory.glob('*.json')}
    versions = sorted({version for result in results.values() for version in result['outcomes']},
                      key=lambda version: [int(number) for number in version.split('.')])
    rows = [['architecture', *versions, 'on']]
    for name in archs.load():
        result = results.get(name, {'outcomes': {}, 'on': '-'})
        rows.append([name, *(cell(result['outcomes'].get(version, {})) for version in versions), result['on']])
    widths = [max(map(len, column)) for column in zip(*rows)]
    head, *body = [' '.join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    rule = ' '.join('=' * width for width in widths)
    return '\n'.join([rule, head, rule, *body, rule])


def main(directory, readme):
    directory, readme = Path(directory), Path(readme)
    if not any(directory.glob('*.json')):
        sys.exit(f'results.py: no results in {directory}: run make check, or make check-arch')
    text, count = re.subn(r'(?ms)(?<=^\.\. results begin\n).*?(?=^\.\. results end$)',
                          lambda _: f'\n{LEGEND}\n{table(directory)}\n\n', readme.read_text())
    if count != 1:
        sys.exit(f"results.py: {readme} lacks the lines '.. results begin' and '.. results end'")
    readme.write_text(text)


if __name__ == '__main__':
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
