"""Where ELF images are, and their removal.

An image must outlive its process: perf reads names when it reports. So none is removed at exit. Activating perf_elf
removes those of processes that have ended a week ago or earlier; purge() removes all that no living process has.
"""

import os
import sys
import time

KEPT_SECONDS = 7 * 24 * 3600


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
    defaults = f"/tmp/python-perf-{user}", f"{cache}/perf-trampoline-images", f"/dev/shm/python-perf-{user}"
    # A user may have no home.
    return [path for path in defaults if path[0] == "/" and not path.startswith("/tmp/perf-") and ":" not in path]


def purge(older_than=0):
    """Remove images of this user that no process has and that are *older_than* seconds; return their paths."""
    old = set()
    if not os.path.exists("/proc/self"):        # nobody can tell what has ended
        return []
    for directory in directories():
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            pid = owner(entry.name)
            if (pid is not None and info.st_uid == os.geteuid() and time.time() - info.st_mtime >= older_than
                    and not os.path.exists(f"/proc/{pid}")):
                old.add(entry.path)
    removed = []
    for path in old - mapped_files() if old else ():
        try:
            os.unlink(path)
            removed.append(path)
        except OSError:
            pass        # somebody else was faster
    return sorted(removed)


def owner(name):
    """The process that made an image of this name, PID-NUMBER-TIME.so, or .new while it is made; else None."""
    # No regular expression: to import re takes longer than all the rest of an activation.
    stem, _, suffix = name.rpartition(".")
    pid, number, when = parts if len(parts := stem.split("-")) == 3 else ("", "", "")
    whole = (stem.isascii() and pid.isdigit() and pid[0] != "0" and number.isdigit()
             and when and not when.strip("0123456789abcdef"))
    return int(pid) if whole and suffix in ("so", "new") else None


def mapped_files():
    """What the processes of this user have mapped: a forked child still runs in its parent's images."""
    files = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                files.update(line.rstrip("\n").partition("/")[2] for line in maps if ".so" in line)
        except OSError:
            pass        # it has ended, or is another user's
    return {f"/{path}" for path in files}
