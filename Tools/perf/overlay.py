#!/usr/bin/env python3
"""Put the core into a CPython source tree (3.13 or later), or take it out again.

    overlay.py apply DIR [--no-configure]
    overlay.py undo DIR

The core's files go where CPython has its own, and the few places that know of them are edited: they are found by what
they mean, and when one is not as expected nothing is changed and the reason is told.  configure is made anew with the
autoconf that is there; --no-configure leaves that to you.  What was there before is kept in DIR/.perf-overlay until
`undo`.  A second `apply` changes nothing, or brings a newer core.

Doc/howto/perf_in_cpython.rst tells a maintainer what changes and why.
"""
import argparse
import difflib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import archs

ROOT = Path(__file__).resolve().parents[2]
KEPT = ".perf-overlay"
SOURCES = [f"Python/{name}.c" for name in ("jit_unwind", "perf_cpython", "perf_elf_image", "perf_file", "perf_filter",
                                           "perf_jit_trampoline", "perf_map", "perf_trampoline")]
HEADERS = [f"Include/internal/pycore_{name}.h" for name in
           ("asm_trampoline", "perf_compat", "perf_eh_frame_generated", "perf_jitdump", "perf_trampoline")]
TOOLS = [f"Tools/perf/{name}" for name in ("README.rst", "archs.py", "archs.txt", "eh_frame.py", "gen_eh_frame.py")]
# CPython's own of this purpose, in one version or another; some of ours have the same names.
REPLACED = re.compile(r"Python/(asm_trampoline\w*\.[Sh]|perf_trampoline\.c|perf_jit_trampoline\.c|jit_unwind\.c|"
                      r"trampoline_ehframe\w*\.[ch])|Tools/jit/_trampoline_ehframe\.py")
# Where CPython's configure knows Darwin, its trampoline stays CPython's own there: these, beside ours.
DARWIN = re.compile(r"Python/(asm_trampoline|perf_trampoline|perf_jit_trampoline|jit_unwind)(\w*\.[coS])\b")
# How the parts of CPython that stay, and ours, call each other.
SHARED = re.compile(r"\b(_PyPerf\w*_\w+|_Py_perf\w*|_PyIsPerf\w+|_PyJitUnwind_\w+|_Py_jit_debug\w*|_Py_trampoline\w+)\b")

# Of Tools/c-analyzer: the variables whose declarations it can read, and the files in which it fails at some.
GLOBALS = """\
jit_unwind.c - template
jit_unwind.c - __jit_debug_descriptor
jit_unwind.c - _Py_jit_debug_mutex
perf_cpython.c - _Py_perfmap_callbacks
perf_cpython.c - _Py_perfmap_jit_callbacks
perf_cpython.c - _Py_perf_elf_callbacks
perf_cpython.c - choices
perf_cpython.c - state
perf_map.c - map_file
perf_map.c - size_field
perf_map.c - parents_path
perf_map.c map_publish name
perf_map.c - _PyPerf_map_backend
perf_jit_trampoline.c - dump_file
perf_jit_trampoline.c - marker
perf_jit_trampoline.c - code_index
perf_jit_trampoline.c - code_size
perf_jit_trampoline.c - unwinding_size
perf_jit_trampoline.c - mapped_size
perf_jit_trampoline.c jitdump_publish name
perf_jit_trampoline.c jitdump_publish path
perf_jit_trampoline.c - _PyPerf_jitdump_backend
"""
UNREADABLE = ("perf_elf_image", "perf_file", "perf_trampoline")

CONFIGURE = """\
AC_MSG_CHECKING([perf trampoline])
dnl By CPU and operating system, whatever the C library: the preprocessor picks a line of the table.
perf_trampoline=no perf_chain_cflags=
AS_CASE([$host_os], [linux*-android*], [], [linux*], [
  awk '!/^#/ && NF { printf "#if %s\\nARCH \\"%s %s\\"\\n#endif\\n", @S|@5, @S|@1, @S|@8 }' \\
      "$srcdir/Tools/perf/archs.txt" >conftest.c
  perf_arch=`$CC $CPPFLAGS $CFLAGS -E -P conftest.c 2>&AS_MESSAGE_LOG_FD | sed -n 's/^ARCH "\\(.*\\)"/\\1/p'`
  perf_chain_cflags=`echo "$perf_arch" | sed 's/^@<:@^ @:>@* *//; s/^-$//; y/,/ /'`
  perf_arch=`echo "$perf_arch" | sed 's/ .*//'`
  AS_IF([test -n "$perf_arch" &&
         $CC -I"$srcdir/Include/internal" $CPPFLAGS $CFLAGS -c -o conftest.$ac_objext \\
             "$srcdir/Python/asm_trampoline_$perf_arch.S" >&AS_MESSAGE_LOG_FD 2>&1 &&
         grep eh_frame conftest.$ac_objext >/dev/null],
        [perf_trampoline=yes])
  rm -f conftest.*
])
AS_VAR_IF([perf_trampoline], [yes], [
  AC_MSG_RESULT([yes, $perf_arch])
  AC_DEFINE([PY_HAVE_PERF_TRAMPOLINE], [1], [Define to 1 if you have the perf trampoline.])
  PERF_TRAMPOLINE_OBJ=Python/asm_trampoline_$perf_arch.o

  dnl perf record -g follows the chain of frames.
  AS_VAR_IF([Py_DEBUG], [true], [AS_VAR_APPEND([BASECFLAGS], [" $perf_chain_cflags"])])
], [
  AC_MSG_RESULT([no])
  PERF_TRAMPOLINE_OBJ=
])
"""

DARWIN_CONFIGURE = """\
AS_CASE([$host_os], [darwin*], [
%s  AS_VAR_IF([PERF_TRAMPOLINE_OBJ], [], [], [
    PERF_TRAMPOLINE_OBJ=`echo "$PERF_TRAMPOLINE_OBJ" | sed s/asm_trampoline/asm_trampoline_darwin/g`" %s"])
], [
%s])
"""

MAKE_OBJECT = """\
Python/asm_trampoline_%.o: $(srcdir)/Python/asm_trampoline_%.S $(srcdir)/Include/internal/pycore_asm_trampoline.h
	$(CC) -c $(PY_CORE_CFLAGS) -o $@ $<
"""

MAKE_REGEN = """
# Only developers need it: pyelftools, and the assembler of each architecture that is to be made anew.
.PHONY: regen-perf-trampoline
regen-perf-trampoline:
	$(PYTHON_FOR_REGEN) $(srcdir)/Tools/perf/gen_eh_frame.py --where-possible
"""

ACTIVATE = """\
    _PyPerf_Callbacks *callbacks = _PyPerf_FindCallbacks(backend);
    if (callbacks == NULL) {
        PyErr_Format(PyExc_ValueError, "invalid backend: %s", backend);
        return NULL;
    }
    if (_PyPerfTrampoline_SetCallbacks(callbacks) < 0) {
        PyErr_SetString(PyExc_ValueError, "can't activate perf trampoline");
        return NULL;
    }
"""

CONFIG = """\
    env = config_get_env(config, "PYTHON_PERF_ELF_SUPPORT");
    if (env && _Py_str_to_int(env, &active) == 0 && active) {
        config->perf_profiling = 3;
    }
    if (config_get_xoption(config, L"perf_elf")) {
        config->perf_profiling = 3;
    }
"""

USAGE = r"""-X perf_elf[=DIR]: support every native profiler by ELF images of Python functions\n\
         in DIR; also PYTHON_PERF_ELF_SUPPORT=1\n\
"""


class Refusal(Exception):
    """Why nothing was changed: one sentence."""


def only(pattern, text, what, flags=re.M):
    """The one match of `pattern`."""
    found = list(re.finditer(pattern, text, flags))
    if len(found) != 1:
        raise Refusal(f"{what}: expected once, found {len(found)} times")
    return found[0]


def replace(text, match, new):
    return text[:match.start()] + new + text[match.end():]


def body(text, name, what):
    """Begin and end of a C function's body, within its braces: it begins and ends in the first column."""
    found = only(rf"^{name}\([^;{{]*\)\n(?:/\*[^\n]*\*/\n)?\{{\n(.*?)^\}}", text, f"{what}: the function {name}()", re.M | re.S)
    return found.span(1)


# --- The places ---

def configure_block(text):
    """Begin and end of the check for the trampoline."""
    begin = only(r"^AC_MSG_CHECKING\(\[(?:for )?perf trampoline\]\)\n", text, "configure.ac: the check for the perf trampoline")
    end = only(r"^AC_SUBST\(\[PERF_TRAMPOLINE_OBJ\]\)\n", text, "configure.ac: the substitution of PERF_TRAMPOLINE_OBJ")
    block = text[begin.start():end.end()]
    made = set(re.findall(r"\bAC_(?:SUBST|DEFINE)\(\[(\w+)", block))
    foreign = {name for name in made if not name.startswith("PERF_TRAMPOLINE_")} - {"PY_HAVE_PERF_TRAMPOLINE"}
    if not block or foreign or "PY_HAVE_PERF_TRAMPOLINE" not in made or block.count("\n") > 100:
        raise Refusal("configure.ac: between the check for the perf trampoline and the substitution of "
                      f"PERF_TRAMPOLINE_OBJ stands something else{': ' * bool(foreign)}{', '.join(sorted(foreign))}")
    return begin.start(), end.start()


def on_darwin(path):
    """The name under which CPython's own file stays for Darwin."""
    return DARWIN.sub(r"Python/\1_darwin\2", path)


def configure_ac(text, darwin):
    begin, substitution = configure_block(text)
    ours = CONFIGURE
    if darwin:
        objects = " ".join(f"{path[:-1]}o" for path in darwin if path.endswith(".c"))
        ours = DARWIN_CONFIGURE % (text[begin:substitution], objects, CONFIGURE)
    return text[:begin] + ours + text[substitution:]


def makefile(text, headers, darwin=()):
    what = "Makefile.pre.in"
    objects = [f"{source[:-1]}o" for source in SOURCES]
    text = re.sub(r"^\s+Python/(?:perf_jit_trampoline|jit_unwind|trampoline_ehframe\w*)\.o \\\n", "", text, flags=re.M)
    listed = only(r"^(\s+)Python/perf_trampoline\.o \\\n", text, f"{what}: Python/perf_trampoline.o in a list")
    text = replace(text, listed, "".join(f"{listed[1]}{name} \\\n" for name in objects))

    # What CPython's own jit_unwind.c is made with, ours wants too.
    text = re.sub(r"^(?:Python/jit_unwind\.o|\S*trampoline_ehframe\S*):.*\n(?:\t.*\n)*\n?",
                  lambda rule: "" if "trampoline_ehframe" in rule[0] else rule[0] + (on_darwin(rule[0]) if darwin else ""),
                  text, flags=re.M)
    rules = list(re.finditer(r"^Python/asm_trampoline\w*\.o:.*\n(?:\t.*\n)+\n?", text, re.M))
    if not rules:
        raise Refusal(f"{what}: no rule for Python/asm_trampoline*.o")
    for rule in reversed(rules):
        text = replace(text, rule, MAKE_OBJECT + "\n" if rule is rules[0] else "")

    only(r"^.*@PERF_TRAMPOLINE_OBJ@", text, f"{what}: @PERF_TRAMPOLINE_OBJ@")

    known = only(r"^PYTHON_HEADERS\s*=.*\\\n((?:.*\\\n)*.*\n)", text, f"{what}: PYTHON_HEADERS")
    lines = known[1].splitlines(keepends=True)
    for header in headers:
        places = [i for i, line in enumerate(lines) if re.search(r"/internal/pycore_\w+\.h \\$", line)]
        if not places:
            raise Refusal(f"{what}: no internal headers in PYTHON_HEADERS")
        line = re.sub(r"pycore_\w+\.h", Path(header).name, lines[places[0]])
        if line not in lines:
            after = [i for i in places if lines[i] < line]
            lines.insert(after[-1] + 1 if after else places[0], line)
    text = text[:known.start(1)] + "".join(lines) + text[known.end(1):]

    regen = only(r"^regen-all:((?:.*\\\n)*.*\n(?:\t.*\n)*)", text, f"{what}: regen-all")
    text = replace(text, regen, "regen-all: regen-perf-trampoline" + regen[1] + MAKE_REGEN)
    left = sorted(set(re.findall(r"\S*trampoline_ehframe\S*|@PERF_TRAMPOLINE_(?!OBJ@)\w+@", text)))
    if left:
        raise Refusal(f"{what}: what is to become of {', '.join(left)} is not known")
    return text


def include(text, what):
    """The core's header behind the one that has CPython's declarations."""
    line = only(r'^#include "pycore_ceval\.h".*\n', text, f"{what}: the inclusion of pycore_ceval.h")
    return replace(text, line, line[0] + '#include "pycore_perf_trampoline.h"\n')


def sysmodule(text):
    text = include(text, "sysmodule.c")
    begin, end = body(text, "sys_activate_stack_trampoline_impl", "sysmodule.c")
    inside = text[begin:end]
    first = only(r"^ *if \(strcmp\(backend, \"perf\"\) == 0\) \{\n", inside, "sysmodule.c: the choice of a backend")
    last = only(r"^    if \(_PyPerfTrampoline_Init\(1\) < 0\)", inside, "sysmodule.c: the start of the trampoline")
    choice = inside[first.start():last.start()]
    if choice.count("{") != choice.count("}") or "invalid backend" not in choice or "#" in choice:
        raise Refusal("sysmodule.c: the choice of a backend is not a chain of conditions that ends in an error")
    return text[:begin] + inside[:first.start()] + ACTIVATE + inside[last.start():] + text[end:]


def pylifecycle(text):
    text = include(text, "pylifecycle.c")
    other = only(r"^( *)else \{\n *(\w+) = &_Py_perfmap_jit_callbacks;\n", text, "pylifecycle.c: the choice of callbacks")
    indent, variable = other.groups()
    return replace(text, other, f"{indent}else if (config->perf_profiling == 3) {{\n"
                                f"{indent}    {variable} = _PyPerf_FindCallbacks(\"perf_elf\");\n{indent}}}\n" + other[0])


def initconfig(text):
    begin, end = body(text, "config_init_perf_profiling", "initconfig.c")
    inside = text[begin:end]
    for name in r"\bint active\b", r"\bconst char \*env\b", r'"PYTHON_PERF_JIT_SUPPORT"', r'L"perf_jit"':
        if not re.search(name, inside):
            raise Refusal(f"initconfig.c: config_init_perf_profiling() does not have {name}")
    done = only(r"^\n?    return _PyStatus_OK\(\);", inside, "initconfig.c: the end of config_init_perf_profiling()")
    text = text[:begin] + inside[:done.start()] + CONFIG + inside[done.start():] + text[end:]
    usage = only(r"^-X perf_jit: ", text, "initconfig.c: the usage of -X perf_jit")
    return text[:usage.start()] + USAGE + text[usage.start():]


def project(text, what):
    """A Visual Studio list: with a new file beside perf_trampoline.c. Of the core Windows has only stubs."""
    item = only(r'^[ \t]*<ClCompile Include="[^"]*\bperf_trampoline\.c"(?: />|>.*?</ClCompile>)\r?\n', text,
                f"{what}: perf_trampoline.c", re.M | re.S)
    return text[:item.start()] + item[0].replace("perf_trampoline.c", "perf_cpython.c") + text[item.start():]


def analyzer(text, darwin):
    if darwin:
        text = re.sub(r"^Python/\w+\.c\t.*\n", lambda line: on_darwin(line[0]) + line[0] * (on_darwin(line[0]) != line[0]),
                      text, flags=re.M)
    text, count = re.subn(r"^Python/(?:perf_trampoline|perf_jit_trampoline|jit_unwind)\.c\t.*\n", "\0", text, flags=re.M)
    if not count:
        raise Refusal("ignored.tsv: perf_trampoline.c is not there")
    ours = "".join("Python/" + "\t".join(line.split()) + "\t-\n" for line in GLOBALS.splitlines())
    return text.replace("\0", ours, 1).replace("\0", "")


def analyzer_parser(text):
    excluded = only(r"^EXCLUDED = clean_lines\('{3}\n", text, "_parser.py: the files that are left out")
    return replace(text, excluded, excluded[0] + "".join(f"Python/{name}.c\n" for name in UNREADABLE))


# --- The tree ---

def digest(data):
    return None if data is None else hashlib.sha256(data).hexdigest()


class Tree:
    """A CPython tree as it was before the overlay, and what is to become of it."""

    def __init__(self, at):
        self.at = Path(at)
        if not (self.at / "configure.ac").exists() or not (self.at / "Include/patchlevel.h").exists():
            raise Refusal(f"{at} is not a CPython source tree: it has no configure.ac or no Include/patchlevel.h")
        manifest = self.at / KEPT / "manifest.json"
        self.kept = json.loads(manifest.read_text()) if manifest.exists() else {}
        for path, (before, after) in self.kept.items():
            if digest(self.on_disk(path)) not in (before, after):
                raise Refusal(f"{path} was changed after the overlay: put it back, or save your change and undo by hand "
                              f"from {KEPT}/original")
        self.planned = {}

    def on_disk(self, path):
        try:
            return (self.at / path).read_bytes()
        except FileNotFoundError:
            return None

    def original(self, path):
        """Bytes, or None when there was no such file."""
        if path not in self.kept:
            return self.on_disk(path)
        kept = self.at / KEPT / "original" / path
        return kept.read_bytes() if self.kept[path][0] is not None else None

    def edit(self, path, function, *arguments):
        data = self.original(path)
        if data is None:
            raise Refusal(f"{path} is missing")
        self.planned[path] = function(data.decode(), *arguments).encode()

    def commit(self):
        """Write what is planned, all or nothing; returns the paths that changed."""
        changes = {path: data for path, data in self.planned.items() if data != self.original(path)}
        restored = {path: self.original(path) for path in self.kept if path not in changes}
        before = {path: self.on_disk(path) for path in [*changes, *restored]}
        written = {path: data for path, data in [*restored.items(), *changes.items()] if data != before[path]}
        kept = self.at / KEPT
        fresh = self.at / f"{KEPT}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            for path in changes:
                if (data := self.original(path)) is not None:
                    (fresh / "original" / path).parent.mkdir(parents=True, exist_ok=True)
                    (fresh / "original" / path).write_bytes(data)
                    shutil.copymode(self.at / path if (self.at / path).exists() else kept / "original" / path,
                                    fresh / "original" / path)
            if changes:
                fresh.mkdir(exist_ok=True)
                (fresh / "manifest.json").write_text(json.dumps(
                    {path: [digest(self.original(path)), digest(data)] for path, data in changes.items()}, indent=1))
            done = []
            try:
                for path, data in written.items():
                    done.append(path)
                    self.write(path, data, fresh)
                if kept.exists():
                    shutil.rmtree(kept)
                if changes:
                    fresh.rename(kept)
            except BaseException:
                for path in done:
                    self.write(path, before[path], fresh)
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return sorted(written)

    def write(self, path, data, kept):
        target = self.at / path
        if data is None:
            target.unlink(missing_ok=True)
            for folder in target.relative_to(self.at).parents:
                try:
                    (self.at / folder).rmdir()      # if the overlay made it, it is empty now
                except OSError:
                    break
            return
        if self.on_disk(path) == data:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{target.name}.perf-overlay")
        draft.write_bytes(data)
        for model in target, kept / "original" / path, self.at / KEPT / "original" / path:
            if model.exists():
                shutil.copymode(model, draft)
                break
        draft.replace(target)


def plan(tree, configure=True):
    """Fill tree.planned."""
    version = re.search(rb"PY_VERSION\s+\"(\d+)\.(\d+)", tree.original("Include/patchlevel.h"))
    if not version or tuple(map(int, version.groups())) < (3, 13):
        raise Refusal("Include/patchlevel.h does not say that this is CPython 3.13 or later")
    table = archs.load(ROOT / "Tools/perf/archs.txt").values()
    headers = sorted([*HEADERS, *(arch.header for arch in table)])
    files = [*SOURCES, *headers, *TOOLS, *(arch.source for arch in table)]
    for path in files:
        if tree.original(path) is not None and not REPLACED.fullmatch(path):
            raise Refusal(f"{path} is there already, and is not one of those that the overlay replaces")
        tree.planned[path] = (ROOT / path).read_bytes()
    replaced = sorted({path.relative_to(tree.at).as_posix() for folder in ("Python", "Tools/jit")
                       for path in (tree.at / folder).glob("*")} | set(tree.kept))
    replaced = {path: tree.original(path) for path in replaced if REPLACED.fullmatch(path) and tree.original(path) is not None}
    text = (tree.original("configure.ac") or b"").decode()
    darwin = []
    if "darwin" in text[slice(*configure_block(text))].lower():
        if extracted := [path for path in replaced if "trampoline_ehframe" in path]:
            raise Refusal(f"Darwin's trampoline has its unwind data from {extracted[0]}, which is not known how to keep")
        darwin = [on_darwin(path) for path in replaced if DARWIN.fullmatch(path)]
        tree.planned |= {on_darwin(path): data for path, data in replaced.items()}
    tree.planned |= {path: None for path in replaced if path not in tree.planned}

    tree.edit("configure.ac", configure_ac, darwin)
    tree.edit("Makefile.pre.in", makefile, headers, darwin)
    tree.edit("Python/sysmodule.c", sysmodule)
    tree.edit("Python/pylifecycle.c", pylifecycle)
    tree.edit("Python/initconfig.c", initconfig)
    tree.edit("Tools/c-analyzer/cpython/ignored.tsv", analyzer, darwin)
    tree.edit("Tools/c-analyzer/cpython/_parser.py", analyzer_parser)
    for path in [f"PCbuild/{name}.vcxproj{suffix}" for name in ("pythoncore", "_freeze_module") for suffix in ("", ".filters")]:
        tree.edit(path, project, path)
    news = next((ROOT / "Misc/NEWS.d/next").rglob("*.rst"), None)
    for folder in "Core_and_Builtins", "Core and Builtins":
        if news and (tree.at / "Misc/NEWS.d/next" / folder).is_dir():
            tree.planned[f"Misc/NEWS.d/next/{folder}/{news.name}"] = news.read_bytes()
    check_shared(tree)
    if configure:
        tree.planned["configure"] = autoconf(tree)


def check_shared(tree):
    """What CPython's remaining files call of those that are replaced must be there."""
    ours = set()
    for path, data in tree.planned.items():
        if path in SOURCES or path in HEADERS:
            ours.update(SHARED.findall(data.decode()))
    for folder in "Python", "Objects", "Modules", "Parser", "Programs":
        for file in sorted((tree.at / folder).glob("*.c")):
            path = f"{folder}/{file.name}"
            if path in SOURCES or REPLACED.fullmatch(path):
                continue
            data = tree.planned.get(path) or tree.original(path)
            if data is not None:
                unknown = set(SHARED.findall(data.decode(errors="replace"))) - ours
                if unknown:
                    raise Refusal(f"{path} calls {', '.join(sorted(unknown))}, which the core does not have")
    declared = prototypes(tree.original("Include/internal/pycore_jit_unwind.h") or b"")
    for name, types in prototypes(tree.planned["Python/jit_unwind.c"]).items():
        if declared.get(name, types) != types:
            raise Refusal(f"pycore_jit_unwind.h: {name}() takes {', '.join(declared[name])}; the core's {', '.join(types)}")


def prototypes(data):
    """{function of jit_unwind.c: types of its parameters}"""
    return {name: [re.sub(r"\s*\w+$", "", parameter.strip()) for parameter in parameters.split(",")]
            for name, parameters in re.findall(r"\b(_PyJitUnwind_\w+)\(((?:[\w ]+[ *]+\w+,?\s*)+)\)\s*[;{]", data.decode())}


def autoconf(tree):
    """The new configure, made by autoconf from the new configure.ac."""
    if not shutil.which("autoconf"):
        print("overlay.py: there is no autoconf: configure stays as it was, make it anew before you run it", file=sys.stderr)
        return tree.original("configure")
    with tempfile.TemporaryDirectory() as scratch:
        for path in "configure.ac", "aclocal.m4":
            data = tree.planned.get(path) or tree.original(path)
            if data is not None:
                Path(scratch, path).write_bytes(data)
        done = subprocess.run(["autoconf", "-o", "-"], cwd=scratch, capture_output=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise Refusal(f"autoconf cannot make configure ({reason[0]}): install the autoconf that this tree wants, or give "
                      "--no-configure")
    return done.stdout


def count(tree):
    """Lines that CPython loses and gains: {kind: [lost, gained]}."""
    counts = {}
    for path, data in tree.planned.items():
        kind = ("generated" if path == "configure" or path.endswith("_generated.h") else
                "tools" if path.startswith(("Tools/perf/", "Tools/jit/")) else
                "Darwin's" if "_darwin" in path else
                "elsewhere" if not REPLACED.fullmatch(path) and path not in SOURCES + HEADERS else
                "assembly" if path.endswith(".S") or "asm_trampoline" in path else "C")
        old, new = ((text or b"").decode().splitlines() for text in (tree.original(path), data))
        lost, gained = counts.setdefault(kind, [0, 0])
        for line in difflib.unified_diff(old, new, n=0, lineterm=""):
            lost += line[0] == "-"
            gained += line[0] == "+"
        if old != new:      # the two header lines
            lost, gained = lost - 1, gained - 1
        counts[kind] = [lost, gained]
    return counts


def apply(at, configure=True):
    tree = Tree(at)
    plan(tree, configure)
    counts = count(tree)
    states = {path: "removed" if data is None else "new" if tree.original(path) is None else "changed"
              for path, data in tree.planned.items()}
    changed = tree.commit()
    for path in changed:
        print(f"{states.get(path, 'restored'):10}{path}")
    print(f"\n{'':12}{'lost':>6}{'gained':>8}" if changed else "nothing to do: the overlay is in place")
    if changed:
        for kind, (lost, gained) in sorted(counts.items()):
            print(f"{kind:12}{lost:6}{gained:8}")
    return changed


def undo(at):
    tree = Tree(at)
    changed = tree.commit()
    for path in changed:
        print(f"{'restored' if tree.on_disk(path) is not None else 'removed':9}{path}")
    if not changed:
        print("nothing to do: there is no overlay")
    return changed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in "apply", "undo":
        command = commands.add_parser(name)
        command.add_argument("tree")
        if name == "apply":
            command.add_argument("--no-configure", dest="configure", action="store_false", help="do not run autoconf")
    options = parser.parse_args()
    try:
        if options.command == "apply":
            apply(options.tree, options.configure)
        else:
            undo(options.tree)
    except (Refusal, archs.Refusal, OSError) as error:
        sys.exit(f"overlay.py: {error}; the tree is as it was")


if __name__ == "__main__":
    main()
