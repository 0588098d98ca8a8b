#!/usr/bin/env python3
"""Debian roots: packages of any suite and architecture, unpacked where any user may run and link against them.

    roots.py list                               the roots that exist, with their sizes
    roots.py root SUITE DEBIAN-ARCH PACKAGE...  make a root and print its path
    roots.py python VERSION ARCH [-- ARG...]    run that interpreter, natively or under qemu-user
    roots.py perf SUITE [-- ARG...]             run that suite's perf on this machine
    roots.py source SUITE PACKAGE               unpack a source package and print its path
    roots.py clean                              remove everything

All files are below `cache()`; the machine's own apt is asked only for its mirror and proxy.  Each suite and
architecture has a private apt directory, so apt(8) resolves, downloads and verifies as an ordinary user.  Maintainer
scripts never run.  A root is made once and does not follow its suite; `clean` is how to get newer packages.
"""
import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import archs

FORMAT = 1                                      # part of every root's key: raise it when _unpack() changes
INDEX_LIFETIME = 7 * 24 * 3600                  # seconds
PYTHONS = {'sid': ('3.13', '3.14', '3.15'), 'bookworm': ('3.11',)}      # one root holds all of a suite
TRIM = [f'./usr/share/{d}' for d in ('doc', 'info', 'lintian', 'locale', 'man')]

# The index of a mirror, and the clock of a test machine, may well be some weeks old.
APT_CONF = '''\
Dir "{home}/";
Dir::State::status "{home}/status";
Dir::Cache::Archives "{home}/work/debs";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Architecture "{arch}";
APT::Architectures {{ "{arch}"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Check-Date "false";
Acquire::Check-Valid-Until "false";
Acquire::GzipIndexes "true";
Acquire::Languages "none";
Debug::NoLocking "true";
{proxies}
'''
SOURCE = '{kind} [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} {suite} main\n'


class Unavailable(Exception):
    """A root cannot be had; the message is one sentence."""


class NoMirror(Unavailable):
    """... because this machine has no Debian mirror, or does not reach it."""


def cache():
    """The directory of everything this module writes; it need not exist yet."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'perf-trampoline'


def root(suite, debian_arch, packages, name=None, keep_static=False, only=(), leave_out=()):
    """Return the Path of a root of `packages` and what they depend on, making it if need be.

    `name` labels the directory.  Static libraries are left out unless `keep_static`.  If `only` lists tar patterns
    (`*/qemu-s390x`) nothing else is unpacked, nor is what those in `leave_out` match.  Raises Unavailable, or
    CalledProcessError (no space, say); neither these nor a killed run leave half a root.
    """
    packages = sorted(set(packages))
    key = hashlib.sha256(repr((FORMAT, packages, keep_static, [*only], *leave_out)).encode()).hexdigest()[:8]
    target = cache() / 'roots' / f'{suite}-{debian_arch}-{name or packages[0]}-{key}'
    if target.exists():
        return target
    home = cache() / 'apt' / f'{suite}-{debian_arch}'
    work = home / 'work'
    with _locked(home):
        if target.exists():                     # made by the process we waited for
            return target
        shutil.rmtree(work, ignore_errors=True)                         # a killed run's
        try:
            _download(home, suite, debian_arch, packages)
            _unpack(work / 'debs', work / 'root', keep_static, only, leave_out)
            target.parent.mkdir(exist_ok=True)
            (work / 'root').rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def source(suite, package):
    """Return the Path of the unpacked source of `package`, with Debian's patches, fetching it if need be.

    It is nobody's to change: build outside it, or in a copy.  Raises as root() does.
    """
    target = cache() / 'sources' / f'{suite}-{package}'
    if target.exists():
        return target
    if not shutil.which('dpkg-source'):
        raise Unavailable('unpacking a source package needs dpkg-source: install dpkg-dev')
    home = cache() / 'apt' / f'{suite}-source'
    work = home / 'work'
    with _locked(home):
        if target.exists():
            return target
        shutil.rmtree(work, ignore_errors=True)
        try:
            _download(home, suite, _arch(None).debian, [package], 'deb-src')
            dsc = next((work / 'debs').glob('*.dsc'))
            subprocess.run(['dpkg-source', '--no-check', '-x', dsc, work / 'tree'], check=True, stdout=subprocess.DEVNULL)
            target.parent.mkdir(exist_ok=True)
            (work / 'tree').rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


@contextlib.contextmanager
def _locked(home):
    home.mkdir(parents=True, exist_ok=True)
    with open(home / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(home, suite, arch, packages, kind='deb'):
    """Fill `home`/work/debs with verified packages, refreshing an old index; needs the lock of `home`."""
    debs = home / 'work/debs'
    for directory in 'etc/apt', 'var/lib/apt/lists/partial', 'work/debs/partial':
        (home / directory).mkdir(parents=True, exist_ok=True)
    mirror, proxies = _mirror()
    (home / 'apt.conf').write_text(APT_CONF.format(home=home, arch=arch, proxies=proxies))
    (home / 'etc/apt/sources.list').write_text(SOURCE.format(kind=kind, mirror=mirror, suite=suite))
    (home / 'status').touch()
    refreshed = home / 'refreshed'

    def apt_get(not_fetched, *arguments):
        if error := _apt_get(home, *arguments, cwd=debs):
            failure = not_fetched if error.startswith('Failed to fetch') else Unavailable
            what = 'source of' if kind == 'deb-src' else f'{arch} root with'
            raise failure(f'{suite}/{what} {" ".join(packages)} is unavailable: {error}')

    def refresh():
        apt_get(NoMirror, 'update')
        refreshed.touch()

    if not refreshed.exists() or time.time() - refreshed.stat().st_mtime > INDEX_LIFETIME:
        refresh()
    install = 'source' if kind == 'deb-src' else 'install', '--download-only', *packages
    try:
        apt_get(LookupError, *install)
    except LookupError:                         # the mirror has replaced a version that our index still names
        refresh()
        apt_get(Unavailable, *install)


def _apt_get(home, *arguments, cwd):
    """Run apt-get in `home`, which leaves sources in `cwd`.

    Returns None or its first error, which names the cause; the later ones give advice.
    """
    run = subprocess.run(['apt-get', '-qy', *arguments], text=True, capture_output=True, stdin=subprocess.DEVNULL, cwd=cwd,
                         env=os.environ | {'APT_CONFIG': str(home / 'apt.conf'), 'LC_ALL': 'C'})
    if run.returncode:
        cause = re.search(r'(?m)^E: (.*\S)', run.stderr)
        return cause[1] if cause else f'apt-get exited with {run.returncode}'


def _mirror():
    """The Debian mirror of this machine's apt sources, whatever their syntax, and its proxy settings for apt.conf."""
    if not shutil.which('apt-get'):
        raise NoMirror('this machine has no apt-get')
    def output(*command):
        return subprocess.run(command, text=True, capture_output=True, check=True).stdout
    uris = output('apt-get', 'update', '--print-uris')
    mirror = re.search(r"'(\S+/debian(\.list|/\d{8}T\d{6}Z)?)/dists/[^/]+/main/", uris)   # plain, list, snapshot
    if not mirror:
        raise NoMirror("this machine's apt sources name no Debian mirror")
    return mirror[1], '\n'.join(re.findall(r'(?m)^Acquire::\S+::Proxy\S* ".+";$', output('apt-config', 'dump')))


def _unpack(debs, into, keep_static, only, leave_out):
    """Unpack `debs`/*.deb into the new root `into`, with /usr merged wherever the packages put their files."""
    for directory in 'bin', 'sbin', 'lib', 'lib64':
        (into / 'usr' / directory).mkdir(parents=True)
        (into / directory).symlink_to(f'usr/{directory}')
    left_out = [*TRIM, *([] if keep_static else ['*.a']), *leave_out]
    tar = ['tar', '-x', '-C', into, '--no-same-owner', '--keep-directory-symlink',
           *(f'--exclude={pattern}' for pattern in left_out), '--wildcards', *only]
    for deb in sorted(debs.glob('*.deb')):
        with subprocess.Popen(['dpkg-deb', '--fsys-tarfile', deb], stdout=subprocess.PIPE) as archive:
            subprocess.run(tar, stdin=archive.stdout, check=True)
    for path in into.rglob('*'):
        if path.is_symlink() and os.path.isabs(destination := os.readlink(path)):   # would lead to the host's files
            path.unlink()
            path.symlink_to(os.path.relpath(f'{into}{destination}', path.parent))


def _arch(name):
    """The table's line for `name`, or for this machine if it is None."""
    arch = archs.get(name) if name else archs.host()
    if not arch:
        raise Unavailable(f'{archs.TABLE.name} has no line for this machine')
    return arch


def _command(at, arch, program, argv0):
    """The command that runs `program` of root `at`; arguments are to follow.

    A native program gets its own loader and libraries, because the host's C library may be older than it needs.
    perf calls such a process by the loader's name, and its symbols by the program's.
    """
    if arch == archs.host():
        libraries = next(at.glob('usr/lib/*/libc.so.6')).parent
        runner = [next(libraries.glob('ld*.so.*')), '--library-path', libraries, '--argv0']
    else:
        runner = [qemu(arch.name), '-L', at, '-0']
    return [*map(str, runner), str(argv0), str(program)]


def _launcher(at, arch, program):
    """The path of a script beside `program` that runs it as any program is run."""
    script = program.with_name(f'run-{program.name}')
    if not script.exists():
        *runner, _, program = map(shlex.quote, _command(at, arch, program, ''))
        draft = script.with_name(f'{script.name}-{os.getpid()}')       # another process may be doing the same
        draft.write_text(f'#!/bin/sh\nexec {" ".join(runner)} "$0" {program} "$@"\n')
        draft.chmod(0o755)
        draft.rename(script)
    return script


def command(at, arch, program):
    """The command that runs `program` of root `at`, which starts itself again by its sys.executable."""
    return _command(at, arch, program, _launcher(at, arch, program))


def qemu(name):
    """The path of a static qemu-user for the architecture `name`."""
    programs = [f'./usr/bin/{arch.qemu_user}' for arch in archs.load().values()]
    return str(root('sid', _arch(None).debian, ['qemu-user'], only=programs) / 'usr/bin' / _arch(name).qemu_user)


@dataclass(frozen=True)
class Python:
    """An interpreter in a root, native or foreign."""
    root: Path
    program: Path
    version: tuple          # (3, 15, 2)
    command: list           # runs it; arguments are to follow
    include_flags: list     # for a compiler: public and internal headers; its own C library comes first
    ext_suffix: str         # '.cpython-315-riscv64-linux-gnu.so'

    @property
    def env(self):
        """The environment without what would lead it to another interpreter's files."""
        return {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'LD_'))}


def python(version, suite=None, arch=None):
    """Return the Python `version` ('3.15'; '3.15d' is its debug build) for `arch` (this machine's), of `suite` (the one known
    to have it).

    Its sys.executable is a script that starts it again, so subprocess, multiprocessing and venv work.
    """
    plain = version.removesuffix('d')
    suite = suite or next((suite for suite, versions in PYTHONS.items() if plain in versions), None)
    if not suite:
        raise Unavailable(f'no suite is known to have Python {plain}')
    arch = _arch(arch)
    versions = PYTHONS.get(suite, ())
    if version not in versions:
        versions = [plain]
    packages = [name for v in versions for name in (f'python{v}', f'libpython{v}-dev')]
    if version != plain:
        packages += [f'python{plain}-dbg', f'libpython{plain}-dbg']
    at = root(suite, arch.debian, packages, 'python')
    program = at / f'usr/bin/python{version}'
    headers = at / f'usr/include/python{version}'
    sysconfig = next(at.glob(f'usr/lib/python{plain}/_sysconfigdata_{version[len(plain):]}_*.py'))
    release = re.search(r'PY_VERSION\s+"(\d+)\.(\d+)\.(\d+)', (headers / 'patchlevel.h').read_text())
    return Python(
        root=at,
        program=program,
        version=tuple(map(int, release.groups())),
        command=command(at, arch, program),
        include_flags=[f'-I{headers}', f'-I{headers}/internal', '-idirafter', f'{at}/usr/include'],
        ext_suffix=re.search(r"'EXT_SUFFIX': '(.+?)'", sysconfig.read_text())[1])


def tool(program, package, suite='sid', name=None):
    """Return the command that runs `program` of a Debian package on this machine; it sees the machine's own files."""
    path = root(suite, _arch(None).debian, [package], name=name) / 'usr/bin' / program
    return _command(path.parents[2], _arch(None), path, argv0=path)


def perf(suite='sid'):
    """Return the command that runs the perf of `suite` on this machine."""
    return tool('perf', 'linux-perf', suite, name='perf')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    for name, arguments in {'list': '', 'root': 'suite arch package+', 'python': 'version arch arg*',
                            'perf': 'suite arg*', 'source': 'suite package', 'clean': ''}.items():
        command = commands.add_parser(name)
        for argument in arguments.split():
            command.add_argument(argument.rstrip('+*'), nargs=argument[-1] if argument[-1] in '+*' else None)
    options = parser.parse_args()
    match options.command:
        case 'list':
            for at in sorted((cache() / 'roots').glob('*')):
                print(subprocess.run(['du', '-shx', at], text=True, stdout=subprocess.PIPE).stdout, end='')
        case 'root':
            print(root(options.suite, options.arch, options.package))
        case 'source':
            print(source(options.suite, options.package))
        case 'python':
            it = python(options.version, arch=options.arch)
            os.execve(it.command[0], [*it.command, *options.arg], it.env)
        case 'perf':
            command = perf(options.suite)
            os.execv(command[0], [*command, *options.arg])
        case 'clean':
            shutil.rmtree(cache(), ignore_errors=True)


if __name__ == '__main__':
    try:
        main()
    except (Unavailable, archs.Refusal) as error:
        sys.exit(f'roots.py: {error}')
