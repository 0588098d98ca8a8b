"""perf-trampoline flamegraph: a recording as one HTML page, or in the form other viewers and stores read."""

import html
import json
import os
import re
import sys

from perf_trampoline import _export, _profile, _report

_HERE = os.path.dirname(os.path.abspath(__file__))
VIEWER = {"D3": "d3.min.js", "VIEWER": "d3-flamegraph.umd.min.js", "VIEWER_CSS": "d3-flamegraph.css"}
"""The page's parts, in viewer/: `make viewer` fetches them when the package is built."""

# What each form is called where no name is given.
SUFFIXES = {"html": ".html", "speedscope": ".speedscope.json", "firefox": ".firefox.json", "pprof": ".pb.gz",
            "folded": ".folded"}


def add_arguments(parser):
    _report.add_input(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write, - for standard output (default: the "
                                                               "recording's name with another ending)")
    parser.add_argument("--format", choices=SUFFIXES, default="html",
                        help="html: one page that needs nothing else; speedscope: speedscope.app; firefox: "
                             "profiler.firefox.com; pprof: go tool pprof, Pyroscope, Parca; folded: a stack a line")
    parser.add_argument("--title", help="of the page (default: the recording's name)")


class NoViewer(ValueError):
    def __init__(self):
        others = ", ".join(f"--format {name}" for name in SUFFIXES if name != "html")
        super().__init__("this build has no viewer for HTML pages (make viewer, with npm, puts it in); "
                         f"use one of {others}")


def run(options):
    if options.format == "html":
        parts = viewer()        # before the recording is read
    profile = _report.read(options)
    if not profile.paths:
        raise ValueError(f"{profile.data} has no samples: did the program run, and long enough?")
    output = options.output or f"{options.input.removesuffix('.data')}{SUFFIXES[options.format]}"
    title = options.title or os.path.basename(options.input)
    if options.format == "html":
        data = page(profile, title, parts).encode()
    else:
        data = getattr(_export, options.format)(profile, title)
    if output == "-":
        sys.stdout.buffer.write(data)
        return 0
    with open(output, "wb") as file:
        file.write(data)
    print(os.path.abspath(output))
    return 0


def viewer():
    parts = {}
    for name, path in VIEWER.items():
        try:
            with open(os.path.join(_HERE, "viewer", path), encoding="utf-8") as file:
                parts[name] = file.read()
        except OSError:
            raise NoViewer from None
    return parts


def page(profile, title, parts):
    """The HTML page as a string."""
    numbers, kinds = {}, {}

    def shrink(function, node):
        """[number of the function, weight, callees]"""
        if function:
            kinds[function.kind] = kinds.get(function.kind, 0) + node.own
        return [-1 if function is None else numbers.setdefault(function, len(numbers)), node.total,
                [shrink(callee, below) for callee, below in node.sorted()]]

    tree = shrink(None, profile.tree())
    whole = 100 * profile.whole / len(profile.paths)
    data = {
        "tree": tree, "weight": profile.weight, "kinds": kinds,
        "functions": [[function.kind, function.name, _profile.place(function)] for function in numbers],
        "summary": f"{len(profile.paths):,} samples of {profile.event}, {profile.processes} process"
                   f"{'es' * (profile.processes != 1)}, {whole:.1f} % with their whole stack"}
    with open(os.path.join(_HERE, "flamegraph.html"), encoding="utf-8") as file:
        template = file.read()
    # "</script>" in a name must not end the element it is in; the names come out of files that others wrote.
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = parts | {"TITLE": html.escape(title), "PROFILE": encoded}
    return re.sub(r"@([A-Z0-9_]+)@", lambda match: parts[match[1]], template)
