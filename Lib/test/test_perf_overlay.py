"""Tools/perf/overlay.py: what it does to a CPython source tree, and CPython with it.

By default on miniature trees, written here after what is known of each version's layout: 3.14's, 3.15's and the main
branch's have not been tried on the real ones. With PERF_TRAMPOLINE_FULL=1 CPython 3.13 is built, natively, without the
GIL and for other architectures; `make check-intree` does that.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import perf_support
from perf_support import FULL, SOURCE

import archs
import eh_frame
import intree
import overlay
import roots

# CPython's own flags for its core.
CORE_CFLAGS = ('-O2 -DNDEBUG -Wall -Wsign-compare -std=c11 -Wextra -Wno-unused-parameter -Wno-missing-field-initializers '
               '-Wstrict-prototypes -Werror=implicit-function-declaration -fvisibility=hidden -DPy_BUILD_CORE').split()


def configure_ac(choice):
    return textwrap.dedent('''\
        AC_INIT([miniature], [1])
        : ${host_os=linux-gnu} ${Py_DEBUG=true}
        : ${CC=gcc}
        ac_objext=o
        PLATFORM_TRIPLET=$($CC -dumpmachine)
        AC_MSG_CHECKING([perf trampoline])
        ''') + choice + textwrap.dedent('''\
        AC_SUBST([PERF_TRAMPOLINE_OBJ])
        AC_MSG_NOTICE([object is <$PERF_TRAMPOLINE_OBJ>, flags are <$BASECFLAGS>])
        AC_OUTPUT
        ''')


ONE_FILE = '''\
AS_CASE([$PLATFORM_TRIPLET], [x86_64-linux-gnu], [perf_trampoline=yes], [perf_trampoline=no])
AS_VAR_IF([perf_trampoline], [yes], [
  AC_DEFINE([PY_HAVE_PERF_TRAMPOLINE], [1], [There is one.])
  PERF_TRAMPOLINE_OBJ=Python/asm_trampoline.o
])
'''
WITH_DARWIN = ONE_FILE.replace(" [perf_trampoline=no]", """
        [aarch64-apple-darwin*], [perf_trampoline=yes], [perf_trampoline=no]""")
ONE_PER_ARCH = '''\
perf_trampoline=yes
AS_CASE([$PLATFORM_TRIPLET], [x86_64-*], [PERF_TRAMPOLINE_OBJ=Python/asm_trampoline_x86_64.o],
        [aarch64-*], [PERF_TRAMPOLINE_OBJ=Python/asm_trampoline_aarch64.o], [perf_trampoline=no])
AS_VAR_IF([PYTHON_FOR_REGEN], [:], [perf_trampoline=no])
AS_VAR_IF([perf_trampoline], [yes], [AC_DEFINE([PY_HAVE_PERF_TRAMPOLINE], [1], [There is one.])])
'''


def makefile(objects, rules):
    lines = ''.join(f'\t\tPython/{name}.o \\\n' for name in ['sysmodule', *objects])
    return f'''\
PYTHON_OBJS= \\
{lines}\t\tPython/last.o
OBJECT_OBJS= \\
\t\t@PERF_TRAMPOLINE_OBJ@
PYTHON_HEADERS= \\
\t\t$(srcdir)/Include/Python.h \\
\t\t$(srcdir)/Include/internal/pycore_ceval.h \\
\t\t$(srcdir)/Include/internal/pycore_time.h \\
\t\t$(DTRACE_HEADERS)

.PHONY: regen-all
regen-all: regen-this \\
\tregen-that
\t@echo done

regen-this regen-that:
\ttrue

{rules}
clean:
\ttrue
'''


SYSMODULE = '''\
#include "pycore_ceval.h"           // callbacks

static PyObject *
sys_activate_stack_trampoline_impl(PyObject *module, const char *backend)
/*[generated]*/
{
#ifdef PY_HAVE_PERF_TRAMPOLINE
    if (strcmp(backend, "perf") == 0) {
        choose(&_Py_perfmap_callbacks);
    }
    else if (strcmp(backend, "perf_jit") == 0) {
        choose(&_Py_perfmap_jit_callbacks);
    }
    else {
        return fail("invalid backend: %s", backend);
    }
    if (_PyPerfTrampoline_Init(1) < 0) {
        return NULL;
    }
#endif
    Py_RETURN_NONE;
}
'''

PYLIFECYCLE = '''\
#include "pycore_ceval.h"

static int
start(const PyConfig *config)
{
    _PyPerf_Callbacks *these = NULL;
    if (config->perf_profiling == 1) {
        these = &_Py_perfmap_callbacks;
    }
    else {
        these = &_Py_perfmap_jit_callbacks;
    }
    return _PyPerfTrampoline_SetCallbacks(these);
}
'''

INITCONFIG = '''\
static const char usage[] = "\\
-X other: thing\\n\\
-X perf_jit: a dump; also PYTHON_PERF_JIT_SUPPORT\\n\\
";

static PyStatus
config_init_perf_profiling(PyConfig *config)
{
    int active = 0;
    const char *env = config_get_env(config, "PYTHON_PERF_JIT_SUPPORT");
    if (env && is_set(env, &active)) {
        config->perf_profiling = 2;
    }
    if (config_get_xoption(config, L"perf_jit")) {
        config->perf_profiling = 2;
    }

    return _PyStatus_OK();

}
'''


def miniature(version):
    """{path: text} of a tree with the layout of this version: 3.14, 3.15 or main."""
    objects, rules = ['perf_trampoline', 'perf_jit_trampoline'], textwrap.dedent('''\
        Python/asm_trampoline.o: $(srcdir)/Python/asm_trampoline.S
        \t$(CC) -c -o $@ $<
        ''')
    choice = ONE_FILE
    item = '    <ClCompile Include="..\\Python\\perf_trampoline.c" />\r\n'
    files = {
        'Include/internal/pycore_ceval.h': 'extern _PyPerf_Callbacks _Py_perfmap_callbacks;\n',
        'Include/patchlevel.h': '#define PY_VERSION              "3.{}.2"\n'.format(
            {'3.14': 14, '3.15': 15, 'main': 16}[version]),
        'PCbuild/pythoncore.vcxproj': item, 'PCbuild/_freeze_module.vcxproj': item,
        'Python/asm_trampoline.S': 'old\n', 'Python/asm_trampoline_aarch64.h': 'old\n',
        'Python/initconfig.c': INITCONFIG, 'Python/pylifecycle.c': PYLIFECYCLE, 'Python/sysmodule.c': SYSMODULE,
        'Python/perf_trampoline.c': 'old\n', 'Python/perf_jit_trampoline.c': 'old\n' * 9,
        'Modules/posixmodule.c': 'f(_PyPerfTrampoline_AfterFork_Child());\n',
        'Tools/c-analyzer/cpython/ignored.tsv': 'Python/a.c\t-\tx\t-\nPython/perf_trampoline.c\t-\t_Py_perfmap_callbacks\t-\n',
        'Tools/c-analyzer/cpython/_parser.py': "EXCLUDED = clean_lines('''\nPython/a.c\n''')\n",
        'configure': '#!/bin/sh\nold\n',
    }
    for name in 'pythoncore', '_freeze_module':
        files[f'PCbuild/{name}.vcxproj.filters'] = item.replace(' />', '>\r\n      <Filter>Python</Filter>\r\n    </ClCompile>')
    if version != '3.14':
        objects.append('jit_unwind')
        choice = WITH_DARWIN
        rules += 'Python/jit_unwind.o: $(srcdir)/Python/jit_unwind.c $(THEIRS)\n\n'
        files['Python/jit_unwind.c'] = 'old\n'
    if version == 'main':
        choice = ONE_PER_ARCH
        objects.append('trampoline_ehframe')
        rules = ''.join(f'Python/asm_trampoline_{arch}.o: $(srcdir)/Python/asm_trampoline_{arch}.S\n\t$(CC) -c -o $@ $<\n\n'
                        for arch in ('x86_64', 'aarch64', 'riscv64')) + textwrap.dedent('''\
            Python/trampoline_ehframe.c: @PERF_TRAMPOLINE_OBJ@ $(srcdir)/Tools/jit/_trampoline_ehframe.py
            \t$(PYTHON_FOR_REGEN) $(srcdir)/Tools/jit/_trampoline_ehframe.py -o $@ @PERF_TRAMPOLINE_OBJ@
            ''')
        del files['Python/asm_trampoline.S'], files['Python/asm_trampoline_aarch64.h']
        files |= {f'Python/asm_trampoline_{arch}.S': 'old\n' for arch in ('x86_64', 'aarch64', 'riscv64')}
        files['Tools/jit/_trampoline_ehframe.py'] = 'old\n'
    return files | {'configure.ac': configure_ac(choice), 'Makefile.pre.in': makefile(objects, rules)}


VERSIONS = '3.14', '3.15', 'main'
OF_DARWIN = ['Python/' + name for name in ('asm_trampoline_aarch64.h', 'asm_trampoline_darwin.S', 'perf_trampoline_darwin.c',
                                           'perf_jit_trampoline_darwin.c', 'jit_unwind_darwin.c')]


def debian_python(version):
    try:
        return roots.python(version)
    except roots.NoMirror as reason:
        raise unittest.SkipTest(str(reason)) from None


class MiniatureTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.at = Path(scratch.name, 'tree')

    def make(self, version='3.14'):
        shutil.rmtree(self.at, ignore_errors=True)
        for path, text in miniature(version).items():
            (self.at / path).parent.mkdir(parents=True, exist_ok=True)
            (self.at / path).write_bytes(text.encode())
        (self.at / 'configure').chmod(0o755)

    def contents(self):
        return {path.relative_to(self.at).as_posix(): (path.read_bytes(), path.stat().st_mode)
                for path in self.at.rglob('*') if path.is_file()}

    def call(self, function, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            result = function(self.at, *arguments)
        self.output = output.getvalue()
        return result

    def text(self, path):
        return (self.at / path).read_bytes().decode()

    def assertRefused(self, message, function=overlay.apply):
        before = self.contents()
        with self.assertRaisesRegex((overlay.Refusal, OSError), message):
            self.call(function)
        self.assertEqual(self.contents(), before)


class PlacesTest(MiniatureTest):

    def test_every_place_in_every_layout(self):
        for version in VERSIONS:
            with self.subTest(version):
                self.make(version)
                self.call(overlay.apply)
                for path in [*overlay.SOURCES, *overlay.HEADERS, *(arch.source for arch in archs.load().values())]:
                    self.assertEqual((self.at / path).read_bytes(), (SOURCE / path).read_bytes(), path)
                self.assertEqual({path for path, (text, mode) in self.contents().items() if text.startswith(b'old')
                                  and not path.startswith(overlay.KEPT)}, set(OF_DARWIN if version == '3.15' else []))
                self.assertRegex(self.text('Python/sysmodule.c'), r'(?s)_PyPerf_FindCallbacks\(backend\).*_PyPerfTrampoline_Init')
                self.assertNotIn('strcmp', self.text('Python/sysmodule.c'))
                self.assertRegex(self.text('Python/pylifecycle.c'),
                                 r'(?s)== 3\) \{\s*these = _PyPerf_FindCallbacks\("perf_elf"\);\s*\}\s*else \{\s*these = &_Py_perfmap_jit')
                self.assertRegex(self.text('Python/initconfig.c'), r'(?s)L"perf_elf"\)\) \{\s*config->perf_profiling = 3;\s*\}\s*return')
                self.assertEqual(self.text('PCbuild/pythoncore.vcxproj').count('perf_cpython.c" />\r\n'), 1)
                self.assertRegex(self.text('Tools/c-analyzer/cpython/ignored.tsv'), r'\APython/a.c\t-\tx\t-\nPython/\w+\.c\t')

    def test_makefile_builds_and_regenerates(self):
        for version in VERSIONS:
            with self.subTest(version):
                self.make(version)
                self.call(overlay.apply)
                made = self.text('Makefile.pre.in').replace('@PERF_TRAMPOLINE_OBJ@', 'Python/asm_trampoline_s390x.o')
                (self.at / 'Makefile').write_text(f'srcdir=.\nPYTHON_FOR_REGEN=regen\nCC=cc\n{made}\nall: $(PYTHON_OBJS) $(OBJECT_OBJS)\n'
                                                  '%.o: %.c\n\t:$@\n')
                (self.at / 'Python/last.c').touch()
                def dry_run(target):
                    return subprocess.run(['make', '-n', target], cwd=self.at, text=True, check=True,
                                          stdout=subprocess.PIPE).stdout
                done = dry_run('all')
                for source in overlay.SOURCES:
                    self.assertEqual(done.count(f':{source[:-1]}o\n'), 1, source)
                self.assertIn('-o Python/asm_trampoline_s390x.o Python/asm_trampoline_s390x.S', done)
                self.assertIn('regen ./Tools/perf/gen_eh_frame.py', dry_run('regen-all'))
                headers = re.findall(r'pycore_(\w+)\.h \\', self.text('Makefile.pre.in'))
                self.assertEqual(headers, sorted(headers))
                self.assertLess({'perf_compat', 'perf_eh_frame_s390x_generated'}, set(headers))

    def test_makefiles_of_newer_versions(self):
        """Those that Debian ships, which configure has made of the real Makefile.pre.in."""
        for version in '3.14', '3.15':
            with self.subTest(version):
                path = next(debian_python(version).root.glob(f'usr/lib/python{version}/config-*/Makefile'))
                text = re.sub(r'(?m)^([ \t]+)Python/asm_trampoline\.o$', r'\1@PERF_TRAMPOLINE_OBJ@', path.read_text())
                made = overlay.makefile(text, overlay.HEADERS, darwin=version == '3.15')
                for source in overlay.SOURCES:
                    self.assertEqual(len(re.findall(rf'\t{source[:-1]}o \\\n', made)), 1, source)
                self.assertNotIn('Python/asm_trampoline.o', made)
                self.assertEqual(re.findall(r'(?m)^Python/jit_unwind.*:', made),
                                 ['Python/jit_unwind.o:', 'Python/jit_unwind_darwin.o:'] if version == '3.15' else [])

    @unittest.skipUnless(shutil.which('autoconf'), 'autoconf is not installed')
    def test_configure_chooses_by_processor_and_system(self):
        self.make('3.14')
        self.call(overlay.apply)
        self.assertTrue(os.access(self.at / 'configure', os.X_OK))
        def configure(compiler, host_os='linux-gnu'):
            done = subprocess.run(['./configure'], cwd=self.at, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  env=os.environ | {'CC': compiler, 'host_os': host_os, 'CFLAGS': '-O2'})
            self.assertEqual(done.returncode, 0, done.stdout)
            return re.search(r'object is <(.*)>, flags are <(.*)>', done.stdout).groups()
        num_tried = 0
        for arch in archs.load().values() if FULL else [archs.host(), archs.get('s390x')]:
            compiler = 'gcc' if arch == archs.host() else f'{arch.prefix}gcc'
            if shutil.which(compiler):
                num_tried += 1
                self.assertEqual(configure(compiler), (f'Python/asm_trampoline_{arch.name}.o', ' '.join(['', *arch.chain_cflags]) or ' '))
        self.assertGreater(num_tried, 0)
        self.assertEqual(configure('gcc', 'linux-musl')[0], f'Python/asm_trampoline_{archs.host().name}.o')
        for system in ('darwin24.1', 'linux-android', 'wasi') if FULL else ('darwin24.1',):
            self.assertEqual(configure('gcc', system), ('', ''))
        self.assertEqual(configure('gcc -m32'), ('', ''))       # no line of the table

    @unittest.skipUnless(shutil.which('autoconf'), 'autoconf is not installed')
    def test_darwin_keeps_what_cpython_has(self):
        self.make('3.15')
        self.call(overlay.apply)
        compiler = self.at / 'compiler'
        compiler.write_text('#!/bin/sh\necho aarch64-apple-darwin24\n')
        compiler.chmod(0o755)
        done = subprocess.run(['./configure'], cwd=self.at, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=os.environ | {'CC': './compiler', 'host_os': 'darwin24.1'})
        self.assertIn('object is <Python/asm_trampoline_darwin.o Python/jit_unwind_darwin.o Python/perf_jit_trampoline_darwin.o '
                      'Python/perf_trampoline_darwin.o>', done.stdout)
        for path in OF_DARWIN[1:]:
            self.assertEqual(self.text(path), miniature('3.15')[path.replace('_darwin', '')])
        self.assertIn('\nPython/jit_unwind_darwin.o: $(srcdir)/Python/jit_unwind_darwin.c $(THEIRS)\n', self.text('Makefile.pre.in'))
        self.assertIn('Python/perf_trampoline_darwin.c\t-\t_Py_perfmap_callbacks', self.text('Tools/c-analyzer/cpython/ignored.tsv'))


class UndoTest(MiniatureTest):

    def test_undo_restores_every_byte_and_mode(self):
        for version in VERSIONS:
            with self.subTest(version):
                self.make(version)
                before = self.contents()
                self.call(overlay.apply)
                self.assertNotEqual(self.contents(), before)
                self.call(overlay.undo)
                self.assertEqual(self.contents(), before)
                self.assertEqual(self.call(overlay.undo), [])

    def test_second_apply_changes_nothing(self):
        self.make('main')
        self.call(overlay.apply)
        before = self.contents()
        times = {path: path.stat().st_mtime_ns for path in self.at.rglob('*.[chS]')
                 if overlay.KEPT not in path.parts}
        self.assertEqual(self.call(overlay.apply), [])
        self.assertEqual(self.contents(), before)
        self.assertEqual({path: path.stat().st_mtime_ns for path in times}, times)

    def test_newer_core_is_brought_and_undo_still_restores(self):
        self.make()
        before = self.contents()
        self.call(overlay.apply)
        newer = self.at.parent / 'newer'
        for name in 'Python', 'Include', 'Tools/perf', 'Misc':
            if (SOURCE / name).exists():
                shutil.copytree(SOURCE / name, newer / name, ignore=shutil.ignore_patterns('__pycache__'))
        with (newer / 'Python/perf_map.c').open('a') as file:
            file.write('/* newer */\n')
        with mock.patch.object(overlay, 'ROOT', newer):
            self.assertEqual(self.call(overlay.apply), ['Python/perf_map.c'])
        self.assertIn('/* newer */', self.text('Python/perf_map.c'))
        self.call(overlay.undo)
        self.assertEqual(self.contents(), before)

    def test_counts_are_those_of_a_diff(self):
        self.make()
        before = self.at.parent / 'before'
        shutil.copytree(self.at, before)
        self.call(overlay.apply)
        counts = re.findall(r'(?m)^(\w+) +(\d+) +(\d+)$', self.output)
        diff = subprocess.run(['diff', '-rNU0', '-x', overlay.KEPT, before, self.at], text=True, stdout=subprocess.PIPE).stdout
        self.assertEqual((sum(int(lost) for _, lost, _ in counts), sum(int(gained) for *_, gained in counts)),
                         (len(re.findall(r'(?m)^-(?!--)', diff)), len(re.findall(r'(?m)^\+(?!\+\+)', diff))))


class RefusalTest(MiniatureTest):

    def test_place_not_as_expected(self):
        for path, old, new, message in [
            ('configure.ac', 'CHECKING([perf', 'CHECKING([some', 'configure.ac: the check for the perf trampoline: .*found 0'),
            ('configure.ac', 'AC_SUBST([PERF', 'AC_SUBST([OTHER])\nAC_SUBST([PERF', 'something else: OTHER'),
            ('Makefile.pre.in', 'Python/perf_trampoline.o', 'Python/perf.o', 'perf_trampoline.o in a list'),
            ('Makefile.pre.in', 'Python/asm_trampoline.o:', 'Python/asm.o:', 'no rule for'),
            ('Makefile.pre.in', 'regen-all:', 'regen-most:', 'regen-all'),
            ('Makefile.pre.in', '\ttrue\n', '\tuse Python/trampoline_ehframe.c\n', 'what is to become of Python/trampoline_ehframe.c'),
            ('Python/sysmodule.c', '"perf")', '"map")', 'choice of a backend'),
            ('Python/sysmodule.c', 'invalid backend', 'bad', 'not a chain'),
            ('Python/sysmodule.c', '    if (_PyPerfTrampoline_Init', '#endif\n    if (_PyPerfTrampoline_Init', 'not a chain'),
            ('Python/pylifecycle.c', 'else {', 'if (1) {', 'choice of callbacks'),
            ('Python/initconfig.c', 'int active', 'bool active', 'does not have'),
            ('Python/initconfig.c', '-X perf_jit:', '-X perf_dump:', 'usage'),
            ('Include/patchlevel.h', '"3.14', '"3.12', '3.13 or later'),
            ('PCbuild/pythoncore.vcxproj', 'perf_trampoline.c', 'x.c', 'pythoncore.vcxproj: perf_trampoline.c'),
            ('Modules/posixmodule.c', 'AfterFork_Child', 'AfterFork_Parent', 'posixmodule.c calls _PyPerfTrampoline_AfterFork_Parent'),
        ]:
            with self.subTest(message):
                self.make()
                text = self.text(path)
                self.assertIn(old, text)
                (self.at / path).write_bytes(text.replace(old, new).encode())
                self.assertRefused(message)

    def test_file_in_the_way(self):
        self.make()
        (self.at / 'Python/perf_map.c').write_text('theirs')
        self.assertRefused('Python/perf_map.c is there already')

    def test_missing_file(self):
        self.make()
        (self.at / 'Python/initconfig.c').unlink()
        self.assertRefused('Python/initconfig.c is missing')

    def test_jit_that_calls_what_the_core_does_not_have(self):
        self.make('3.15')
        (self.at / 'Python/jit_publish.c').write_text('f(_PyJitUnwind_GdbRegisterCode(), _PyJitUnwind_Tell());\n')
        self.assertRefused('jit_publish.c calls _PyJitUnwind_Tell, which the core does not have')

    def test_jit_that_calls_it_otherwise(self):
        self.make('3.15')
        header = self.at / 'Include/internal/pycore_jit_unwind.h'
        for kept, extra, refused in ('', '', False), (', const void *shim', '', True), ('', ' int', True):
            header.write_text('size_t _PyJitUnwind_BuildEhFrame(uint8_t *buffer, size_t buffer_size,\n'
                              f'    const void *code, size_t{extra} size, int absolute{kept});\n')
            if refused:
                self.assertRefused(r'_PyJitUnwind_BuildEhFrame\(\) takes .*; the core.s uint8_t \*, size_t, const void \*, size_t, int')
            else:
                self.call(overlay.apply)
                self.call(overlay.undo)

    def test_darwin_with_an_extractor(self):
        self.make('main')
        path = self.at / 'configure.ac'
        path.write_text(path.read_text().replace('[x86_64-*]', '[x86_64-linux-*|x86_64-apple-darwin]'))
        self.assertRefused("Darwin's trampoline has its unwind data from")

    def test_no_cpython_tree(self):
        self.at.mkdir()
        self.assertRefused('is not a CPython source tree')

    @unittest.skipUnless(shutil.which('autoconf'), 'autoconf is not installed')
    def test_autoconf_that_is_too_old(self):
        self.make()
        with (self.at / 'configure.ac').open('a') as file:
            file.write('AC_PREREQ([99])\n')
        self.assertRefused('autoconf cannot make configure')
        self.call(overlay.apply, False)
        self.assertEqual(self.text('configure'), '#!/bin/sh\nold\n')

    def test_change_made_after_the_overlay(self):
        self.make()
        self.call(overlay.apply)
        with (self.at / 'Python/perf_file.c').open('a') as file:
            file.write('/* mine */\n')
        for function in overlay.apply, overlay.undo:
            self.assertRefused('Python/perf_file.c was changed after the overlay', function)

    def test_failure_to_write_any_file(self):
        """The Nth write fails, N = 0, 1, 2 ..., when it is put in and when it is taken out."""
        write = overlay.Tree.write
        for function in overlay.apply, overlay.undo:
            self.make()
            if function is overlay.undo:
                self.call(overlay.apply, False)
            for fails in range(200):
                numbers = iter(range(1000))
                def failing(tree, path, data, kept):
                    if next(numbers) == fails:
                        raise OSError('no space')
                    return write(tree, path, data, kept)
                before = self.contents()
                with mock.patch.object(overlay.Tree, 'write', failing), mock.patch.object(overlay, 'autoconf', lambda tree: b''):
                    try:
                        self.call(function)
                    except OSError:
                        self.assertEqual(self.contents(), before, fails)
                    else:
                        break
            self.assertGreater(fails, 20)
            self.assertNotEqual(self.contents(), before)


PRINT_EH_FRAME = '''
#include <stdint.h>
#include <stdio.h>
size_t _PyJitUnwind_BuildEhFrame(uint8_t *, size_t, const void *, size_t, int);
int main(void)
{
    uint8_t data[128] = {0};
    return fwrite(data, _PyJitUnwind_BuildEhFrame(data, sizeof(data), data, sizeof(data), 1), 1, stdout) != 1;
}
'''


class CoreTest(unittest.TestCase):
    """The core's files, compiled as CPython compiles its own, against the headers of each version."""

    VERSIONS = ('3.13', '3.14', '3.15') if FULL else ('3.15',)

    def compile(self, version, *flags):
        """{source: its object's defined symbols}"""
        with tempfile.TemporaryDirectory() as scratch:
            symbols = {}
            for source in overlay.SOURCES:
                subprocess.run(['gcc', *CORE_CFLAGS, '-Werror', f'-I{SOURCE}/Include/internal', *debian_python(version).include_flags, *flags,
                                '-c', SOURCE / source, '-o', f'{scratch}/object.o'], check=True)
                symbols[source] = set(subprocess.run(['nm', '-g', '--defined-only', '-j', f'{scratch}/object.o'], text=True,
                                                     check=True, stdout=subprocess.PIPE).stdout.split())
            return symbols

    # What CPython's remaining files call.
    ENTRY_POINTS = {
        'PyUnstable_PerfTrampoline_CompileCode', 'PyUnstable_PerfTrampoline_SetPersistAfterFork', '_PyIsPerfTrampolineActive',
        '_PyPerfTrampoline_AfterFork_Child', '_PyPerfTrampoline_Fini', '_PyPerfTrampoline_FreeArenas',
        '_PyPerfTrampoline_GetCallbacks', '_PyPerfTrampoline_Init', '_PyPerfTrampoline_SetCallbacks'}

    def test_core_without_warnings_and_its_names(self):
        for version in self.VERSIONS:
            with self.subTest(version):
                names = set().union(*self.compile(version).values())
                self.assertLess(self.ENTRY_POINTS | {'_Py_perfmap_callbacks', '_Py_perfmap_jit_callbacks'}, names)
                self.assertEqual({name for name in names if not name.startswith(('_Py', 'Py'))}, set())

    def test_what_the_jit_calls(self):
        names = self.compile('3.15', '-D_Py_JIT', '-D_Py_TIER2=3')
        self.assertLess({f'_PyJitUnwind_{name}' for name in (
            'EhFrameSize', 'BuildEhFrame', 'GdbRegisterCode', 'GdbUnregisterCode', 'GnuBacktraceRegisterCode',
            'GnuBacktraceUnregisterCode')} | {'__jit_debug_descriptor', '__jit_debug_register_code', '_Py_jit_debug_mutex'},
            names['Python/jit_unwind.c'])
        self.assertIn('_PyPerfJit_WriteNamedCode', names['Python/perf_cpython.c'])

    @unittest.skipUnless(archs.host() == archs.get('x86_64'), 'another processor')
    def test_frame_of_the_jit_ends_where_its_build_says(self):
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / 'main.c').write_text(PRINT_EH_FRAME)
            for end, flags in (16, []), (96, ['-DJIT_UNWIND_CFA_OFFSET=96']):
                subprocess.run(['gcc', *CORE_CFLAGS, '-D_Py_JIT', '-D_Py_TIER2=3', *flags, f'-I{SOURCE}/Include/internal',
                                *debian_python('3.15').include_flags, f'{scratch}/main.c', SOURCE / 'Python/jit_unwind.c',
                                SOURCE / 'Python/asm_trampoline_x86_64.S', '-no-pie', '-Wl,--unresolved-symbols=ignore-all', '-o', f'{scratch}/main'], check=True)
                printed = subprocess.run([f'{scratch}/main'], check=True, stdout=subprocess.PIPE).stdout
                self.assertEqual(eh_frame.rows(printed, 'little'), [eh_frame.Row(0, (6, end), {6: -end, 16: 8 - end})])

    def test_nothing_of_it_is_on_darwin(self):
        with tempfile.NamedTemporaryFile('w', suffix='.h') as darwin:
            darwin.write('#define __APPLE__ 1\n')
            darwin.flush()
            symbols = self.compile('3.15', '-D_Py_JIT', '-include', 'Python.h', '-include', 'pycore_ceval.h', '-include', 'pycore_interpframe.h',
                                   '-include', darwin.name)
            self.assertEqual(set().union(*symbols.values()), {'_PyPerf_FindCallbacks'})

    def test_stubs_where_configure_found_no_trampoline(self):
        with tempfile.NamedTemporaryFile('w', suffix='.h') as undefine:
            undefine.write('#undef PY_HAVE_PERF_TRAMPOLINE\n')
            undefine.flush()
            undefined = '-include', 'pyconfig.h', '-include', undefine.name
            for version in self.VERSIONS:
                with self.subTest(version):
                    symbols = self.compile(version, *undefined)
                    self.assertEqual(symbols.pop('Python/perf_cpython.c'), self.ENTRY_POINTS)
                    self.assertEqual(set().union(*symbols.values()), set())
            # The JIT is there without a trampoline.
            self.assertIn('_PyJitUnwind_GdbRegisterCode', self.compile('3.15', '-D_Py_JIT', *undefined)['Python/jit_unwind.c'])


def prepared(kind):
    try:
        return intree.build(kind)
    except roots.Unavailable as reason:
        raise unittest.SkipTest(str(reason)) from None


def in_private_tmp():
    """The command after which a program has a /tmp of its own."""
    return [*perf_support.unshare_mounts(), 'sh', '-c', 'mount -t tmpfs none /tmp && exec "$@"', 'sh']


def skips(output):
    return set(re.findall(r"(?m)^(test_\w+) \(.*\.\.\. skipped", output))


# What an installed interpreter gets from the package's start-up line, arguments and status, and CPython has not; and what
# is about other interpreters.
NOT_IN_CPYTHON = '''
    test_ignored_environment test_isolated_mode test_nothing_is_imported_when_nothing_is_switched_on
    test_interpreters_own_stays_where_it_is_wanted test_option_goes_before_variable test_default_backend_is_the_map
    test_functions_are_there_without_an_import test_wrong_arguments_raise_as_in_cpython
    test_activation_removes_what_is_a_week_old
    test_dwarf_stacks_are_whole_on_3_13 test_dwarf_stacks_are_whole_on_3_14 test_dwarf_stacks_are_whole_on_3_15
    test_frame_pointer_stacks_are_whole_on_3_15
'''.split()

ALL_BACKENDS = '''
import sys, types
def functions(prefix):
    plain = (lambda: None).__code__
    return [types.FunctionType(plain.replace(co_name='f', co_qualname=f'{prefix}_{i}'), {}) for i in range(3000)]
for backend in 'perf', 'perf_jit', 'perf_elf':
    sys.activate_stack_trampoline(backend)
    assert sys.is_stack_trampoline_active(), backend
    for function in functions(backend):
        function()
    sys.deactivate_stack_trampoline()
    assert not sys.is_stack_trampoline_active(), backend
'''

# Where a processor or a byte order could matter; the others test files and names.
EMULATED = ('test_perf_map.EntryTest', 'test_perf_jitdump.RecordTest', 'test_perf_elf_image.UnwindDataTest',
            'test_perf_elf_image.MappingTest', 'test_perf_trampoline.SysTest', 'test_perf_trampoline.ProgramsTest')

# Of the libraries that a cross build has not, elftools imports one for nothing.
OURS = '''
import importlib.util, sys, types, unittest
if importlib.util.find_spec('zlib') is None:
    sys.modules['zlib'] = types.ModuleType('zlib')
sys.path.insert(0, '{0}')
def tests(suite):
    for test in suite:
        yield from tests(test) if isinstance(test, unittest.TestSuite) else [test]
suite = unittest.defaultTestLoader.loadTestsFromNames({1!r})
chosen = unittest.TestSuite(test for test in tests(suite) if test.id().rpartition('.')[2] not in {2!r})
sys.exit(not unittest.TextTestRunner(verbosity=2).run(chosen).wasSuccessful())
'''

SIXTEEN_THREADS = '''
import sys, threading, types
assert not sys._is_gil_enabled()
plain = (lambda: None).__code__
sys.activate_stack_trampoline(sys.argv[1])
barrier = threading.Barrier(16)
shared = [types.FunctionType(plain.replace(co_name='f', co_qualname=f'shared_{i}'), {}) for i in range(500)]
def work(number):
    own = [types.FunctionType(plain.replace(co_name='f', co_qualname=f'own_{number}_{i}'), {}) for i in range(1500)]
    barrier.wait()
    for i, function in enumerate(own):
        function()
        shared[i % 500]()
    keep.append(own)
keep = []
threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
'''


@unittest.skipUnless(FULL, 'PERF_TRAMPOLINE_FULL is not 1')
class InTreeTest(unittest.TestCase):
    """CPython 3.13, built with the overlay."""

    def run_tests(self, build, *names):
        """In a /tmp of their own: they remove every perf map that is newer than they. With sid's perf: some leave out others."""
        with tempfile.TemporaryDirectory(dir='/var/tmp') as path:
            perf = Path(path, 'perf')
            perf.write_text(f'#!/bin/sh\nexec {shlex.join(roots.perf())} "$@"\n')
            perf.chmod(0o755)
            done = build.run('-m', 'test', '-v', *names, before=in_private_tmp(),
                             env=build.env | {'PATH': f'{path}:{build.env["PATH"]}'})
        self.assertEqual(done.returncode, 0, done.stdout[-5000:])
        return done.stdout

    def run_ours(self, build, *names):
        """Our tests of these names; the status that they ask for is the extension's, linked to that interpreter."""
        path = [SOURCE / 'Lib/test/perfdata/intree', '/usr/lib/python3/dist-packages']
        done = build.run('-c', OURS.format(SOURCE / 'Lib/test', names, NOT_IN_CPYTHON), program='python-status', cwd=SOURCE / 'Lib/test',
                         env=build.env | {'PYTHONPATH': os.pathsep.join(map(str, path))})
        self.assertEqual(done.returncode, 0, done.stdout[-5000:])
        self.assertRegex(done.stdout, r'(?m)^Ran [1-9]')

    def test_its_own_tests_of_the_trampoline(self):
        names = 'test_perf_profiler', 'test_perfmaps'
        ours = self.run_tests(prepared('native'), *names)
        plain = self.run_tests(prepared('plain'), *names)
        self.assertEqual(re.findall(r'(?m)^Ran (\d+) tests?', ours), re.findall(r'(?m)^Ran (\d+) tests?', plain))
        self.assertLessEqual(skips(ours), skips(plain))

    def test_its_tests_of_what_is_near(self):
        self.run_tests(prepared('native'), 'test_sys', 'test_embed', 'test_code', 'test_fork1', 'test_threading')

    def test_our_tests(self):
        self.run_ours(prepared('native'), 'test_perf_map', 'test_perf_jitdump', 'test_perf_trampoline', 'test_perf_elf_image')

    def test_its_checks(self):
        build = prepared('native')
        def contents():
            """Out of the source tree CPython's generators write their own paths into a comment."""
            return {path: re.sub(rb'(?m)^(?://|#) .*(?:generated by .*|bytecodes\.c)$', b'', path.read_bytes())
                    for path in build.source.rglob('*')
                    if path.is_file() and not {'__pycache__', overlay.KEPT} & {*path.relative_to(build.source).parts}}
        before = contents()
        for target in 'smelly', 'regen-all':
            # What configure found may be a launcher of Pythons that has none of that version, or one without pyelftools.
            done = subprocess.run(['make', target, f'PYTHON_FOR_REGEN={sys._base_executable}'], cwd=build.build, env=build.env,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.assertEqual(done.returncode, 0, done.stdout[-3000:])
        after = contents()
        self.assertEqual([path for path in after if after[path] != before.get(path)], [])
        # The analyzer wants a tree with pyconfig.h in it.
        shutil.copy(build.build / 'pyconfig.h', build.source)
        try:
            for source in overlay.SOURCES:
                done = build.run('Tools/c-analyzer/check-c-globals.py', '--format', 'summary', source, cwd=build.source)
                self.assertIn('total failures: 0', done.stdout)
        finally:
            (build.source / 'pyconfig.h').unlink()

    def test_sixteen_threads_without_the_gil(self):
        """Every function has its line in the map, and a slot of its own."""
        build = prepared('nogil')
        process = subprocess.Popen([*build.command(), '-c', SIXTEEN_THREADS, 'perf'], cwd=build.build, env=build.env)
        self.addCleanup(perf_support.remove_files, process.pid)
        self.assertEqual(process.wait(), 0)
        entries = [(name, start) for start, _, name in perf_support.map_entries(process.pid)
                   if re.match(r'py::(own|shared)_', name)]
        expected = [f'shared_{i}' for i in range(500)] + [f'own_{n}_{i}' for n in range(16) for i in range(1500)]
        self.assertEqual(sorted(name for name, _ in entries), sorted(f'py::{name}:<string>' for name in expected))
        self.assertEqual(len({start for _, start in entries}), len(entries))

    def test_sixteen_threads_under_thread_sanitizer(self):
        """The whole interpreter is built with it; what CPython knows of its own is suppressed, nothing of ours."""
        build = prepared('tsan')
        known = build.source / 'Tools/tsan/suppressions_free_threading.txt'
        self.assertNotRegex(known.read_text(), '(?m)^[^#]*(?i:perf|trampoline)')
        for backend in 'perf', 'perf_jit', 'perf_elf':
            with self.subTest(backend):
                process = subprocess.Popen([*build.command(), '-c', SIXTEEN_THREADS, backend], cwd=build.build, text=True,
                                           env=build.env | {'TSAN_OPTIONS': f'suppressions={known}'},
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                self.addCleanup(perf_support.remove_files, process.pid)
                self.assertEqual((process.communicate()[0], process.returncode), ('', 0))

    def test_other_architectures_under_an_emulator(self):
        for name in 's390x', 'riscv64':
            with self.subTest(name):
                build = prepared(name)
                done = build.run('-c', ALL_BACKENDS)
                self.assertEqual((done.returncode, done.stdout), (0, ''))
                self.run_ours(build, *EMULATED)

    def test_with_no_other_python_on_the_path(self):
        build = prepared('bare')
        found = subprocess.run(['sh', '-c', 'command -v python python3 python3.13'], env=build.env, capture_output=True)
        self.assertEqual(found.stdout, b'')
        self.assertRegex((build.build / 'Makefile').read_text(), r'(?m)^PYTHON_FOR_REGEN\?=\s*python3$')
        program = 'import os; print(open(f"/tmp/perf-{os.getpid()}.map").read())'
        done = build.run('-X', 'perf', '-c', program, before=in_private_tmp())
        self.assertRegex(done.stdout, r'(?m)^[0-9a-f]+ [0-9a-f]+ py::<module>:<string>$')


BACKTRACE = '''
set debuginfod enabled off
set startup-with-shell off
set environment PYTHON_JIT=1
catch syscall getpgid
run
delete 1
catch syscall getppid
ignore 2 1234
continue
backtrace
'''
IN_THE_JIT = '''
import os
def leaf(n):
    for i in range(n):
        i & 7
        os.getppid()
def middle(n):
    return leaf(n)
for _ in range(5): middle(20000)
os.getpgid(0)
middle(5000)
'''
BESIDE_THE_JIT = '''
import sys
print(sys._jit.is_enabled(), sys.is_stack_trampoline_active())
for backend in 'perf', 'perf_jit':
    try:
        print(sys.activate_stack_trampoline(backend))
    except ValueError as error:
        print(error)
'''


@unittest.skipUnless(FULL and archs.host() == archs.get('x86_64'), 'not PERF_TRAMPOLINE_FULL=1, or another processor')
class RelinkedTest(unittest.TestCase):
    """Debian's newer CPythons with the core linked in the place of their own, in a root of their own."""

    @classmethod
    def setUpClass(cls):
        packages = [name.format(version) for version in ('3.14', '3.15')
                    for name in ('python{}', 'libpython{}-dev', 'libpython{}-testsuite')]
        try:
            cls.root = roots.root('sid', 'amd64', [*packages, 'binutils', 'gdb', 'linux-perf'], 'relinked', keep_static=True)
        except roots.Unavailable as reason:
            raise unittest.SkipTest(str(reason)) from None
        for name in 'dev', 'proc', 'tmp':
            (cls.root / name).mkdir(exist_ok=True)

    def link(self, version, *plain):
        program = Path(tempfile.mktemp(prefix=f'python{version}-', dir=self.root / 'usr/bin'))
        self.addCleanup(program.unlink)
        subprocess.run(['sh', SOURCE / 'Tools/perf/relink.sh', version, self.root, program, *plain], check=True)
        return program.name

    def run_inside(self, *command, **env):
        """In the root, with a /tmp of its own that has IN_THE_JIT and BACKTRACE."""
        enter = '''
            root=$1; shift
            for folder in /dev /proc; do mount --rbind $folder $root$folder; done
            mount -t tmpfs none $root/tmp
            printf %s "$PROGRAM" >$root/tmp/program.py
            printf %s "$COMMANDS" >$root/tmp/commands
            exec chroot $root "$@"
        '''
        return subprocess.run([*perf_support.unshare_mounts(), 'sh', '-ec', enter, 'sh', self.root, *command], text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={'PATH': '/usr/sbin:/usr/bin', 'HOME': '/tmp', 'LC_ALL': 'C.UTF-8',
                                   'PROGRAM': IN_THE_JIT, 'COMMANDS': BACKTRACE} | env)

    def assertPassesAsPlain(self, version, num_tests, *names, **env):
        outputs = [self.run_inside(program, '-m', 'test', '-v', *names, **env).stdout
                   for program in (self.link(version), f'python{version}')]
        for output in outputs:
            self.assertIn('\nResult: SUCCESS', output)
            self.assertIn(f'\nTotal tests: run={num_tests}', output)
        self.assertLessEqual(skips(outputs[0]), skips(outputs[1]))
        return outputs[0]

    def test_its_own_tests_pass_on_3_14(self):
        self.assertPassesAsPlain('3.14', 16, 'test_perf_profiler', 'test_perfmaps')

    def test_its_own_tests_pass_on_3_15(self):
        output = self.assertPassesAsPlain('3.15', 18, 'test_perf_profiler', 'test_perfmaps')
        self.assertEqual(skips(output), set())

    def test_unwinding_through_the_jit(self):
        """backtrace() and by frame pointers."""
        self.assertPassesAsPlain('3.15', 3, 'test_c_stack_unwind', PYTHON_JIT='1')

    def test_gdb_walks_through_the_jit_as_ever(self):
        def backtrace(*plain):
            done = self.run_inside('gdb', '-q', '-nx', '-batch', '-x', '/tmp/commands', '--args', self.link('3.15', *plain),
                                   '/tmp/program.py')
            return re.findall(r'(?m)^#\d+ +0x\w+ in (.*)', done.stdout), done.stdout
        ours, output = backtrace()
        self.assertIn('py::jit:executor ()', ours, output)
        self.assertEqual(ours[-1], 'main ()')
        self.assertEqual(ours, backtrace('plain')[0])

    def test_jit_and_trampoline_exclude_each_other(self):
        def said(program):
            return [self.run_inside(program, *options, '-c', BESIDE_THE_JIT, PYTHON_JIT='1').stdout
                    for options in ([], ['-X', 'perf'], ['-X', 'perf_jit'])]
        ours = said(self.link('3.15'))
        self.assertIn('Cannot activate the perf trampoline if the JIT is active', ours[0])
        self.assertIn('JIT deactivated', ours[1])
        self.assertEqual(ours, said('python3.15'))


if __name__ == '__main__':
    unittest.main()
