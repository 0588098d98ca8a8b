"""The command line: finds the command's module, and turns what cannot be done into one sentence."""

import argparse
import importlib.util
import os
import sys

COMMANDS = {
    "record": "run a program, or watch one that runs, and name its hottest functions",
    "report": "the call tree of a recording, from Python's side; --diff compares two",
    "flamegraph": "a recording as one HTML page, or for speedscope, Firefox Profiler and pprof",
    "doctor": "what works here, what does not, and the cure",
    "clean": "remove what recordings left behind",
    "status": "can there be trampolines in this interpreter, and if not, why",
}
ATTACHING = "attach", "detach"
NOT_RUN = 125
"""record's own failure, as of timeout(1) and env(1): other statuses are the program's."""
EXAMPLES = """\
  perf-trampoline record prog.py      run it; ends with the hottest functions
  perf-trampoline report              where the time went, as a tree
  perf-trampoline flamegraph          the same as a picture, perf.html
"""


def version():
    try:
        from perf_trampoline._version import VERSION
    except ImportError:
        return "unknown (not built)"
    return VERSION


def parser(prog, chosen=None):
    """The parser; only the chosen command's module is loaded, or all of them."""
    top = argparse.ArgumentParser(
        prog=prog, description="Profile Python with perf: from a program to a picture.", epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"perf-trampoline {version()}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
                                      allow_abbrev=False, aliases=["purge"] if name == "clean" else [])
        command.add_argument("--version", action="version", version=f"perf-trampoline {version()}")
        if chosen in (None, name) or chosen == "purge" and name == "clean":
            importlib.import_module(f"perf_trampoline._{name}").add_arguments(command)
    if importlib.util.find_spec("perf_trampoline.attaching") and chosen in (None, "", *ATTACHING):
        importlib.import_module("perf_trampoline.attaching").add_arguments(commands)
    return top


def main(arguments):
    """Run a command; its exit status."""
    prog = "python -m perf_trampoline" if os.path.basename(sys.argv[0]) == "__main__.py" else "perf-trampoline"
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    if chosen == "record":
        from perf_trampoline._record import split
        at = arguments.index("record") + 1
        ours, program = split(arguments[at:])
        arguments = [*arguments[:at], *ours]
    options = parser(prog, chosen).parse_args(arguments)
    if chosen == "record":
        options.program = program
    name = "clean" if options.command == "purge" else options.command
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="backslashreplace")       # names come out of other people's files
    sys.setrecursionlimit(20_000)       # a call tree may be a thousand deep
    from perf_trampoline import _interpreter, perf_script
    try:
        if name in ATTACHING:
            return importlib.import_module("perf_trampoline.attaching").main(options)
        return importlib.import_module(f"perf_trampoline._{name}").run(options)
    except BrokenPipeError:
        # The reader has seen enough; nothing is to be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (_interpreter.Unusable, perf_script.PerfError, RuntimeError, ValueError, OSError) as error:
        print(f"{prog} {options.command}: {error}", file=sys.stderr)
        return NOT_RUN if name == "record" else 1
    except KeyboardInterrupt:
        return 130
