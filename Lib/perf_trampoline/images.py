"""Where ELF images are, and their removal.

An image must outlive its process: perf reads names when it reports. So none is removed at exit. Activating perf_elf
removes those of processes that have ended a week ago or earlier; purge() removes all that no living process has.
"""

import os
import re
import sys
import time

KEPT_SECONDS = 7 * 24 * 3600

# PID-NUMBER-TIME.so, as Python/perf_elf_image.c names them
_IMAGE = re.compile(r"(\d+)-\d+-[0-9a-f]+\.so")


def directories():
    """Where images are made, the first that can hold one: -X perf_elf=DIR or PERF_TRAMPOLINE_DIR, else a list.

    perf up to 6.x takes any file whose name begins with /tmp/perf- for a perf map, so none may be there.
    """
    chosen = sys._xoptions.get("perf_elf")
    if not isinstance(chosen, str) and not sys.flags.ignore_environment:
        chosen = os.environ.get("PERF_TRAMPOLINE_DIR")
    if isinstance(chosen, str) and chosen:
        chosen = os.path.abspath(chosen)
        if chosen.startswith("/tmp/perf-"):
            raise ValueError(f"perf reads no images in {chosen}: choose a directory that does not begin with /tmp/perf-")
        if ":" in chosen:
            raise ValueError(f"a directory for images cannot have a colon in its name: {chosen}")
        return [chosen]
    user = os.geteuid()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [f"/tmp/python-perf-{user}", f"{cache}/perf-trampoline-images", f"/dev/shm/python-perf-{user}"]


def purge(older_than=0):
    """Remove images of this user whose process has ended and that are *older_than* seconds; return their paths."""
    removed = []
    for directory in directories():
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            match = _IMAGE.fullmatch(entry.name)
            try:
                info = entry.stat(follow_symlinks=False)
                if (match and info.st_uid == os.geteuid() and time.time() - info.st_mtime >= older_than
                        and not os.path.exists(f"/proc/{match[1]}")):
                    os.unlink(entry.path)
                    removed.append(entry.path)
            except OSError:
                pass        # somebody else was faster
    return removed
