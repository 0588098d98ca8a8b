"""perf-trampoline doctor: what works here, what does not, and the cure."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

from perf_trampoline import _interpreter, _record, _terminal, images, perf_script

OK, NOTE, PROBLEM = "ok", "note", "problem"
LEAST_FREE = 8 << 20        # an image of the largest kind and a short recording
PERFMON, SYS_ADMIN = 38, 21     # capability numbers, linux/capability.h


def add_arguments(parser):
    parser.description += ("  Ends with a trial: a known program is recorded and its stacks are looked at.  Exit status "
                           "0 if Python can be profiled here, else 1.")
    parser.add_argument("--python", metavar="PYTHON", default=sys.executable, help="interpreter to look at (default: this one)")
    parser.add_argument("--perf", default="perf", help="the perf to use")
    parser.add_argument("--images", metavar="DIR", help="directory for ELF images (default: /tmp/python-perf-UID)")
    parser.add_argument("--pid", "-p", type=int, help="a running process, for instance a service, to look at as well")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--proc", default="/proc", help="where the kernel's settings are read (%(default)s)")


class Doctor:

    def __init__(self, options):
        self.options, self.perf, self.findings = options, [options.perf], []

    def find(self, status, topic, text, cure=None):
        self.findings.append({"status": status, "topic": topic, "text": text, "cure": cure})

    def examine(self):
        python = self.interpreter()
        works = self.profiler()
        works = self.kernel(works)
        self.directories()
        self.namespaces()
        if self.options.pid:
            self.process(self.options.pid)
        if python and works:
            self.trial(python)
        return not any(finding["status"] == PROBLEM for finding in self.findings)

    def interpreter(self):
        try:
            python = _interpreter.Interpreter(self.options.python, self.options.images)
        except _interpreter.Unusable as error:
            cure = "choose another interpreter with --python: CPython 3.11 or later that perf-trampoline was built for"
            if "no perf trampoline" in str(error):
                cure = "there is nothing to set: README.rst lists the architectures; configure says why it is off in a build"
            self.find(PROBLEM, "interpreter", str(error), cure)
            return None
        facts = python.facts
        self.find(OK, "interpreter", f"CPython {facts['version']}{' free-threaded' if facts['free_threaded'] else ''}, "
                  f"{facts['architecture']}, {python.executable}"
                  + (", perf_trampoline comes in through PYTHONPATH" if python.injected else ""))
        if python.claims_frame_pointers():
            self.find(OK, "frames", "built with frame pointers: stacks are cheap (--call-graph fp)")
        else:
            self.find(NOTE, "frames", "built without frame pointers: perf copies 32 KiB of stack with each sample "
                                      "(--call-graph dwarf,32768)")
        return python

    def profiler(self):
        """Is there a perf, and what can it do?"""
        if not shutil.which(self.options.perf):
            self.find(PROBLEM, "perf", f"{self.options.perf} was not found in PATH",
                      "install perf (Debian: apt install linux-perf; Ubuntu: linux-tools-$(uname -r)), or name it with --perf")
            return False
        done = subprocess.run([*self.perf, "version"], capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL)
        version = re.search(r"perf version (\S+)", done.stdout)
        if done.returncode or not version:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
            self.find(PROBLEM, "perf", f"{shutil.which(self.options.perf)} is no perf that runs: it says: {said}",
                      "install the perf of this kernel or distribution, or name another with --perf")
            return False
        features = perf_script.features(self.perf)
        unwinders = sorted(perf_script.unwinders(self.perf))
        self.find(OK, "perf", f"{version[1]}, unwinds with {' or '.join(unwinders) or 'nothing'}"
                              f"{'' if 'zstd' in features else ', does not compress'}")
        if not unwinders:
            self.find(NOTE, "perf", "has no DWARF unwinder: interpreters without frame pointers give no stacks",
                      "use a perf built with libunwind or libdw (every distribution's is)")
        return True

    def _setting(self, name):
        try:
            with open(os.path.join(self.options.proc, "sys/kernel", name), encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    @staticmethod
    def _status(pid, field, default):
        """The words of a field of /proc/PID/status."""
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            found = re.search(rf"(?m)^{field}:\s*(.*)", file.read())
        return found[1].split() if found else [default]

    def kernel(self, has_perf):
        """Does it let this user's perf count?  Only a perf can tell."""
        paranoid = self._setting("perf_event_paranoid")
        if paranoid is None:
            self.find(PROBLEM, "kernel", f"{self.options.proc}/sys/kernel/perf_event_paranoid is missing: "
                      "no perf events (CONFIG_PERF_EVENTS), or a container that hides them",
                      "use a kernel with perf events, or profile from outside the container")
            return False
        if not has_perf:
            return False
        capable = bool(int(self._status("self", "CapEff", "0")[0], 16) & (1 << PERFMON | 1 << SYS_ADMIN))
        try:
            self.event = event = _record._event(self.perf)
        except perf_script.PerfError as error:
            seccomp = self._status("self", "Seccomp", "0") == ["2"]
            if paranoid > 2 and not (capable and not seccomp):
                self.find(PROBLEM, "kernel", f"kernel.perf_event_paranoid is {paranoid}: users may not profile",
                          "as root: sysctl kernel.perf_event_paranoid=2 (1 to see the kernel's part as well), or give perf "
                          "the capability CAP_PERFMON")
            elif seccomp:
                self.find(PROBLEM, "kernel", "a seccomp filter is on (a container's or a service's) and perf_event_open "
                                             f"does not work: {error}",
                          "start the container with --cap-add PERFMON and a seccomp profile that allows perf_event_open "
                          "(docker: --security-opt seccomp=unconfined), or profile from outside")
            else:
                self.find(PROBLEM, "kernel", f"perf cannot count events: {error}",
                          "run perf record true by hand to see all it says")
            return False
        self.find(OK, "kernel", f"perf_event_paranoid {paranoid}, event {event}, "
                  f"{'user and kernel' if not event.endswith(':u') else 'user code only'}, "
                  f"at most {self._setting('perf_event_max_sample_rate') or 'any number of'} samples a second")
        if event.endswith(":u"):
            self.find(NOTE, "kernel", "time in the kernel is not seen",
                      "as root: sysctl kernel.perf_event_paranoid=1, or CAP_PERFMON for perf")
        elif self._setting("kptr_restrict"):
            self.find(NOTE, "kernel", "the kernel's functions may have no names (kptr_restrict is on)",
                      "as root: sysctl kernel.kptr_restrict=0")
        return True

    def directories(self):
        usable = 0
        chosen = [self.options.images] if self.options.images else images.directories()
        for place in chosen:
            fault, cure = self.directory_fault(place)
            if not fault:
                self.find(OK, "directory", f"{place}: ELF images can be made and run")
                usable = 1
                break
            self.find(PROBLEM if place == chosen[-1] else NOTE, "directory", f"{place}: {fault}", cure)
        fault, cure = self.directory_fault("/tmp", executable=False)
        if fault:
            self.find(NOTE if usable else PROBLEM, "directory", f"/tmp, for maps and dumps: {fault}", cure)
        if not os.access(".", os.W_OK):
            self.find(NOTE, "directory", "perf.data cannot be written here", "go elsewhere, or record -o FILE")

    @staticmethod
    def directory_fault(place, executable=True):
        """Why it cannot be used, and the cure; None, None if it can."""
        there = place
        while not os.path.exists(there):
            there = os.path.dirname(there) or "."
        if place != there and not os.path.isdir(there) or not os.path.isdir(there):
            return f"{there} is no directory", "choose another with PERF_TRAMPOLINE_DIR or --images"
        state = os.statvfs(there)
        if state.f_flag & os.ST_RDONLY:
            return "its file system is read-only", "choose another with PERF_TRAMPOLINE_DIR or --images"
        if executable and state.f_flag & os.ST_NOEXEC:
            return ("its file system is mounted noexec", "choose one that is not, with PERF_TRAMPOLINE_DIR or --images, "
                                                         "or mount -o remount,exec")
        if not os.access(there, os.W_OK | os.X_OK):
            return f"{there} is not writable for this user", "choose another with PERF_TRAMPOLINE_DIR or --images"
        if there == place and executable and os.stat(place).st_uid not in (os.geteuid(), 0):
            return "it is another user's", "choose another with PERF_TRAMPOLINE_DIR or --images"
        if state.f_bavail * state.f_frsize < LEAST_FREE or state.f_files and not state.f_favail:
            return ("its file system is full", "make room (perf-trampoline clean removes old recordings' files), or choose "
                                               "another with PERF_TRAMPOLINE_DIR or --images")
        return None, None

    def namespaces(self):
        if len(self._status("self", "NSpid", "self")) > 1 or os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
            self.find(NOTE, "container", "this is a container: a perf outside sees other process numbers and another /tmp",
                      "run record inside; or mount one directory at the same path in both, name it with "
                      "PERF_TRAMPOLINE_DIR, and run perf outside")

    def process(self, pid):
        """A running process: does a perf out here see what it writes?"""
        try:
            owner = os.stat(f"/proc/{pid}").st_uid
            program = os.readlink(f"/proc/{pid}/exe")
            outside, inside = (os.stat(path) for path in ("/tmp", f"/proc/{pid}/root/tmp"))
            pids = self._status(pid, "NSpid", pid)
        except FileNotFoundError:
            self.find(PROBLEM, "process", f"there is no process {pid}", "look its number up with pgrep")
            return
        except PermissionError:
            self.find(PROBLEM, "process", f"process {pid} is another user's", "run this as that user or as root")
            return
        problems = len(self.findings)
        if (outside.st_dev, outside.st_ino) != (inside.st_dev, inside.st_ino):
            self.find(PROBLEM, "process", f"process {pid} has a /tmp of its own (PrivateTmp of systemd, or a container): "
                                          "its maps, dumps and images are not in the /tmp of perf",
                      "give it a directory that both see, Environment=PERF_TRAMPOLINE_DIR=/var/cache/NAME, or PrivateTmp=no")
        if len(pids) > 1:
            self.find(NOTE, "process", f"process {pid} calls itself {pids[-1]}: it is in a pid namespace",
                      "use ELF images (perf_elf): their names do not depend on the process number")
        try:
            if self._status(pid, "Seccomp", "0") == ["2"]:
                self.find(NOTE, "process", f"process {pid} runs under a seccomp filter",
                          "if names are missing: it must be allowed to mmap files with PROT_EXEC")
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                mapped = maps.read()
        except OSError:
            mapped = ""
        active = re.search(r"/\d+-\d+-[0-9a-f]+\.so|/jit-\d+\.dump|_perf_trampoline\.", mapped)
        if len(self.findings) == problems:
            self.find(OK, "process", f"{pid}: {program}, uid {owner}, trampolines {'on' if active else 'off'}")

    def trial(self, python):
        defaults = {"call_graph": None, "backend": None}
        try:
            call_graph, backend, notes = _record._choose(
                type("Options", (), defaults), python, self.perf, self.event)
            for note in notes:
                self.find(NOTE, "choice", note)
            number, whole = python.trial(backend, call_graph, self.perf, self.event)
        except (_interpreter.Unusable, perf_script.PerfError, OSError, ValueError) as error:
            self.find(PROBLEM, "trial", f"a known program could not be recorded: {error}", "cure what is said above first")
            return
        text = (f"{number} samples of a known program with {backend} and --call-graph {call_graph}: "
                f"{whole:.1%} of the stacks are whole")
        if number < 30:
            self.find(PROBLEM, "trial", text + ", too few to judge", "see that the machine is not overloaded, and try again")
        elif whole < _interpreter.WHOLE:
            self.find(PROBLEM, "trial", text, "try another --perf (its unwinder may be at fault), "
                      + ("or --call-graph dwarf,65528" if call_graph != "fp" else "or record --call-graph dwarf,32768"))
        else:
            self.find(OK, "trial", text)


def run(options):
    doctor = Doctor(options)
    with _terminal.Progress("looking ...") as progress:
        progress(0)
        good = doctor.examine()
    if options.json:
        print(json.dumps({"ok": good, "findings": doctor.findings}, indent=1))
        return 0 if good else 1
    paint = _terminal.painter(sys.stdout)
    columns = _terminal.width(sys.stdout) and max(_terminal.width(sys.stdout), 60)
    styles = {OK: "good", NOTE: "native", PROBLEM: "bad"}
    margin = " " * 22
    for finding in doctor.findings:
        text = finding["text"] + (f"\ncure: {finding['cure']}" if finding["cure"] else "")
        wrap = textwrap.TextWrapper(columns - len(margin), break_on_hyphens=False).wrap if columns else lambda part: [part]
        lines = [line for part in text.split("\n") for line in wrap(part)]
        print(paint(styles[finding["status"]], f"{finding['status']:8}"), f"{finding['topic']:12}", lines[0])
        for line in lines[1:]:
            print(margin + line)
    print("\nPython can be profiled here." if good else "\nNot everything works here: see the problems above.")
    return 0 if good else 1
