"""`pip install .` is configure and make for the interpreter that runs this."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parent
VERSION = re.search(r"AC_INIT\(\[perf-trampoline\], \[(.+?)\]\)", (SOURCE / "configure.ac").read_text())[1]


class configure_and_make(build_ext):
    def run(self):
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        for command in [SOURCE / "configure", f"--with-python={sys.executable}"], ["make", f"-j{os.cpu_count()}"]:
            if status := subprocess.run(command, cwd=build).returncode:
                sys.exit(status)
        # PERF_TRAMPOLINE_VIEWER=1: with the viewer of HTML pages, which npm fetches.
        if os.environ.get("PERF_TRAMPOLINE_VIEWER") == "1" and (status := subprocess.run(["make", "viewer"], cwd=build).returncode):
            sys.exit(status)
        [site_packages] = build.glob("lib/python*/site-packages")
        shutil.copytree(site_packages, self.build_lib, dirs_exist_ok=True)


# Nothing is written into the source tree, whose build/ is the developer's.
with tempfile.TemporaryDirectory() as scratch:
    setup(
        version=VERSION,
        packages=[],
        ext_modules=[Extension("perf_trampoline._perf_trampoline", [])],
        cmdclass={"build_ext": configure_and_make},
        options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}},
    )
