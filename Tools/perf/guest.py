"""Guests: a real kernel of each architecture, with Debian's perf and Pythons and our package, under plain emulation.

    mode = Mode('dwarf', 'perf_elf', '3.15', 'sid')
    results, console = run(arch, [mode], [build], workload)

A guest lives in memory: kernel and initramfs come from `roots`, nothing is written, there is no network.  It gets its
job in job.json, and answers on its console; guest/job.py is the other end.
"""

import base64
import binascii
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import intree
import roots

HERE = Path(__file__).resolve().parent
LIMIT = 240, 180       # seconds, and for each mode: beside ten other processes they take a third of it
MEMORY = 2048           # MiB; the initramfs takes some hundred
FREQUENCY = 499
STACK = 32768
# An instruction takes the guest 2**TICK ns, whatever else this machine does: otherwise a guest that has to wait for a
# processor counts that as CPU time of the function it is in, and takes one sample of it.
TICK = 3
CPU_SECONDS = 2.2
TURNS = 10_000
# Perl comes with perf's scripts; the rest is large, and no part of a profile.
LEAVE_OUT = ['./usr/share/perl*', './usr/share/zoneinfo', './usr/lib/*/perl*', './usr/lib/*/gconv', './usr/bin/*perl*',
             './usr/lib/python3/*', './usr/lib/*/libperl*', '*/test/*', '*/tests/*', '*/pydoc_data', '*/idlelib']
MARK, END = b'@@ ', b'@@.'
INTREE = 'intree'
# Where a libdw walk strays into a program's data, a perf that knows of the mapping reports the program to libdw once
# more, at another address, and cannot walk through it from then on.
RECORD_OPTIONS = {'sid': ['--no-data-mmap']}


@dataclass(frozen=True)
class Mode:
    stacks: str         # fp, dwarf
    backend: str        # perf, perf_jit, perf_elf
    python: str         # 3.15, or INTREE: CPython's own source tree with the core in it
    perf: str           # the Debian suite it is from

    def __str__(self):
        return f'{self.stacks} {self.backend} {self.python} {self.perf}'


def expected(arch, mode):
    """What table guest/expected.txt says of a mode: the word, and the reason or ''."""
    for line in (HERE / 'guest/expected.txt').read_text().splitlines():
        if not line.startswith('#'):
            *patterns, word, reason = line.split(None, 5)
            values = arch.name, mode.stacks, mode.python, mode.perf
            if all(pattern in ('*', value) for pattern, value in zip(patterns, values)):
                return word, reason.strip('-')
    raise LookupError(f'expected.txt says nothing of {mode} on {arch.name}')


def kernel(arch):
    """The path of a kernel's image, Debian sid's newest."""
    at = roots.root('sid', arch.debian, [fr'^linux-binary-[0-9.]+\+deb[0-9]+-{arch.kernel}$'], name='kernel',
                    leave_out=['./usr/lib/modules/*/*/*'])
    return max(at.glob('usr/lib/modules/*/vmlinuz'))


def _base(arch):
    return roots.root('sid', arch.debian, ['busybox-static', 'linux-perf', 'python3.14', 'python3.15'], name='guest',
                      leave_out=LEAVE_OUT)


def interpreter(arch, version):
    """The path of a guest's interpreter."""
    if version == INTREE:
        return intree.build(arch.name).build / 'python'
    return _base(arch) / f'usr/bin/python{version}'


def _perf(arch, suite):
    """A suite's perf: the root it is in, and the command in a guest, where that root has a directory of its own."""
    if suite == 'sid':
        return _base(arch), ['/usr/bin/perf']
    # trixie's perf is linked with Perl's library, of whose modules it needs none.
    leave_out = [*(pattern for pattern in LEAVE_OUT if 'libperl' not in pattern), './usr/lib/python3*']
    at = roots.root(suite, arch.debian, ['linux-perf'], name='perf', leave_out=leave_out)
    libraries = next(at.glob('usr/lib/*/libc.so.6')).parent
    program = [next(libraries.glob('ld*.so.*')), '--library-path', libraries, at / 'usr/bin/perf']
    return at, [str(word).replace(str(at), f'/{at.name}') for word in program]


def _image(at, inside):
    """The path of a compressed archive of a root, below a directory of its name unless `inside` is empty."""
    image = roots.cache() / 'guests' / f'{at.name}.cpio.zst'
    if not image.exists():
        image.parent.mkdir(parents=True, exist_ok=True)
        draft = image.with_name(f'{image.name}-{os.getpid()}')
        with open(draft, 'wb') as file, _archive(at, inside) as archive:
            subprocess.run(['zstd', '-q', '-3'], stdin=archive.stdout, stdout=file, check=True)
        draft.rename(image)
    return image


@contextlib.contextmanager
def _archive(directory, inside=''):
    """A process that writes the directory as an archive for the kernel."""
    start = directory.parent if inside else directory
    paths = [*([directory] if inside else []), *sorted(directory.rglob('*'))]
    with tempfile.TemporaryFile() as names:
        names.write(b'\0'.join(os.fsencode(path.relative_to(start)) for path in paths))
        names.seek(0)
        cpio = subprocess.Popen(['cpio', '-0', '-o', '-H', 'newc', '--quiet', '-R', '0:0'], cwd=start,
                                stdin=names, stdout=subprocess.PIPE)
    with cpio:
        yield cpio
    if cpio.returncode:
        raise subprocess.CalledProcessError(cpio.returncode, cpio.args)


def _job(arch, modes, builds, workload, into):
    """Write to the directory `into` what belongs to this run alone."""
    guest = into / 'guest'
    guest.mkdir()
    shutil.copy(HERE / 'guest/init', into)
    for file in HERE / 'guest/job.py', HERE / 'perf_script.py', workload:
        shutil.copy(file, guest)
    for build in builds:
        shutil.copytree(build / 'lib', guest / 'lib', dirs_exist_ok=True)
    if INTREE in {mode.python for mode in modes}:
        intree.build(arch.name).install(guest / INTREE)
    (guest / 'job.json').write_text(json.dumps({
        'frequency': FREQUENCY, 'cpu_seconds': CPU_SECONDS, 'turns': TURNS,
        'modes': [{'name': str(mode), 'backend': mode.backend,
                   'call_graph': 'fp' if mode.stacks == 'fp' else f'dwarf,{STACK}',
                   'python': f'/guest/{INTREE}/bin/python' if mode.python == INTREE else f'/usr/bin/python{mode.python}',
                   'perf': _perf(arch, mode.perf)[1],
                   'options': RECORD_OPTIONS.get(mode.perf, [])} for mode in modes]}))


def run(arch, modes, builds, workload, limit=None):
    """Record `workload` in a guest; return its results, a dict for each mode by its name, and its console's bytes.

    The results lack what did not come; the console tells why.  `builds` are build folders of our package.
    A guest is ended after `limit` seconds.
    """
    limit = limit or LIMIT[0] + LIMIT[1] * len(modes)
    images = {}         # path of a root: its archive
    for at in _base(arch), *(_perf(arch, mode.perf)[0] for mode in modes):
        if at not in images:
            images[at] = _image(at, inside=at.name if images else '')
    with tempfile.TemporaryDirectory(prefix='guest-', dir='/var/tmp') as scratch:
        job = Path(scratch) / 'job'
        job.mkdir()
        _job(arch, modes, builds, workload, job)
        image = Path(scratch) / 'image'
        with open(image, 'wb') as file, _archive(job) as archive:
            for part in images.values():
                file.write(part.read_bytes())
                file.write(bytes(-file.tell() % 512))
            file.flush()
            shutil.copyfileobj(archive.stdout, file)
        machine, processor = arch.board
        command = ['timeout', '-k', '5', str(limit), arch.qemu_system, '-M', machine, '-cpu', processor, '-smp', '1',
                   '-m', str(MEMORY), '-icount', f'shift={TICK},sleep=off', '-nographic', '-no-reboot', '-nic', 'none',
                   '-kernel', kernel(arch), '-initrd', image, '-append', f'console={arch.console} panic=-1 quiet rdinit=/init']
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    console = done.stdout
    if done.returncode == 124:
        console += f'\nended after {limit} seconds\n'.encode()
    return _results(console), _words(console)


def _results(console):
    results, text = {}, b''
    for line in console.splitlines():
        if line.startswith(MARK):
            text += line[len(MARK):]
        elif line.startswith(END):
            with contextlib.suppress(binascii.Error, zlib.error):       # a torn one is missing
                result = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
                results[result['mode']] = result
            text = b''
    return results


def _words(console):
    """What people can read of it."""
    return b'\n'.join(line for line in console.splitlines() if not line.startswith(b'@@')).decode(errors='replace')
