"""What can be recorded of an interpreter, found by running it as the program will be run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile

from perf_trampoline import perf_script

SWITCHES = {"perf": "PYTHONPERFSUPPORT", "perf_jit": "PYTHON_PERF_JIT_SUPPORT", "perf_elf": "PYTHON_PERF_ELF_SUPPORT"}
PACKAGE = os.path.dirname(os.path.abspath(__file__))
INJECTION = os.path.join(PACKAGE, "inject")
"""In PYTHONPATH its sitecustomize starts this package in an interpreter that has none of its own."""

_PROBE = """
import json, os, sys, sysconfig
package = sys.modules.get("perf_trampoline")
facts = {"executable": sys.executable, "version": sys.version.split()[0], "implementation": sys.implementation.name,
         "suffix": sysconfig.get_config_var("EXT_SUFFIX"), "architecture": os.uname().machine,
         "flags": " ".join(sysconfig.get_config_var(v) or "" for v in ("PY_CFLAGS", "PY_CORE_CFLAGS", "CONFIGURE_CFLAGS")),
         "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
         "status": package.status() if package else None}
if package:
    package.deactivate()
print(json.dumps(facts))
"""

# Three callers and a leaf, pure Python but for the clock; the stamps bound what must be seen.
_TRIAL = """
import time
def leaf(turns):
    total = 0
    for i in range(turns): total += i & 7
    return total
def inner(turns): return leaf(turns)
def outer():
    inner(1)
    start, end = time.monotonic_ns(), time.process_time() + %f
    while time.process_time() < end: inner(100_000)
    print(start, time.monotonic_ns())
outer()
"""
EXPECTED = ["<module>", "outer", "inner", "leaf"]
WHOLE = 0.95
"""So many of the trial's samples must have their whole stack."""


def _is_probed(facts):
    """Is it what _PROBE prints?  Any program may have been named as the interpreter."""
    match facts:
        case {"executable": str(), "version": str(), "implementation": str(), "suffix": str(), "architecture": str(),
              "flags": str(), "free_threaded": bool(), "status": None | {
                  "active": bool(), "unavailable": str() | None, "failure": str() | None, "files": list()}}:
            files = facts["status"]["files"] if facts["status"] else []
            return re.match(r"\d+\.\d+\.", facts["version"]) and all(isinstance(file, str) for file in files)
    return False


class Unusable(Exception):
    """There can be no recording; the message is a sentence that says why and what to do."""


def _environment(backend, injected=False, directory=None):
    """The environment that switches a backend on, here and in child processes."""
    env = {name: value for name, value in os.environ.items()
           if name not in SWITCHES.values() and name != "PYTHON_PERF_NATIVE"}
    if backend:
        env[SWITCHES[backend]] = "1"
    if directory:
        env["PERF_TRAMPOLINE_DIR"] = directory
    if injected:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [INJECTION, env.get("PYTHONPATH")]))
    return env


def _probe(python, env):
    try:
        done = subprocess.run([python, "-c", _PROBE], env=env, capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL)
    except OSError as error:
        raise Unusable(f"{python} cannot be run: {error.strerror}") from None
    try:
        facts = json.loads(done.stdout.splitlines()[-1])
        if not _is_probed(facts):
            raise ValueError
    except (IndexError, ValueError, RecursionError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Unusable(f"{python} is no Python that can be asked (status {done.returncode}: {said})") from None
    if facts["status"]:
        for path in facts["status"]["files"]:
            try:
                os.unlink(path)
            except OSError:
                pass
    return facts, done.stderr.strip()


class Interpreter:
    """An interpreter, and whether this package can work in it; Unusable if not.

    directory    where ELF images are to be made; None for the package's own places
    executable   to be given to perf record
    injected     nothing of ours is installed there: PYTHONPATH brings it in
    failures     {backend: why it does not work}
    """

    def __init__(self, python, directory=None):
        found = shutil.which(python)
        if not found:
            raise Unusable(f"there is no interpreter {python}")
        self.directory, self.injected, self.failures, self._tried = directory, False, {}, {}
        facts, said = _probe(found, _environment("perf_elf", directory=directory))
        if facts["implementation"] != "cpython" or tuple(map(int, facts["version"].split(".")[:2])) < (3, 11):
            raise Unusable(f"{python} is {facts['implementation']} {facts['version']}: CPython 3.11 or later is needed")
        if facts["status"] is None:
            if not os.path.exists(os.path.join(PACKAGE, f"_perf_trampoline{facts['suffix']}")):
                have = ", ".join(sorted(re.findall(r"_perf_trampoline(\.\S+?\.so)", " ".join(os.listdir(PACKAGE)))))
                raise Unusable(
                    f"{python} (CPython {facts['version']}) has no perf_trampoline, and the extension here ({have}) does "
                    f"not fit it ({facts['suffix']}): install perf-trampoline for that interpreter")
            self.injected = True
            facts, said = _probe(found, _environment("perf_elf", True, directory))
            if facts["status"] is None:
                raise Unusable(f"perf_trampoline does not start in {python}: "
                               f"{said.splitlines()[-1] if said else 'it ignores PYTHONPATH'}")
        self.facts = facts
        if reason := facts["status"]["unavailable"]:
            raise Unusable(f"{python}: no perf trampoline: {reason}")
        # Past any starting script: perf 6.1 may unwind with the C library of the shell that ran it.
        self.executable = facts["executable"] if _is_script(found) else found
        self._note("perf_elf", facts, said)

    def _note(self, backend, facts, said):
        if not facts["status"]["active"]:
            self.failures[backend] = facts["status"]["failure"] or said.split("\n")[-1] or "it is not active"
        self._tried[backend] = backend not in self.failures

    def works(self, backend):
        """Can its files be made?  By trial."""
        if backend not in self._tried:
            self._note(backend, *_probe(self.executable, self.environment(backend)))
        return self._tried[backend]

    def environment(self, backend):
        return _environment(backend, self.injected, self.directory)

    def claims_frame_pointers(self):
        """Does its build say so?  It may be wrong: trial() knows."""
        flags = re.findall(r"-f(?:no-)?omit-frame-pointer|-mbackchain", self.facts["flags"])
        # Compilers keep them by default there.
        return flags[-1:] not in ([], ["-fomit-frame-pointer"]) or self.facts["architecture"] in ("aarch64", "ppc64le")

    def trial(self, backend, call_graph, perf=("perf",), event=perf_script.EVENT, seconds=0.3):
        """Record a known program; return (samples, share of them with their whole Python stack)."""
        with tempfile.TemporaryDirectory(prefix="python-trial-") as scratch:
            data = os.path.join(scratch, "perf.data")
            script = os.path.join(scratch, "trial.py")
            with open(script, "w", encoding="utf-8") as file:
                file.write(_TRIAL % seconds)
            out = perf_script.record([self.executable, script], data, perf=perf, event=event, call_graph=call_graph,
                                     freq=500, env=self.environment(backend))
            if backend == "perf_jit":
                data = perf_script.inject(data, perf)
            start, end = map(int, out.split())
            number = whole = 0
            pids = set()
            for sample in perf_script.samples(data, perf):
                pids.add(sample.pid)
                if start <= sample.time_ns <= end:
                    number += 1
                    frames, _ = perf_script.walk(sample.stack)
                    names = [named[0] for frame in reversed(frames) if (named := perf_script.python_name(frame))]
                    whole += names in (EXPECTED, EXPECTED[:-2])
        from perf_trampoline import _clean
        _clean.remove_of(pids)
        return number, whole / max(number, 1)


def _is_script(path):
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def command_line(command, env):
    """A command as one would type it, with what its environment has and ours has not."""
    changes = [f"{name}={shlex.quote(value)}" for name, value in env.items() if os.environ.get(name) != value]
    unset = [f"-u {name}" for name in os.environ if name not in env]
    return " ".join([*(["env", *unset] if unset else []), *changes, shlex.join(map(str, command))])
