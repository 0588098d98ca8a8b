"""perf-trampoline report: a recording as a call tree of Python functions, or as a table."""

import json
import os
import sys

from perf_trampoline import _profile, _terminal
from perf_trampoline._profile import KEYS, OTHER, PYTHON

INDENT = "  "


def add_input(parser, name=True):
    """The options of all commands that read a recording."""
    if name:
        parser.add_argument("-i", "--input", default="perf.data", metavar="FILE", help="recording to read (%(default)s)")
    parser.add_argument("--perf", default="perf", help="the perf to use")
    parser.add_argument("--hide", action="append", default=[], choices=["native", "kernel"],
                        help="leave out C library and extension frames, or the kernel's; their time is their caller's")
    parser.add_argument("--no-native", action="store_const", const=["native", "kernel"], default=[],
                        help="Python functions only: --hide native --hide kernel")
    parser.add_argument("--interpreter", action="store_true", help="keep the interpreter's own frames")


def read(options, data=None):
    with _terminal.Progress("reading the recording: {} samples") as progress:
        return _profile.Profile(data or options.input, [options.perf], hide=[*options.hide, *options.no_native],
                                unfold=options.interpreter, progress=progress)


def add_arguments(parser):
    add_input(parser)
    parser.add_argument("--by", choices=KEYS, help="a table by function, file or module instead of the tree")
    parser.add_argument("--sort", choices=["self", "total"], default="self", help="of a table (%(default)s)")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what changed from recording A to B, by function "
                                                                    "or as --by says, in points")
    parser.add_argument("--min", type=float, default=1.0, metavar="PERCENT", help="leave out what has less (%(default)s)")
    parser.add_argument("--depth", type=int, metavar="N", help="no deeper than this")
    parser.add_argument("--json", action="store_true", help="all of it, as one JSON object")


def run(options):
    if options.diff:
        return _diff(options)
    profile = read(options)
    if not profile.paths:
        raise ValueError(f"{profile.data} has no samples: did the program run, and long enough?")
    if options.json:
        print(json.dumps(_head(profile) | (
            {"rows": [row for row in _rows(profile, options)]} if options.by else
            {"tree": _node(profile, None, profile.tree())})))
        return 0
    columns = _terminal.width(sys.stdout)
    paint = _terminal.painter(sys.stdout)
    whole = 100 * profile.whole / len(profile.paths)
    print(_terminal.cut(f"{profile.data}: {len(profile.paths)} samples of {profile.event}, {profile.processes} process"
                        f"{'es' * (profile.processes != 1)}, {whole:.1f} % with their whole stack", columns))
    print(paint("head", f"\n total   self  {options.by or 'function'}"))
    if options.by:
        for row in _rows(profile, options):
            if max(row["total"], row["self"]) >= options.min:
                _line(f"{row['total']:6.1f} {row['self']:6.1f}  ", row, columns, paint)
    else:
        _print_tree(profile, options, columns, paint)
    return 0


def _head(profile):
    return {"data": os.path.abspath(profile.data), "event": profile.event, "samples": len(profile.paths),
            "whole": profile.whole, "processes": profile.processes, "weight": profile.weight}


def _describe(key):
    """A table's key as fields for people and scripts."""
    if isinstance(key, str):
        return {"name": key}
    return {"name": key.name, "kind": key.kind, "file": key.file}


def _key(options):
    by = KEYS[options.by or "function"]
    return lambda function: by(function)


def _rows(profile, options):
    rows = [_describe(key) | {"total": round(profile.share(total), 3), "self": round(profile.share(own), 3)}
            for key, (total, own) in profile.table(_key(options)).items()]
    return sorted(rows, key=lambda row: (-row[options.sort], -row["self"], -row["total"], row["name"]))


def _node(profile, function, node):
    return (_describe(function) if function else {"name": "all", "kind": OTHER, "file": ""}) | {
        "total": round(profile.share(node.total), 3), "self": round(profile.share(node.own), 3),
        "children": [_node(profile, callee, below) for callee, below in node.sorted()]}


def _line(numbers, row, columns, paint, lines=""):
    """One function, as much of it as there is room for."""
    kind = row.get("kind", PYTHON)
    room = columns and max(columns - len(numbers) - len(lines), 8)
    name = _terminal.cut(row["name"], room)
    where = _profile.place(_profile.Function(kind, row["name"], row["file"])) if "file" in row else ""
    where = _terminal.cut(f"  {where}", room and room - len(name)) if where else ""
    print(numbers + paint("dim", lines) + paint(kind, name) + paint("dim", where))


def _print_tree(profile, options, columns, paint):
    branch, last, through = ("├─ ", "└─ ", "│  ") if _terminal.can_draw(sys.stdout) else ("|- ", "`- ", "|  ")

    def show(node, lines, depth):
        """The callees of a node; a single one stands under its caller, several branch off."""
        if options.depth is not None and depth >= options.depth:
            return
        callees = [(function, below) for function, below in node.sorted() if profile.share(below.total) >= options.min]
        for i, (function, below) in enumerate(callees):
            if depth == 0 or len(callees) == 1:
                first = rest = lines
            else:
                first, rest = (last, "   ") if i == len(callees) - 1 else (branch, through)
                first, rest = lines + first, lines + rest
            _line(f"{profile.share(below.total):6.1f} {profile.share(below.own):6.1f}  ", _describe(function), columns,
                  paint, first)
            show(below, rest, depth + 1)

    show(profile.tree(), "", 0)


def _diff(options):
    before, after = (read(options, data) for data in options.diff)
    tables = [profile.table(_key(options)) for profile in (before, after)]
    rows = []
    for key in tables[0].keys() | tables[1].keys():
        shares = [[profile.share(weight) for weight in table.get(key, (0, 0))]
                  for profile, table in zip((before, after), tables)]
        rows.append(_describe(key) | {
            "total": [round(share[0], 3) for share in shares], "self": [round(share[1], 3) for share in shares],
            "change": {"total": round(shares[1][0] - shares[0][0], 3), "self": round(shares[1][1] - shares[0][1], 3)}})
    rows.sort(key=lambda row: (-abs(row["change"][options.sort]), row["name"]))
    if options.json:
        print(json.dumps({"before": _head(before), "after": _head(after), "rows": rows}))
        return 0
    columns = _terminal.width(sys.stdout)
    paint = _terminal.painter(sys.stdout)
    print(_terminal.cut(f"from {before.data} ({len(before.paths)} samples) to {after.data} ({len(after.paths)} samples), "
                        "in per cent of each", columns))
    print(paint("head", f"\n  self change   total change  {options.by or 'function'}"))
    for row in rows:
        if max(map(abs, row["change"].values())) >= options.min:
            change = row["change"]
            numbers = f"{row['self'][1]:6.1f} {change['self']:+6.1f}  {row['total'][1]:6.1f} {change['total']:+6.1f}  "
            style = "bad" if change[options.sort] > 0 else "good"
            print(paint(style, numbers), end="")
            _line("", row, columns and columns - len(numbers), paint)
    return 0
