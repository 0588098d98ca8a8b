"""configure, make, install, pip: on this machine's interpreter, in folders of their own."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
PYTHON = Path(sys._base_executable)
WARNINGS = "-Wall -Wextra -Werror"


def run(*command, cwd, status=0, **variables):
    """Run a command, without what an outer make or user has set; return its output."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("MAKE", "PYTHON", "PERF_")) and not name.endswith("FLAGS") and name != "TESTS"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment | variables, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if bool(done.returncode) != bool(status):
        raise AssertionError(f"{command} in {cwd} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def files(directory):
    """Everything below that is not a folder; Python's caches do not count."""
    return {path.relative_to(directory) for path in directory.rglob("*")
            if not path.is_dir() and "__pycache__" not in path.parts}


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class BuildTestCase(unittest.TestCase):
    """A copy of the source and an empty folder `build`, in a scratch folder."""

    @classmethod
    def folders(cls, owner, add_cleanup):
        scratch = tempfile.TemporaryDirectory()
        add_cleanup(scratch.cleanup)
        owner.scratch = Path(scratch.name)
        owner.source = owner.scratch / "source"
        shutil.copytree(SOURCE, owner.source, symlinks=True,
                        ignore=lambda folder, names: {".git", "build", "__pycache__"} & set(names))
        if (owner.source / "config.status").exists():
            run("make", "distclean", cwd=owner.source)
        owner.build = owner.scratch / "build"
        owner.build.mkdir()

    def setUp(self):
        self.folders(self, self.addCleanup)

    def configure(self, *arguments, status=0, python=PYTHON, **variables):
        return run(self.source / "configure", f"--with-python={python}", *arguments,
                   cwd=self.build, status=status, **variables)

    def make(self, *arguments, status=0):
        return run("make", f"-j{os.cpu_count()}", *arguments, cwd=self.build, status=status)

    def python(self, code):
        return run("./python", "-c", code, cwd=self.build)

    def extension(self):
        [extension] = self.build.glob("lib/python*/site-packages/perf_trampoline/_perf_trampoline.*.so")
        return extension


class OneBuildTest(BuildTestCase):
    """What all can be asked of one build."""

    @classmethod
    def setUpClass(cls):
        cls.folders(cls, cls.addClassCleanup)
        cls.before = files(cls.source)
        cls.configured = cls.configure(cls)
        cls.make(cls)

    def setUp(self):
        pass

    def test_build_leaves_the_source_alone(self):
        self.assertEqual(files(self.source), self.before)

    def test_second_make_does_nothing(self):
        self.assertIn("Nothing to be done", self.make())

    def test_python_is_the_interpreter_with_the_package(self):
        self.assertEqual(self.python("import sys; print(sys.prefix, sys.base_prefix)").split(),
                         [str(self.build), sys.base_prefix])
        self.assertIn(str(self.build), self.python("import perf_trampoline as p; print(p.__file__)"))

    def test_a_copied_build_still_runs(self):
        copy = shutil.copytree(self.build, self.scratch / "copy", symlinks=True)
        self.assertIn(str(copy), run("./python", "-c", "import perf_trampoline as p; print(p.__file__)", cwd=copy))

    def test_make_uninstall_removes_all_that_install_put(self):
        destination = self.scratch / "destination"
        self.make("install", f"DESTDIR={destination}")
        self.assertEqual({path.name for path in files(destination)}, {path.name for path in files(self.extension().parents[1])} | {"perf-trampoline", "perf-trampoline.1"})
        self.assertLessEqual({self.extension().name, "__init__.py", "perf_trampoline.pth"},
                             {path.name for path in files(destination)})
        self.make("uninstall", f"DESTDIR={destination}")
        self.assertEqual(files(destination), set())

    def test_installs_where_the_interpreter_looks(self):
        [directory] = re.findall("installs in: +(.*)", self.configured)
        self.assertIn(directory, run(PYTHON, "-c", "import site; print(site.getsitepackages())", cwd=self.build))

    def test_missing_pyelftools_stops_only_the_generator(self):
        output = self.make("check-perf-trampoline", "PYTHON_FOR_REGEN=", status=1)
        self.assertIn("this needs pyelftools: install python3-pyelftools", output)
        self.make("PYTHON_FOR_REGEN=")


class StaleTest(BuildTestCase):

    def test_unwind_data_of_another_trampoline_is_not_used(self):
        for header in self.source.glob("Include/internal/pycore_perf_eh_frame_*_generated.h"):
            text = header.read_text()
            header.write_text(re.sub(r"(perf_trampoline_code\[\] = \{\s*)0x..", r"\g<1>0x90", text))
            self.assertNotEqual(header.read_text(), text)
        self.configure()
        self.make()
        self.assertEqual(run("./python", "-X", "perf", "-c", "import sys; print(sys.is_stack_trampoline_active())",
                             cwd=self.build),
                         "perf trampoline: perf trampoline not available: the trampoline in this build is not the one that "
                         "its unwind data was made from: run make regen-perf-trampoline, then make\nFalse\n")


class CompilerTest(BuildTestCase):
    def check(self, cc, cflags=""):
        if not shutil.which(cc):
            self.skipTest(f"no {cc}")
        self.assertIn("perf trampoline:  on", self.configure(f"CC={cc}", f"CFLAGS=-O2 -g {WARNINGS} {cflags}"))
        self.assertNotIn("warning", self.make())
        self.python("import perf_trampoline._perf_trampoline")

        exported = run("readelf", "--dyn-syms", "--wide", self.extension(), cwd=self.build)
        names = re.findall(r"(?:GLOBAL|WEAK) +\w+ +\d+ (\S+)", exported)
        self.assertEqual(sorted(names), ["PyInit__perf_trampoline", "perf_trampoline_run"])
        segments = run("readelf", "--segments", "--wide", self.extension(), cwd=self.build)
        self.assertRegex(segments, r"GNU_STACK .* RW +0x")
        self.assertNotIn("RWE", segments)

    def test_gcc_is_silent(self):
        self.check("gcc")

    def test_clang_is_silent(self):
        self.check("clang")

    def test_link_time_optimisation(self):
        self.check("gcc", "-O3 -flto")

    def test_hardened_as_distributions_build(self):
        self.check("gcc", "-fstack-protector-strong -fstack-clash-protection -D_FORTIFY_SOURCE=2 -Wformat-security")

    def test_flags_of_the_user_do_not_win_over_the_needed_ones(self):
        self.check("gcc", "-fomit-frame-pointer -fvisibility=default")


class OtherWaysTest(BuildTestCase):
    def test_distclean_after_a_build_in_the_source_gives_the_checkout_back(self):
        before = files(self.source)
        self.build = self.source
        self.configure()
        self.make()
        self.python("import perf_trampoline._perf_trampoline")
        self.make("distclean")
        self.assertEqual(files(self.source), before)

    def test_committed_configure_is_fresh(self):
        if not shutil.which("autoconf") or "2.71" not in run("autoconf", "--version", cwd=self.source):
            self.skipTest("no autoconf 2.71")
        before = (self.source / "configure").read_text()
        run("make", "-f", "Makefile.pre.in", "srcdir=.", "regen-configure", cwd=self.source)
        self.assertEqual((self.source / "configure").read_text(), before, "mend it with: make regen-configure")

    def test_make_install_into_a_virtual_environment(self):
        """Its own directories, and a command that its own interpreter runs."""
        if not find_spec("venv"):
            self.skipTest("no venv")
        environment = self.scratch / "venv"
        run(PYTHON, "-m", "venv", "--without-pip", environment, cwd=self.scratch)
        before = files(environment)
        self.configure(python=environment / "bin/python")
        self.make()
        self.make("install")
        self.assertIn("active        False", run(environment / "bin/perf-trampoline", "status", cwd=self.scratch))
        self.assertTrue((environment / "share/man/man1/perf-trampoline.1").exists())
        self.make("uninstall")
        self.assertEqual(files(environment), before)

    def test_pip_uninstall_removes_all_that_install_put(self):
        for module in "setuptools", "wheel", "venv", "ensurepip":
            if not find_spec(module):
                self.skipTest(f"no {module}")
        before = files(self.source)
        run(PYTHON, "-m", "venv", "--system-site-packages", "venv", cwd=self.scratch)
        python = self.scratch / "venv/bin/python"
        run(python, "-m", "pip", "install", "--no-index", "--no-build-isolation", self.source, cwd=self.scratch)
        run(python, "-c", "import perf_trampoline._perf_trampoline", cwd=self.scratch)
        self.assertEqual(files(self.source), before)
        self.assertTrue(list(self.scratch.glob("venv/lib/python*/site-packages/perf_trampoline.pth")))
        run(python, "-m", "pip", "uninstall", "--yes", "perf-trampoline", cwd=self.scratch)
        self.assertEqual(list(self.scratch.glob("venv/**/*perf_trampoline*")), [])


class DebianTest(BuildTestCase):
    @unittest.skipUnless(shutil.which("dpkg-buildpackage") and shutil.which("lintian"), "no dpkg-dev and lintian")
    def test_package_builds_and_lintian_has_no_error(self):
        if PYTHON.parent != Path("/usr/bin"):
            self.skipTest("the package is for Debian's interpreters")
        run("dpkg-buildpackage", "-us", "-uc", "-b", cwd=self.source)
        changes, = self.scratch.glob("*.changes")
        self.assertNotRegex(run("lintian", "--allow-root", "--fail-on", "error", changes, cwd=self.scratch), "(?m)^[EW]:")
        package, = self.scratch.glob("python3-perf-trampoline_*.deb")
        run("dpkg", "-x", package, "root", cwd=self.scratch)
        root = self.scratch / "root/usr"
        self.assertEqual((root / "bin/perf-trampoline").read_text().splitlines()[0], "#!/usr/bin/python3")
        self.assertIn("can there be trampolines", run(
            PYTHON, root / "bin/perf-trampoline", "--help", cwd=self.scratch, PYTHONPATH=str(root / "lib/python3/dist-packages")))
        run("fakeroot", "debian/rules", "clean", cwd=self.source)
        self.assertFalse([name for name in os.listdir(self.source) if name.startswith("build-")])


class UnsupportedTest(BuildTestCase):
    def test_unknown_architecture_builds_with_the_feature_off(self):
        """The compiler claims to be for each of these, then compiles for this machine."""
        if not shutil.which("clang"):
            self.skipTest("no clang, which knows many architectures")
        for triplet in "x86_64-linux-gnux32", "powerpc64-linux-gnu", "riscv32-linux-gnu", "i686-linux-gnu":
            with self.subTest(triplet):
                cc = script(self.scratch / "cc", f"""
                    case " $* " in *" -E "*|*dumpmachine*) exec clang --target={triplet} "$@" ;; esac
                    exec gcc "$@" """)
                self.assertRegex(self.configure(f"CC={cc}", f"CFLAGS=-O2 {WARNINGS}"),
                                 r"perf trampoline:  off \(no trampoline for " + triplet.split("-")[0])
        self.assertNotIn("warning", self.make())
        self.python("import perf_trampoline._perf_trampoline")

    def test_half_a_port_builds_with_the_feature_off(self):
        for header in self.source.glob("Include/internal/pycore_perf_eh_frame_*_generated.h"):
            header.unlink()
        self.assertRegex(self.configure(), r"perf trampoline:  off \(no generated header for .* make regen-perf-trampoline")
        self.make()

    def test_assembler_without_unwind_data_builds_with_the_feature_off(self):
        cc = script(self.scratch / "cc", """case "$*" in *.S*) exit 1 ;; esac; exec gcc "$@" """)
        self.assertRegex(self.configure(f"CC={cc}"), r"perf trampoline:  off \(.* does not assemble")
        self.make()


class RefusalTest(BuildTestCase):
    """Each ends configure with one sentence that says what to do."""

    def refusal(self, *arguments, **keywords):
        output = self.configure(*arguments, status=1, **keywords)
        [sentence] = re.findall("^configure: error: (.*)", output, re.MULTILINE)
        self.assertTrue(output.endswith(sentence + "\n"), output)
        return sentence

    def pretend(self, statement):
        """An interpreter for which `statement` was executed before configure's questions."""
        return script(self.scratch / "pretender", f"""exec {PYTHON} -c "import sys; {statement}; exec(sys.argv[1])" "$2" """)

    def test_old_python(self):
        self.assertRegex(self.refusal(python=self.pretend("sys.version_info = (3, 10, 13)")),
                         r"is Python 3\.10 .*CPython 3\.11 or later is needed\.")

    def test_other_implementation(self):
        self.assertRegex(self.refusal(python=self.pretend("sys.implementation.name = 'pypy'")),
                         r"\(pypy\): CPython 3\.11 or later is needed\.")

    def test_no_such_python(self):
        self.assertIn("there is no interpreter", self.refusal(python="/nowhere/python3"))

    def test_python_that_does_not_run(self):
        self.assertIn("set PYTHON_RUN", self.refusal(python=script(self.scratch / "python", "exit 1")))

    def test_missing_headers(self):
        self.assertRegex(self.refusal(f"--with-python-headers={self.scratch}"), r"Python\.h is missing: install python3.*-dev")
        (self.scratch / "Python.h").touch()
        self.assertIn("internal/pycore_frame.h is missing", self.refusal(f"--with-python-headers={self.scratch}"))


if __name__ == "__main__":
    unittest.main()
