"""perf-trampoline record: run a program under perf, and say where its time went."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import perf_trampoline
from perf_trampoline import _interpreter, _profile, _terminal, perf_script

HOTTEST = 10
EVENTS = "cycles", "cycles:u", "cpu-clock", "cpu-clock:u"
"""The first that works here is taken: a machine's cycles need hardware, the kernel's share needs permission."""
# perf copies so much stack with every sample. The default of 8 KiB is some ten Python frames.
DWARF = "dwarf,32768"
FREQUENCY = {"fp": 999, "dwarf": 499}


FLAGS = {"-q", "--quiet", "--json", "-n", "--dry-run", "-h", "--help", "--version"}


def split(arguments):
    """Our own options, and the program with its arguments, which are its alone."""
    i = 0
    while i < len(arguments):
        word = arguments[i]
        if word in ("-m", "-c") or not word.startswith("-"):
            return arguments[:i], arguments[i:]
        if word == "--":
            return arguments[:i], arguments[i + 1:]
        has_value = "=" in word if word.startswith("--") else len(word) > 2
        i += 1 if has_value or word in FLAGS else 2
    return arguments, []


def add_arguments(parser):
    parser.usage = ("%(prog)s [options] SCRIPT [ARGUMENT...]\n"
                    "       %(prog)s [options] -m MODULE [ARGUMENT...] | -c CODE [ARGUMENT...]\n"
                    "       %(prog)s [options] --pid PID")
    what = parser.add_argument_group("what to record")
    # For the help: split() takes them before.
    what.add_argument("-m", metavar="MODULE", help="run a module, as python -m")
    what.add_argument("-c", metavar="CODE", help="run this code, as python -c")
    what.add_argument("--pid", "-p", type=int, help="a Python process that runs already; it is left as it was found")
    what.add_argument("--python", metavar="PYTHON", help="interpreter to run it with, also of a virtual environment in "
                                                         "which perf-trampoline is not installed (default: this one)")
    how = parser.add_argument_group("how")
    how.add_argument("-o", "--output", default="perf.data", metavar="FILE", help="recording to write (%(default)s)")
    how.add_argument("-F", "--freq", type=int, metavar="HZ",
                     help="samples per second and CPU (default: 999 with frame pointers, 499 with stack copies)")
    how.add_argument("-e", "--event", help="what perf counts (default: cycles, or cpu-clock where there are none)")
    how.add_argument("--call-graph", metavar="MODE", help="fp or dwarf[,BYTES] (default: fp where it works by trial)")
    how.add_argument("--backend", choices=_interpreter.SWITCHES, help="how names reach perf (default: perf_elf)")
    how.add_argument("--images", metavar="DIR", help="directory for ELF images (default: /tmp/python-perf-UID)")
    how.add_argument("--duration", type=float, metavar="SECONDS", help="stop then (default: at the end, or at Ctrl-C)")
    how.add_argument("--perf", default="perf", help="the perf to use")
    how.add_argument("-n", "--dry-run", action="store_true", help="print the perf command and do nothing")
    out = parser.add_argument_group("output, all on standard error")
    out.add_argument("-q", "--quiet", action="store_true", help="neither the command nor the hottest functions")
    out.add_argument("--json", action="store_true", help="instead of text, one JSON object on standard output")


def run(options):
    say = (lambda *_: None) if options.quiet or options.json else lambda *words: print(*words, file=sys.stderr)
    program = _program(options)
    interpreter = _running(options) if options.pid else _interpreter.Interpreter(
        options.python or sys.executable, options.images and os.path.abspath(options.images))
    perf = [options.perf]
    event = options.event or _event(perf)
    call_graph, backend, notes = _choose(options, interpreter, perf, event)
    if options.event:
        perf_script.check(perf, event=event, call_graph=call_graph, clock="mono")
    env = dict(os.environ) if options.pid else interpreter.environment(backend)
    target = ["-p", str(options.pid)] if options.pid else ["--", interpreter.executable, *program]
    command = [*perf, "record", "-N", "-o", options.output, "-e", event, "-F", str(options.freq or _frequency(call_graph)),
               "--call-graph", call_graph, *_buffers(perf, backend), *target]
    for note in notes:
        say(f"note: {note}")
    say(_interpreter.command_line(command, env))
    if options.dry_run:
        return 0
    with open(options.output, "ab"):
        pass        # else perf fails, and silently
    before = _identity(options.output)
    with _attached(options.pid, backend):
        status, seconds = _record(command[:1] + ["record", "-q"] + command[2:], env, options)
    if _identity(options.output) == before or not os.path.getsize(options.output):
        if not os.path.getsize(options.output):
            os.unlink(options.output)
        perf_script.check(perf, event=event, call_graph=call_graph)     # it tells why
        raise perf_script.PerfError(f"perf record ended with status {status} and wrote no {options.output}: "
                                    "run the command above by hand to see why")
    data = options.output
    if backend == "perf_jit":
        with _terminal.Progress("perf inject ...") as progress:
            progress(0)
            data = perf_script.inject(data, perf)
    if options.quiet and not options.json:
        return status
    try:
        _summary(options, data, perf, backend, status, seconds, command, say)
    except perf_script.PerfError as error:      # the program's status is worth more than our table
        print(f"perf-trampoline: {error}", file=sys.stderr)
    return status


def _program(options):
    program = options.program
    if bool(program) == bool(options.pid) or program[:1] in (["-m"], ["-c"]) and len(program) == 1:
        raise _interpreter.Unusable("say what to record: a script, -m MODULE, -c CODE or --pid PID")
    if program and program[0] not in ("-m", "-c") and not os.path.exists(program[0]):
        raise _interpreter.Unusable(f"there is no script {program[0]}")
    return program


def _running(options):
    """The interpreter of a process, as far as it can be asked; None if not: attach() will say what is wrong with it."""
    try:
        program = options.python or os.readlink(f"/proc/{options.pid}/exe")
    except FileNotFoundError:
        raise _interpreter.Unusable(f"there is no process {options.pid}") from None
    except PermissionError:
        raise _interpreter.Unusable(f"process {options.pid} is another user's: run this as that user or as root") from None
    try:
        return _interpreter.Interpreter(program)
    except _interpreter.Unusable:
        return None


def _event(perf):
    """The best event that this user may count here; PerfError tells why there is none."""
    failure = substitute = None
    for event in EVENTS:
        try:
            attributes = perf_script.check(perf, event=event)
        except perf_script.PerfError as error:
            failure = error
            continue
        # perf counts something else, or leaves the kernel out, without a word.
        base, _, user = event.partition(":")
        if attributes.startswith(base) and ("exclude_kernel: 1" in attributes) == bool(user):
            return event
        substitute = substitute or event
    if substitute:
        return substitute
    raise failure


def _choose(options, interpreter, perf, event):
    """Call-graph mode, backend, and what to tell the user about them."""
    notes = []
    call_graph, backend = options.call_graph, options.backend
    if call_graph is None and backend == "perf":
        call_graph = "fp"       # no unwinder finds its way through code that has a name only
    if call_graph is None:
        call_graph = DWARF
        if not perf_script.unwinders(perf):
            call_graph = "fp"
            notes.append("this perf has no DWARF unwinder, so stacks need an interpreter with frame pointers")
        elif interpreter and interpreter.claims_frame_pointers():
            number, whole = interpreter.trial(backend or _first(interpreter, "fp"), "fp", perf, event)
            if number and whole >= _interpreter.WHOLE:
                call_graph = "fp"
            else:
                notes.append("this interpreter's build asks for frame pointers, "
                             f"but only {whole:.0%} of the stacks of a trial came out whole: copying stacks instead")
    if interpreter is None:
        backend = backend or "perf_elf"
    elif backend is None:
        backend = _first(interpreter, call_graph)
        if backend != "perf_elf":
            notes.append(f"no ELF images: {interpreter.failures['perf_elf']}")
    elif not interpreter.works(backend):
        raise _interpreter.Unusable(f"{backend} does not work here: {interpreter.failures[backend]}")
    if backend == "perf" and call_graph != "fp":
        notes.append("with a perf map and stack copies only the innermost Python function has a name")
    return call_graph, backend, notes


def _first(interpreter, call_graph):
    for backend in ("perf_elf", "perf" if call_graph == "fp" else "perf_jit"):
        if interpreter.works(backend):
            return backend
    reasons = "; ".join(f"{backend}: {why}" for backend, why in interpreter.failures.items())
    raise _interpreter.Unusable(f"no way for names to reach perf ({reasons}); give a directory with --images")


def _frequency(call_graph):
    wanted = FREQUENCY[call_graph.partition(",")[0]] if call_graph.partition(",")[0] in FREQUENCY else 499
    try:
        with open("/proc/sys/kernel/perf_event_max_sample_rate", encoding="ascii") as setting:
            return min(wanted, int(setting.read()))
    except (OSError, ValueError):
        return wanted


def _buffers(perf, backend):
    """A jitdump needs its clock. Stack copies compress to a hundredth; inject cannot read them so."""
    return [*(["-k", "mono"] if backend == "perf_jit" else ["-z"] if "zstd" in perf_script.features(perf) else []),
            *perf_script.buffers()]


def _identity(path):
    try:
        info = os.stat(path)
        return info.st_ino, info.st_mtime_ns, info.st_size
    except FileNotFoundError:
        return None


class _attached:
    """A running process has trampolines in here."""

    def __init__(self, pid, backend):
        self.pid, self.backend = pid, backend

    def __enter__(self):
        if self.pid:
            perf_trampoline.attach(self.pid, backend=self.backend)

    def __exit__(self, *_):
        if self.pid and os.path.exists(f"/proc/{self.pid}"):
            perf_trampoline.detach(self.pid)


def _record(command, env, options):
    """Run perf to its end; the program's exit status and the seconds it took."""
    started = time.monotonic()
    process = subprocess.Popen(command, env=None if options.pid else env)
    # The terminal sends Ctrl-C to all of us: the program and perf end, we go on.
    interrupted = threading.Event()
    handlers = {signal.SIGINT: lambda *_: interrupted.set(), signal.SIGTERM: lambda *_: process.send_signal(signal.SIGTERM)}
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    stopped = threading.Event()

    def stop():
        stopped.set()
        process.send_signal(signal.SIGINT)

    timer = threading.Timer(options.duration, stop) if options.duration else None
    try:
        if timer:
            timer.start()
        if options.pid:
            with _terminal.Progress(f"recording process {options.pid}, Ctrl-C ends it: {{:.0f}} s") as progress:
                while process.poll() is None:
                    progress(time.monotonic() - started)
                    time.sleep(0.1)
        status = process.wait()
    finally:
        if timer:
            timer.cancel()
        for number, handler in old.items():
            signal.signal(number, handler)
    if status < 0:
        # perf ends by the signal that told it to stop; what we asked for is no failure.
        was_asked = stopped.is_set() or options.pid and interrupted.is_set()
        status = 0 if was_asked else 128 + signal.SIGINT if interrupted.is_set() else 128 - status
    return status, time.monotonic() - started


def _summary(options, data, perf, backend, status, seconds, command, say):
    with _terminal.Progress("reading the recording: {} samples") as progress:
        profile = _profile.Profile(data, perf, hide=("native", "kernel"), progress=progress)
    lost = perf_script.lost(data, perf)
    table = profile.table(lambda function: function if function.kind == _profile.PYTHON else None)
    rows = sorted(table.items(), key=lambda row: (-row[1][1], row[0]))
    if options.json:
        print(json.dumps({
            "data": os.path.abspath(data), "command": command, "backend": backend, "status": status,
            "seconds": round(seconds, 3), "samples": len(profile.paths), "whole": profile.whole, "lost": lost,
            "processes": profile.processes,
            "functions": [{"name": function.name, "file": function.file, "total": round(profile.share(total), 3),
                           "self": round(profile.share(own), 3)} for function, (total, own) in rows]}))
        return
    paint = _terminal.painter(sys.stderr)
    columns = _terminal.width(sys.stderr)
    say()
    if rows:
        say(paint("head", "  self  total  hottest Python functions, with the C code they call"))
        for function, (total, own) in rows[:HOTTEST]:
            text = f"{profile.share(own):6.1f} {profile.share(total):6.1f}  "
            name = _terminal.cut(function.name, columns and columns - len(text))
            where = _terminal.cut(f"  {_profile.place(function)}", columns and columns - len(text + name))
            say(text + paint("python", name) + paint("dim", where))
    else:
        say("No sample shows a Python function: see what perf-trampoline doctor says.")
    share = 100 * profile.whole / max(len(profile.paths), 1)
    say(f"\n{len(profile.paths)} samples in {seconds:.1f} s, {profile.processes} process"
        f"{'es' * (profile.processes != 1)}, {share:.1f} % with their whole stack"
        f"{f', {lost} lost: choose a lower -F' if lost else ''}")
    name = f" -i {data}" if data != "perf.data" else ""
    say(f"{os.path.abspath(data)}: perf-trampoline report{name}, perf-trampoline flamegraph{name}")
