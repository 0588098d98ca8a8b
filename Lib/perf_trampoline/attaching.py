"""Switch the trampolines of a running process on and off.

    python -m perf_trampoline attach PID
    perf record -p PID --call-graph dwarf,32768

CPython 3.14 and later run a script that they are sent (sys.remote_exec); for older ones gdb has a call queued.  Either way
our code runs in a thread of its own, while the main thread waits where it may run any Python code.  Functions that exist
are named at once.  Frames under way have no trampoline until their function is called again.
"""

import ast
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import perf_trampoline


class AttachError(RuntimeError):
    """Nothing was changed, or the process said why it did not do as it was told.  One sentence."""


def attach(pid, backend="perf_elf", *, filter=None, existing=True, timeout=10):
    """Switch the trampoline of process *pid* on; return its status, and in "named" how many functions have names.

    *filter* is as for activate(); with *existing* functions that exist are named at once, else at their next call.
    AttachError: it may not or cannot be, or it has not run Python code for *timeout* seconds. From 3.14 on that
    is code of the main thread; before, of any if the main thread waits.
    """
    if backend not in perf_trampoline.BACKENDS:
        raise ValueError(f"invalid backend: {backend}")
    return _send(pid, {"backend": backend, "filter": filter, "existing": existing}, timeout)


def detach(pid, *, timeout=10):
    """Switch the trampoline of process *pid* off; return its status.  AttachError as for attach()."""
    return _send(pid, {"backend": None}, timeout)


# --- What kind of process it is ---

class _Target:
    pid: int
    uid: int            # whose rights it has
    gid: int
    program: str        # the file that holds CPython, as the process names it
    base: int           # where that begins in memory
    command: list       # starts the same interpreter again; None when CPython is embedded in another program
    version: tuple
    suffix: str         # of its extension modules
    package: str        # the directory of a perf_trampoline that fits

    def __init__(self, pid):
        self.pid = pid
        self.proc = f"/proc/{pid}"
        self._look_at_rights()
        self._find_program()
        self._ask_interpreter()
        self._find_package()

    def _look_at_rights(self):
        try:
            lines = Path(self.proc, "status").read_text(errors="replace").splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        except OSError:
            raise AttachError(f"there is no process {self.pid}") from None
        self.uid, self.gid = int(status["Uid"].split()[1]), int(status["Gid"].split()[1])
        if self.pid == os.getpid():
            raise AttachError("this is the process itself: use perf_trampoline.activate()")
        if status["State"][0] in "ZXTt":
            raise AttachError(f"process {self.pid} is {status['State'][3:-1]}")
        if os.geteuid() not in (0, self.uid):
            raise AttachError(f"process {self.pid} is another user's: attach as that user or as root")
        try:
            self._same_pids = os.readlink(f"{self.proc}/ns/pid") == os.readlink("/proc/self/ns/pid")
            open(f"{self.proc}/mem", "rb").close()      # asks the kernel what a debugger asks it
            environment = os.fsdecode(Path(self.proc, "environ").read_bytes()).split("\0")
            self.environment = dict(item.split("=", 1) for item in environment if "=" in item)
            self.arguments = os.fsdecode(Path(self.proc, "cmdline").read_bytes()).split("\0")[:-1]
        except OSError:
            raise AttachError(f"the kernel does not let this user attach to process {self.pid}{_why_not()}") from None
        if not self._same_pids:
            raise AttachError(f"process {self.pid} has process numbers of its own: attach from inside its container")
        if status["TracerPid"] != "0":
            raise AttachError(f"process {self.pid} is being debugged by process {status['TracerPid']}")
        if self.environment.get("PYTHON_DISABLE_REMOTE_DEBUG") or any(
                b == "disable-remote-debug" and a == "-X" or b == "-Xdisable-remote-debug"
                for a, b in zip(["", *self.arguments], self.arguments)):
            raise AttachError(f"process {self.pid} was started with PYTHON_DISABLE_REMOTE_DEBUG or -X disable-remote-debug")

    def _find_program(self):
        exe = os.readlink(f"{self.proc}/exe")
        files = {}
        with open(f"{self.proc}/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(None, 5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    files.setdefault(fields[5], int(fields[0].partition("-")[0], 16))
        self.mapped = files
        for path, base in files.items():
            if path == exe or "python" in os.path.basename(path):
                try:
                    with open(f"{self.proc}/root{path}", "rb") as file:
                        if b"\0Py_AddPendingCall\0" in file.read():
                            self.program, self.base = path, base
                            break
                except OSError:
                    continue
        else:
            if exe.endswith(" (deleted)"):
                raise AttachError(f"the program of process {self.pid} is no longer on disk: restart the process")
            raise AttachError(f"process {self.pid} is not a CPython whose symbols can be seen ({os.path.basename(exe)})")
        # A virtual environment is found by the name that the interpreter was started with.  Where the loader was called
        # by name the interpreter is one of its arguments.
        self.has_loader = exe != self.program and os.path.basename(exe).startswith("ld")
        wanted = self.program if self.has_loader else exe
        place = next((i for i, argument in enumerate(self.arguments) if self._is(argument, wanted)), None)
        if self.has_loader:
            self.command = None if place is None else [exe, *self.arguments[1:place + 1]]
        else:
            self.command = [exe if place is None else self._path(self.arguments[place])]

    def _path(self, argument):
        return argument if os.path.isabs(argument) else f"{os.readlink(f'{self.proc}/cwd')}/{argument}"

    def _is(self, argument, path):
        try:
            return "/" in argument and os.path.samefile(f"{self.proc}/root{self._path(argument)}", f"{self.proc}/root{path}")
        except OSError:
            return False

    def bias(self):
        """What is added to the addresses in the program's file: where its first segment is, less where it asks to be."""
        with open(f"{self.proc}/root{self.program}", "rb") as file:
            header = file.read(64)
            order = {b"\x7fELF\2\1": "<", b"\x7fELF\2\2": ">"}.get(header[:6])
            try:
                start, size, count = struct.unpack_from(f"{order}Q14xHH", header, 32)
                file.seek(start)
                for _ in range(count if size == 56 else 0):
                    kind, _, offset, address = struct.unpack_from(f"{order}IIQQ", file.read(size))
                    if kind == 1 and offset == 0:
                        return self.base - address
            except (struct.error, ValueError, OSError):
                pass
        raise AttachError(f"{self.program} is no ELF program with a first segment")

    def run(self, source, *arguments, timeout=30):
        """Run the same interpreter with the rights of the process, as its files may be that user's.  None: it fails."""
        kept = "PYTHONPATH", "PYTHONUSERBASE", "PYTHONHOME", "HOME", "LD_LIBRARY_PATH", "PATH"
        rights = {} if os.geteuid() == self.uid else {"user": self.uid, "group": self.gid, "extra_groups": ()}
        try:
            return subprocess.run([*self.command, "-c", source, *map(str, arguments)], text=True, timeout=timeout, cwd="/",
                                  stdin=subprocess.DEVNULL, capture_output=True, **rights,
                                  env={name: value for name, value in self.environment.items() if name in kept})
        except (OSError, subprocess.SubprocessError):
            return None

    def _ask_interpreter(self):
        done = self.command and self.run(_DESCRIBE)
        self.found = None
        match _literal(done.stdout if done and done.returncode == 0 else ""):
            case str(name), (int(), int()) as version, str(suffix), str() | None as found:
                self.version, self.suffix, self.found = version, suffix, found
                if name != "cpython":
                    raise AttachError(f"process {self.pid} is not a CPython but {name}")
            case _:     # embedded in a program that is no interpreter
                self.command = None
        if self.command is None:
            match = re.search(r"python(3)\.(\d+)(t?)", os.path.basename(self.program))
            if match is None:
                raise AttachError(f"the version of CPython in process {self.pid} cannot be found out")
            self.version = int(match[1]), int(match[2])
            self.suffix = f".cpython-{match[1]}{match[2]}{match[3]}-{sys.implementation._multiarch}.so"
        if self.version < (3, 11):
            version = ".".join(map(str, self.version))
            raise AttachError(f"process {self.pid} runs Python {version}: trampolines need 3.11 or later")

    def _find_package(self):
        extension = f"_perf_trampoline{self.suffix}"
        loaded = [os.path.dirname(path) for path in self.mapped if os.path.basename(path) == extension]
        for directory in [*loaded, self.found, os.path.dirname(os.path.abspath(__file__))]:
            if directory and os.path.exists(f"{self.proc}/root{directory}/{extension}"):
                self.package = directory
                self.extension = f"{directory}/{extension}"
                return
        raise AttachError(
            f"process {self.pid} runs Python {'.'.join(map(str, self.version))} and finds no perf_trampoline built for it "
            f"({extension}): install one there")


_DESCRIBE = """
import sys, _imp, importlib.util
try: found = importlib.util.find_spec("perf_trampoline").submodule_search_locations[0]
except Exception: found = None
print((sys.implementation.name, sys.version_info[:2], _imp.extension_suffixes()[0], found))
"""


def _why_not():
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope == 3:
        return ": kernel.yama.ptrace_scope is 3, which lets nobody"
    if scope:
        return f": kernel.yama.ptrace_scope is {scope}, so attach as root"
    return ": it may have more rights than this user, or be in a sandbox"


# --- What it is told, and how ---

# Modules of the process are not looked up by name: it may have another package of that name in its path.
_TEXT = """
import sys
import _frozen_importlib as loading, _frozen_importlib_external as files
name = "perf_trampoline"
try:
    if name not in sys.modules:
        spec = files.spec_from_file_location(name, {package!r} + "/__init__.py", submodule_search_locations=[{package!r}])
        sys.modules[name] = loading.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    from perf_trampoline import inside
    inside.act({request!r}, {reply!r})
except BaseException:
    if not hasattr(sys.modules.get(name), "status"): sys.modules.pop(name, None)
"""

# sys.remote_exec() has this run in the main thread, as a signal handler is run.  The program's own handlers run in it,
# after any call, and may raise: that is theirs, and raised again when the script is over.
_SCRIPT = """
core, text, theirs = None, {text!r}, []
while True:
    try:
        if core is None:
            import _imp
            class spec: name, origin, loader = "perf_trampoline._perf_trampoline", {extension!r}, None
            core = _imp.create_dynamic(spec)
            _imp.exec_dynamic(core)
        if text:
            send, text = text, None
            core.run(send)
        break
    except ImportError as error:
        if error.path == {extension!r}: break
        theirs += [error]
    except BaseException as error:
        theirs += [error]
for error in theirs: core and core.raise_later(error)
"""

_LATE = "import posix\nposix.unlink({script!r})\nposix.rmdir({directory!r})\n"


def _send(pid, request, timeout):
    pid = int(pid)
    started = not _has_ended(pid)
    try:
        return _exchange(_Target(pid), request, timeout)
    except (AttachError, OSError) as error:
        if started and _has_ended(pid):
            raise AttachError(f"process {pid} has ended") from None
        if isinstance(error, OSError):
            raise AttachError(f"process {pid}: {error}") from None
        raise


def _exchange(target, request, timeout):
    # The process may have another /tmp, and end at any time: its directory is held open.
    held = os.open(f"{target.proc}/root/tmp", os.O_PATH | os.O_DIRECTORY)
    outer = Path(tempfile.mkdtemp(prefix="python-attach-", dir=f"/proc/self/fd/{held}"))
    inner = f"/tmp/{outer.name}"
    keep = False
    try:
        reply = outer / "reply"
        text = _TEXT.format(package=target.package, request=request, reply=f"{inner}/reply")
        if target.version >= (3, 14) and (target.command or sys.version_info[:2] == target.version):
            script = outer / "script.py"
            script.write_text(_SCRIPT.format(extension=target.extension, text=text), "utf-8", "surrogateescape")
            _give(target, outer, script)
            # A handler of the program's that raises as the script begins takes its place: it is asked again.
            end, keep = time.monotonic() + timeout, True
            while keep and time.monotonic() < end:
                _by_remote_exec(target, f"{inner}/script.py", timeout)
                keep = not _wait(target, reply, min(timeout, 2))
            if keep:        # it runs a script that it has been told of; one that is not there would be an error of its own
                draft = outer / "late"
                draft.write_text(_LATE.format(script=f"{inner}/script.py", directory=inner))
                _give(target, draft)
                draft.rename(script)
        else:
            _give(target, outer)
            _by_gdb(target, text, timeout)
            keep = False
            _wait(target, reply, timeout)
        answer = _read(target, reply)
    finally:
        if not keep:
            shutil.rmtree(outer, ignore_errors=True)
        os.close(held)
    if answer is None:
        raise AttachError(f"process {target.pid} has not answered for {timeout:g} seconds; nothing was changed, unless it "
                          "answers later")
    return answer["status"] | {"named": answer["named"]}


def _has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in b"ZX"
    except OSError:
        return True


def _give(target, *paths):
    for path in paths:
        os.chmod(path, 0o700 if path.is_dir() else 0o600)
        if os.geteuid() != target.uid:
            os.chown(path, target.uid, target.gid)


def _wait(target, reply, timeout):
    end = time.monotonic() + timeout
    while not reply.exists():
        if time.monotonic() > end:
            return False
        if _has_ended(target.pid):
            raise AttachError(f"process {target.pid} has ended")
        time.sleep(0.005)
    return True


def _literal(text):
    """What another process wrote as a Python literal; None if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _read(target, reply):
    try:
        descriptor = os.open(reply, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        answer = _literal(file.read(1 << 20).decode(errors="replace"))
    match answer:
        case {"error": str(error)} if error:
            raise AttachError(f"process {target.pid}: {error}")
        case {"error": None, "named": int(), "status": {"backend": str() | None}}:
            return answer
    raise AttachError(f"process {target.pid} has answered what cannot be read")


def _by_remote_exec(target, script, timeout):
    source = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
    if sys.version_info[:2] == target.version and hasattr(sys, "remote_exec"):
        try:
            return sys.remote_exec(target.pid, script)
        except Exception as error:
            problem = str(error)
    else:
        done = target.run(source, target.pid, script)
        if done is not None and done.returncode == 0:
            return
        problem = "its interpreter cannot be started" if done is None else (done.stderr.strip() or "?").splitlines()[-1]
    raise AttachError(f"sys.remote_exec() for process {target.pid}: {problem}")


# Nothing is run that lies about; the process stands still while gdb reads symbols, so it reads no more than it must.
_GDB_SETTINGS = [word for setting in ("auto-load off", "debuginfod enabled off", "debug-file-directory /nonexistent",
                                      "libthread-db-search-path /nonexistent") for word in ("-iex", f"set {setting}")]


def _by_gdb(target, text, timeout, tries=5):
    gdb = shutil.which("gdb")
    version = ".".join(map(str, target.version))
    if gdb is None:
        raise AttachError(f"process {target.pid} runs Python {version}, which needs gdb to attach: install gdb")
    here = os.path.dirname(os.path.abspath(__file__))
    bias = target.bias() if target.has_loader else None
    gdbs_end, our_end = os.pipe()
    waiting = open(our_end, "wb")       # gdb sees when it is closed, or we die
    arguments = (target.program, bias, target.version, target.extension, text, timeout, gdbs_end)
    process = subprocess.Popen(
        [gdb, "-nx", "-q", "-batch", *_GDB_SETTINGS, "-p", str(target.pid), "-x", f"{here}/inside_gdb.py",
         "-ex", f"python main(*{arguments!r})"],
        text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, pass_fds=[gdbs_end], env=os.environ | {"LC_ALL": "C.UTF-8"})
    os.close(gdbs_end)
    interrupted = None
    while True:
        try:
            out, err = process.communicate()
            break
        except KeyboardInterrupt as error:      # gdb has a breakpoint to take out
            interrupted = error
            waiting.close()
    waiting.close()
    if interrupted:
        raise interrupted
    verdict = re.findall(r"^perf_trampoline: (.*)$", out, re.MULTILINE)
    if verdict[-1:] == ["busy"] and tries > 1:
        return _by_gdb(target, text, timeout, tries - 1)
    if verdict[-1:] != ["ok"]:
        reason = verdict[-1] if verdict else f"gdb failed: {(err.strip() or '?').splitlines()[-1]}"
        raise AttachError(f"process {target.pid}: {reason}")


# --- The command line ---

def add_arguments(commands):
    """Add `attach` and `detach` to the sub-parsers of the package's command line."""
    for command, description in (("attach", "switch the trampolines of a running process on"), ("detach", "... off")):
        parser = commands.add_parser(command, help=description)
        parser.add_argument("pid", type=int)
        parser.add_argument("--timeout", type=float, default=10, help="seconds in which it must come to run Python code")
        if command == "attach":
            parser.add_argument("--backend", choices=perf_trampoline.BACKENDS, default="perf_elf")
            parser.add_argument("--filter", help="which functions to name, as in PERF_TRAMPOLINE_FILTER")
            parser.add_argument("--no-existing", action="store_true", help="name functions at their next call only")


def main(options):
    try:
        if options.command == "detach":
            detach(options.pid, timeout=options.timeout)
            print(f"process {options.pid}: off")
        else:
            status = attach(options.pid, options.backend, filter=options.filter, existing=not options.no_existing,
                            timeout=options.timeout)
            print(f"process {options.pid}: {status['backend']} is on, {status['named']} functions have names")
    except AttachError as error:
        sys.exit(f"perf trampoline: {error}")
