"""Guests: a real kernel of each architecture, with Debian's perf and Pythons and our package, under plain emulation.

    mode = Mode('perf_elf', 'dwarf,32768', '3.15', 'sid')
    for result in run(arch, [mode], {'3.15': build}).results: ...

A guest lives in memory: kernel and initramfs come from `roots`, nothing is written, there is no network.  It gets its
job in job.json, and answers on its console; guest/job.py is the other end.
"""

import base64
import binascii
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import archs
import roots

HERE = Path(__file__).resolve().parent
LIMIT = 300             # seconds; a guest of five modes takes half of that on an idle machine
MEMORY = 2048           # MiB; the initramfs takes some hundred
FREQUENCY = 499
CPU_SECONDS = 3
TURNS = 20_000
# Perl comes with perf's scripts; the rest is large, and no part of a profile.
LEAVE_OUT = ['./usr/share/perl*', './usr/share/zoneinfo', './usr/lib/*/perl*', './usr/lib/*/gconv', './usr/bin/*perl*',
             './usr/lib/python3/*', './usr/lib/*/libperl*', '*/test/*', '*/tests/*', '*/pydoc_data', '*/idlelib']
MARK, END = b'@@ ', b'@@.'


class GuestError(Exception):
    """A guest did not do its job; the message ends with its console's last words."""


@dataclass(frozen=True)
class Mode:
    backend: str        # perf, perf_jit, perf_elf
    call_graph: str     # as perf record takes it
    python: str         # 3.15
    perf: str           # the Debian suite it is from

    def __str__(self):
        return f'{self.call_graph.partition(",")[0]} {self.backend} {self.python} {self.perf}'


def kernel(arch):
    """The path of a kernel's image, Debian sid's newest."""
    at = roots.root('sid', arch.debian, [fr'^linux-binary-[0-9.]+\+deb[0-9]+-{arch.kernel}$'], name='kernel',
                    leave_out=['./usr/lib/modules/*/*/*'])
    return max(at.glob('usr/lib/modules/*/vmlinuz'))


def initramfs(arch):
    """The path of a compressed cpio archive with everything but the job."""
    at = roots.root('sid', arch.debian, ['busybox-static', 'linux-perf', 'python3.14', 'python3.15'], name='guest',
                    leave_out=LEAVE_OUT)
    image = roots.cache() / 'guests' / f'{at.name}.cpio.zst'
    if not image.exists():
        image.parent.mkdir(parents=True, exist_ok=True)
        draft = image.with_name(f'{image.name}-{os.getpid()}')
        with open(draft, 'wb') as file, _archive(at) as archive:
            subprocess.run(['zstd', '-q', '-3'], stdin=archive.stdout, stdout=file, check=True)
        draft.rename(image)
    return image


@contextlib.contextmanager
def _archive(directory):
    """A process that writes the directory as an archive for the kernel."""
    with tempfile.TemporaryFile() as names:
        names.write(b'\0'.join(os.fsencode(path.relative_to(directory)) for path in sorted(directory.rglob('*'))))
        names.seek(0)
        cpio = subprocess.Popen(['cpio', '-0', '-o', '-H', 'newc', '--quiet', '-R', '0:0'], cwd=directory,
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
    (guest / 'job.json').write_text(json.dumps({
        'frequency': FREQUENCY, 'cpu_seconds': CPU_SECONDS, 'turns': TURNS,
        'modes': [{'name': str(mode), 'backend': mode.backend, 'call_graph': mode.call_graph,
                   'python': f'/usr/bin/python{mode.python}', 'perf': ['perf']} for mode in modes]}))


def run(arch, modes, builds, workload, limit=LIMIT):
    """Record `workload` in a guest; return its results, a dict for each mode by its name, and its console's bytes.

    The results lack what did not come; the console tells why.  `builds` are build folders of our package.
    """
    with tempfile.TemporaryDirectory(prefix='guest-', dir='/var/tmp') as scratch:
        job = Path(scratch) / 'job'
        job.mkdir()
        _job(arch, modes, builds, workload, job)
        image = Path(scratch) / 'image'
        with open(image, 'wb') as file, _archive(job) as archive:
            file.write(initramfs(arch).read_bytes())
            file.write(bytes(-file.tell() % 512))
            file.flush()
            shutil.copyfileobj(archive.stdout, file)
        machine, processor = arch.board
        command = ['timeout', '-k', '5', str(limit), arch.qemu_system, '-M', machine, '-cpu', processor, '-smp', '1',
                   '-m', str(MEMORY), '-nographic', '-no-reboot', '-nic', 'none', '-kernel', kernel(arch), '-initrd',
                   image, '-append', f'console={arch.console} panic=-1 quiet rdinit=/init']
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
