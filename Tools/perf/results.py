#!/usr/bin/env python3
"""Put what the tests found into documents: results.py DIRECTORY README GUESTS

README gets the table of test_perf_foreign and one line on test_perf_guest, GUESTS the latter's matrix.
"""

import json
import re
import sys
from pathlib import Path

import archs

LEVELS = ['all', 'smoke']       # best first, as the tests name what they ran
LEGEND = '''\
Tested with all three backends: *all* tests of them, or *smoke*: names, unwind data and deep recursion.
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
    return grid(rows)


def grid(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    head, *body = [' '.join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    rule = ' '.join('=' * width for width in widths)
    return '\n'.join([rule, head, rule, *body, rule])


def guests(directory):
    """(architecture, cell) of every guest and mode, in the table's order."""
    return [(name, cell) for name in archs.load() if (path := directory / 'guests' / f'{name}.json').exists()
            for cell in json.loads(path.read_text())]


def share(cell):
    # No rounding up to 100.
    text = '-' if cell['whole'] is None else f'{int(cell["whole"] * 10) / 10}'
    return f'{text} FAILS' if cell.get('unexpected') or cell['reason'].startswith('Failed') else text


def matrix(cells):
    """A row for each way to record, a column for each perf and Python; below, a sentence for what is not whole."""
    setups = sorted({(cell['suite'], cell['python']) for _, cell in cells}, key=lambda setup: (setup[0], setup[1][::-1]))
    perfs = {cell['suite']: cell['perf'] for _, cell in cells if cell['perf']}
    shares = {(name, cell['stacks'], cell['backend'], cell['suite'], cell['python']): share(cell) for name, cell in cells}
    rows = [['architecture', 'stacks', 'names', *(f'perf {perfs.get(suite, suite)}, {python}' for suite, python in setups)]]
    for row in dict.fromkeys(key[:3] for key in shares):
        rows.append([*row, *(shares.get((*row, *setup), '-') for setup in setups)])
    notes = {}
    for name, cell in cells:
        if cell['whole'] != 100:
            where = f'{name}, {cell["stacks"]} {cell["backend"]}, perf {cell["perf"] or cell["suite"]}, {cell["python"]}'
            what = ' '.join([cell['reason'], *(f'{problem}.' for problem in cell.get('unexpected', []))])
            notes[where] = what
    return '\n\n'.join([grid(rows), '\n'.join(f'- {where}: {what}' for where, what in notes.items())]).rstrip()


def summary(cells):
    if not cells:
        return ''
    failed = sum('FAILS' in share(cell) for _, cell in cells)
    shares = [cell['whole'] for _, cell in cells if cell['whole'] is not None]
    whole = sum(share >= 98 for share in shares)
    archs_run = len({name for name, _ in cells})
    return (f'\n\nOn real kernels of {archs_run} architectures {whole} of {len(shares)} profiles have 98 % whole stacks or more, '
            f'{failed} are\nworse than was to be expected: ``Doc/howto/perf_guests.rst`` has all, with reasons.')


def put(file, mark, text):
    """Replace what is between a file's lines `.. MARK begin` and `.. MARK end`."""
    result, count = re.subn(rf'(?ms)(?<=^\.\. {mark} begin\n).*?(?=^\.\. {mark} end$)', lambda _: f'\n{text}\n\n',
                            file.read_text())
    if count != 1:
        sys.exit(f"results.py: {file} lacks the lines '.. {mark} begin' and '.. {mark} end'")
    file.write_text(result)


def main(directory, readme, document):
    directory = Path(directory)
    cells = guests(directory)
    foreign = any(directory.glob('*.json'))
    if not foreign and not cells:
        sys.exit(f'results.py: no results in {directory}: run make check, make check-arch or make check-guest')
    put(Path(readme), 'results', (f'{LEGEND}\n{table(directory)}' * foreign + summary(cells)).strip())
    if cells:
        put(Path(document), 'guests', matrix(cells))


if __name__ == '__main__':
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
