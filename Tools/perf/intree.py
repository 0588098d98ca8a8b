#!/usr/bin/env python3
"""CPython's own source tree with the core in it, built once into the cache.

    intree.py [plain | native | nogil | tsan | bare | ARCH]...     build, and print the interpreter's path

plain is without the overlay, to compare with; tsan is nogil with ThreadSanitizer; bare is made with no other Python on
PATH; ARCH is a cross build that runs under qemu-user.  The source is that of Debian's python3.13.  Beside the
interpreter is `python-status`, the same with the extension's module built in, so that tests can ask for
perf_trampoline.status().
"""
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import archs
import overlay
import roots

SUITE, VERSION = "trixie", "3.13"
QUICK = "OPT=-DNDEBUG -fwrapv -O1"      # and without what debuggers want: built in half the time
OPTIONS = {"nogil": ["--disable-gil", QUICK], "tsan": ["--disable-gil", "--with-thread-sanitizer", QUICK]}


@dataclass(frozen=True)
class Build:
    source: Path
    build: Path
    env: dict
    arch: archs.Arch = None     # whose programs run under an emulator
    root: Path = None           # with its C library

    def command(self, program="python"):
        path = self.build / program
        return roots.command(self.root, self.arch, path) if self.arch else [str(path)]

    def run(self, *arguments, program="python", before=(), **options):
        """A subprocess.CompletedProcess, with text output of both kinds in `stdout`; `before` is what runs the command."""
        return subprocess.run([*before, *self.command(program), *map(str, arguments)], text=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              **{"env": self.env, "cwd": self.build} | options)

    def install(self, into):
        """What it takes to run it elsewhere, without tests."""
        library = into / f"lib/python{VERSION}"
        shutil.copytree(self.source / "Lib", library, ignore=shutil.ignore_patterns(
            "test", "tests", "__pycache__", "idlelib", "ensurepip", "pydoc_data", "tkinter", "turtledemo"))
        (library / "lib-dynload").mkdir()
        for module in self.build.glob("build/lib.*/*.so"):
            shutil.copy(module, library / "lib-dynload")
        (into / "bin").mkdir()
        shutil.copy(self.build / "python", into / "bin")


def build(kind="native"):
    """Return the Build of this kind, making it or bringing it up to date.  Raises roots.Unavailable."""
    arch = archs.load().get(kind)
    checkout = hashlib.sha256(str(overlay.ROOT).encode()).hexdigest()[:12]
    home = roots.cache() / "intree" / ("plain" if kind == "plain" else f"{checkout}/{kind}")
    original = roots.source(SUITE, f"python{VERSION}")
    home.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("PYTHON", "MAKE", "PERF_", "LD_")) and not name.endswith("FLAGS")}
    # Names of files are relative and the same in all builds, so ccache knows most of them from another one.
    env |= {"CCACHE_NOHASHDIR": "1", "CCACHE_DIR": str(roots.cache() / "ccache"), "LC_ALL": "C.UTF-8"}
    if not arch:
        # perf gives up a program whose debug information is large, on a machine that has much to do.  Debian's Makefile
        # does not say again what configure was told.
        env["LDFLAGS"] = "-Wl,--strip-debug" + " -fsanitize=thread" * (kind == "tsan")
    else:
        env["LDFLAGS"] = f"-L{_archives(home / 'archives', arch)}"
    if kind == "bare":
        env["PATH"] = str(_without_python(home / "bin"))
    if not arch and kind != "native":
        env["CONFIG_SITE"] = str(_known(roots.cache() / f"intree/{checkout}/native/build/config.log", home / "site"))
    result = Build(home / "source", home / "build", env, arch, arch and roots.python(VERSION, arch=arch.name).root)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "source").exists():
            shutil.rmtree(home / "draft", ignore_errors=True)
            shutil.copytree(original, home / "draft", symlinks=True,
                            ignore=shutil.ignore_patterns("debian", ".pc", "__pycache__"))
            (home / "draft").rename(home / "source")
        # The tree's own date stays when nothing changes, so make has nothing to do either.
        if kind != "plain":
            _run([sys.executable, Path(overlay.__file__), "apply", home / "source"], home, env)
        result.build.mkdir(exist_ok=True)
        if not (result.build / "Makefile").exists():
            _run(_configure(kind, arch, env), result.build, env)
        _run(["make", "-s", f"-j{os.cpu_count()}", *(["build_all"] if not arch else [])], result.build, env)
        if kind != "plain":
            _link_status(result, arch)
    return result


def _without_python(into):
    """Links to all programs but Pythons."""
    into.mkdir(exist_ok=True)
    for folder in "/usr/bin", "/usr/sbin":
        for program in Path(folder).iterdir():
            if not program.name.startswith(("python", "pypy")) and not (into / program.name).is_symlink():
                (into / program.name).symlink_to(program)
    return into


def _archives(into, arch):
    """The foreign root has no libatomic.so, which some processors want: where the archive is found first, that is taken."""
    into.mkdir(exist_ok=True)
    (into / "libatomic.a").unlink(missing_ok=True)
    (into / "libatomic.a").symlink_to(_run([_compiler(arch)[-1], "-print-file-name=libatomic.a"], into, os.environ).strip())
    return into


def _known(log, site):
    """What configure found out about this machine for another build; it takes the longest."""
    text = log.read_text(errors="replace") if log.exists() else ""
    site.write_text("".join(re.findall(r"(?m)^(?:ac_cv_(?!env_|prog_|path_)|ax_cv_|py_cv_(?!module_))\w+=.*\n", text)))
    return site


def _run(command, cwd, env):
    done = subprocess.run(["nice", *map(str, command)], cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (Path(cwd) / "last.log").write_text(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed in {cwd}:\n{done.stdout[-3000:]}")
    return done.stdout


def _compiler(arch):
    return [*(["ccache"] if shutil.which("ccache") else []), f"{arch.prefix if arch else ''}gcc"]


def _configure(kind, arch, env):
    command = ["../source/configure", "-q", "--without-ensurepip", f"CC={' '.join(_compiler(arch))}"]
    command += OPTIONS.get(kind, [])
    if not arch:
        host = archs.host()
        return [*command, f"CFLAGS={' '.join(host.chain_cflags) if host else ''}"]
    # Of the foreign root only the C library is used, and no module that wants another, or is large and not asked for.
    missing = [f"py_cv_module_{name}=n/a" for name in
               ("_bz2", "_codecs_cn", "_codecs_hk", "_codecs_iso2022", "_codecs_jp", "_codecs_kr", "_codecs_tw", "_ctypes",
                "_curses", "_curses_panel", "_dbm", "_decimal", "_elementtree", "_gdbm", "_hashlib", "_lzma",
                "_multibytecodec", "_sqlite3", "_ssl", "_tkinter", "_uuid", "pyexpat", "readline", "unicodedata", "zlib")]
    return [*command, f"--host={arch.triplet}", f"--build={archs.host().triplet}",
            f"--with-build-python={build('native').build / 'python'}", "--disable-test-modules",
            # Not every compiler has unwind data by default.
            f"CFLAGS={' '.join(arch.chain_cflags)} -fasynchronous-unwind-tables", QUICK, "PKG_CONFIG_LIBDIR=/nonexistent", "CONFIG_SITE=/dev/null",
            "ac_cv_file__dev_ptmx=yes", "ac_cv_file__dev_ptc=no", "ac_cv_buggy_getaddrinfo=no",
            *missing]


STATUS_CONFIG = """
sed 's/^extern PyObject\\* PyInit__imp(void);/&\\nextern PyObject* PyInit__perf_trampoline(void);/;
     s/^    {"_imp", PyInit__imp},/&\\n    {"_perf_trampoline", PyInit__perf_trampoline},/' Modules/config.c >status-config.c
grep -q '{"_perf_trampoline"' status-config.c
"""


def _link_status(it, arch):
    """python-status: the interpreter's own objects, and Modules/_perf_trampoline.c as a built-in module."""
    program, python = it.build / "python-status", it.build / "python"
    module = overlay.ROOT / "Modules/_perf_trampoline.c"
    if program.exists() and program.stat().st_mtime > max(python.stat().st_mtime, module.stat().st_mtime):
        return
    variables = {}
    for line in (it.build / "Makefile").read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            variables.setdefault(name.strip(), value.strip())
    compiler = _compiler(arch)
    include = ["-I../source/Include/internal", "-I../source/Include/internal/mimalloc", "-I.", "-I../source/Include"]
    libraries = [word for name in ("LIBS", "MODLIBS", "SYSLIBS") for word in variables.get(name, "").split()
                 if word.startswith("-l")]
    ar = f"{arch.prefix if arch else ''}ar"
    for command in (["sh", "-ec", STATUS_CONFIG],
                    [*compiler, "-O2", "-g", "-DPy_BUILD_CORE", *include, "-c", "status-config.c"],
                    [*compiler, "-O2", "-g", "-DPy_BUILD_CORE_BUILTIN", *include, "-c", module, "-o", "status-module.o"],
                    [*compiler, "-O2", "-g", "-DPy_BUILD_CORE_BUILTIN", *include, "-c",
                     overlay.ROOT / "Python/perf_existing.c", "-o", "status-existing.o"],
                    ["cp", next(it.build.glob("libpython*.a")), "status.a"],
                    [ar, "d", "status.a", "config.o"],
                    [compiler[-1], "-Wl,-export-dynamic", "-o", program.name, "Programs/python.o", "status-config.o",
                     "status-module.o", "status-existing.o", "-Wl,--whole-archive", "status.a", "-Wl,--no-whole-archive", *libraries, "-lm",
                     *it.env.get("LDFLAGS", "").split()]):
        _run(command, it.build, it.env)


def main():
    for kind in sys.argv[1:] or ["native"]:
        if kind not in ("plain", "native", "bare", *OPTIONS, *archs.load()):
            sys.exit(__doc__)
        print(*build(kind).command())


if __name__ == "__main__":
    try:
        main()
    except (roots.Unavailable, archs.Refusal, RuntimeError) as error:
        sys.exit(f"intree.py: {error}")
