"""Tools/perf/roots.py: what a root holds, what becomes of failed builds, and that its programs run here.

The first test on a machine downloads some 300 MB; afterwards all takes seconds.  Only a missing mirror skips a test.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'Tools/perf'))
import archs
import roots

EXTENSION = '''\
#define Py_BUILD_CORE 1
#include <Python.h>
#if PY_VERSION_HEX < 0x030e0000
#include <internal/pycore_frame.h>
#else
#include <internal/pycore_interpframe.h>
#endif
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer"};
PyMODINIT_FUNC PyInit_answer(void)
{
    PyObject *m = PyModule_Create(&module);
    return m != NULL && PyModule_AddIntConstant(m, "frame_size", sizeof(_PyInterpreterFrame)) < 0 ? NULL : m;
}
'''


def made(make, *arguments, **options):
    """What `make` returns; skips the test if this machine reaches no mirror."""
    try:
        return make(*arguments, **options)
    except roots.NoMirror as reason:
        raise unittest.SkipTest(str(reason)) from None


def output(*command, **options):
    return subprocess.run(command, text=True, capture_output=True, check=True, **options).stdout


def run(python, program):
    """What `program` prints, run by the roots.Python `python`."""
    return output(*python.command, '-c', program, env=python.env)


class PythonTests(unittest.TestCase):

    def test_sid_pythons_run_and_are_the_versions_they_claim(self):
        for version in '3.13', '3.14', '3.15':
            with self.subTest(version):
                python = made(roots.python, version)
                self.assertEqual(run(python, 'import sys; print(*sys.version_info[:3])'),
                                 '{} {} {}\n'.format(*python.version))
                self.assertEqual('%d.%d' % python.version[:2], version)

    def test_foreign_python_runs_under_qemu(self):
        python = made(roots.python, '3.15', arch='riscv64')
        self.assertEqual(run(python, 'import os, ssl, ctypes; print(os.uname().machine)'), 'riscv64\n')

    def test_executable_starts_the_same_python(self):
        program = '''import subprocess, sys; print(sys.executable); sys.stdout.flush()
subprocess.run([sys.executable, '-c', 'import sys; print(sys.executable)'], check=True)'''
        for arch in archs.host().name, 'riscv64':
            with self.subTest(arch):
                outer, inner = run(made(roots.python, '3.14', arch=arch), program).split()
                self.assertEqual(outer, inner)

    @unittest.skipUnless(shutil.which('gcc'), 'gcc is not installed')
    def test_extension_with_internal_headers_builds_and_imports(self):
        for version in '3.13', '3.14', '3.15':
            with self.subTest(version), tempfile.TemporaryDirectory() as directory:
                python = made(roots.python, version)
                output('gcc', '-shared', '-fPIC', '-Wall', '-Werror', *python.include_flags,
                       '-o', f'{directory}/answer{python.ext_suffix}', '-xc', '-', input=EXTENSION)
                output(*python.command, '-c', 'import answer; assert answer.frame_size', cwd=directory, env=python.env)

    def test_unknown_version_is_unavailable(self):
        for suite in None, 'sid':
            with self.subTest(suite=suite), self.assertRaisesRegex(roots.Unavailable, 'ython ?2.7'):
                made(roots.python, '2.7', suite)


class PerfTests(unittest.TestCase):

    def test_sid_perf_unwinds_with_libdw_only(self):
        options = output(*made(roots.perf), 'version', '--build-options')
        self.assertRegex(options, r'libdw-dwarf-unwind: \[ on  \]')
        self.assertRegex(options, r'libunwind: \[ OFF \]')


class UnknownTests(unittest.TestCase):

    def test_unknown_package_is_named(self):
        with self.assertRaisesRegex(roots.Unavailable, 'sid/.*no-such-package.*Unable to locate'):
            made(roots.root, 'sid', archs.host().debian, ['no-such-package'])


@unittest.skipUnless(shutil.which('dpkg-deb'), 'dpkg-deb is not installed')
class BuildTests(unittest.TestCase):
    """Builds from one package of our own, in a cache of their own, with apt's answers written here."""

    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.directory)))
        self.enterContext(mock.patch.object(roots, '_mirror', lambda: ('http://mirror.invalid/debian', '')))
        self.enterContext(mock.patch.object(roots, '_apt_get', self.apt_get))
        self.errors = []        # of the coming `apt-get install`s; none left: success
        self.calls = []
        tree = self.directory / 'tree'
        for file in 'lib/old', 'usr/lib/new', 'usr/lib/static.a', 'usr/share/man/man1/page', 'DEBIAN/control':
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            (tree / file).write_text('Package: p\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: d\n')
        (tree / 'usr/lib/link').symlink_to('/lib/old')
        output('dpkg-deb', '--build', tree, self.directory / 'p.deb')

    def apt_get(self, home, command, *arguments, cwd):
        self.calls.append(command)
        if command == 'install':
            if self.errors:
                return self.errors.pop(0)
            shutil.copy(self.directory / 'p.deb', home / 'work/debs')

    def build(self, **options):
        return roots.root('sid', 'riscv64', ['p'], **options)

    def assertNothingLeft(self):
        self.assertEqual([*roots.cache().glob('roots/*'), *roots.cache().glob('apt/*/work')], [])

    def test_files_of_either_usr_layout_are_in_usr(self):
        at = self.build()
        self.assertEqual(sorted(os.listdir(at / 'usr/lib')), ['link', 'new', 'old'])
        self.assertEqual(os.readlink(at / 'lib'), 'usr/lib')

    def test_absolute_links_stay_in_the_root(self):
        at = self.build()
        self.assertTrue((at / 'usr/lib/link').samefile(at / 'usr/lib/old'))

    def test_static_libraries_are_kept_on_demand(self):
        self.assertTrue((self.build(keep_static=True) / 'usr/lib/static.a').exists())

    def test_manual_pages_are_left_out(self):
        self.assertFalse((self.build() / 'usr/share/man').exists())

    def test_only_unpacks_nothing_else(self):
        self.assertEqual(os.listdir(self.build(only=['./usr/lib/new']) / 'usr/lib'), ['new'])

    def test_a_root_is_made_once(self):
        self.assertEqual(self.build(), self.build())
        self.assertEqual(self.calls, ['update', 'install'])

    def test_two_builders_make_one_root(self):
        threads = [threading.Thread(target=self.build) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.calls, ['update', 'install'])

    def test_downloads_are_deleted(self):
        self.build()
        self.assertEqual([*roots.cache().glob('**/*.deb')], [])

    def test_interrupted_build_leaves_nothing(self):
        unpack = roots._unpack
        def interrupted(*arguments):
            unpack(*arguments)
            raise KeyboardInterrupt
        with mock.patch.object(roots, '_unpack', interrupted), self.assertRaises(KeyboardInterrupt):
            self.build()
        self.assertNothingLeft()

    def test_remains_of_a_killed_run_are_cleared(self):
        remains = roots.cache() / 'apt/sid-riscv64/work/root/usr/lib/half'
        remains.mkdir(parents=True)
        self.assertFalse((self.build() / 'usr/lib/half').exists())

    def test_vanished_version_refreshes_the_index_once(self):
        self.errors = ['Failed to fetch p.deb  404  Not Found']
        self.build()
        self.assertEqual(self.calls, ['update', 'install', 'update', 'install'])

    def test_lasting_failure_is_unavailable_and_leaves_nothing(self):
        self.errors = ['Failed to fetch p.deb  404  Not Found'] * 2
        with self.assertRaisesRegex(roots.Unavailable, 'sid/riscv64 root with p is unavailable: .*404'):
            self.build()
        self.assertNothingLeft()

    def test_index_is_refreshed_after_a_week(self):
        self.build()
        os.utime(roots.cache() / 'apt/sid-riscv64/refreshed', (0, 0))
        self.build(keep_static=True)
        self.assertEqual(self.calls, ['update', 'install'] * 2)


@unittest.skipUnless(shutil.which('apt-get'), 'apt is not installed')
class MirrorTests(unittest.TestCase):

    def mirror(self, name, sources):
        """roots._mirror() on a machine with these apt sources."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (directory / 'etc/apt/sources.list.d').mkdir(parents=True)
        (directory / 'etc/apt' / name).write_text(sources)
        (directory / 'conf').write_text(f'Dir "{directory}"; Acquire::http::Proxy "http://proxy.invalid/";')
        with mock.patch.dict(os.environ, APT_CONFIG=str(directory / 'conf')):
            return roots._mirror()

    def test_one_line_sources(self):
        sources = '# deb http://old.invalid/debian sid main\ndeb http://mirror.invalid/debian sid main contrib\n'
        self.assertEqual(self.mirror('sources.list', sources)[0], 'http://mirror.invalid/debian')

    def test_deb822_sources_and_other_repositories(self):
        sources = '\n'.join(f'Types: deb\nURIs: http://{uri}\nSuites: stable\nComponents: {component}\n'
                            for uri, component in [('other.invalid/linux/debian', 'stable'),
                                                   ('mirror.invalid/debian-security', 'main'),
                                                   ('mirror.invalid/debian', 'main')])
        self.assertEqual(self.mirror('sources.list.d/some.sources', sources)[0], 'http://mirror.invalid/debian')

    def test_proxy_is_kept(self):
        self.assertEqual(self.mirror('sources.list', 'deb http://mirror.invalid/debian sid main\n')[1],
                         'Acquire::http::Proxy "http://proxy.invalid/";')

    def test_no_debian_source_is_no_mirror(self):
        with self.assertRaisesRegex(roots.NoMirror, 'no Debian mirror'):
            self.mirror('sources.list', 'deb http://other.invalid/repository stable main\n')


if __name__ == '__main__':
    unittest.main()
