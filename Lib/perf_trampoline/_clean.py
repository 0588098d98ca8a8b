"""perf-trampoline clean: remove what recordings left, of processes that have ended."""

import json
import os
import pwd
import re
import stat
import sys
import time

from perf_trampoline import images

# What a file of ours is called, and how it begins. Other runtimes' files have the same names: ours name Python functions.
def _number(pattern):
    """A function from a file's name to the process in it, or None."""
    pattern = re.compile(pattern.replace("PID", r"([1-9]\d*)"), re.ASCII)
    return lambda name: int(match[1]) if (match := pattern.fullmatch(name)) else None


_IN_TMP = {
    "map": (_number(r"perf-PID\.map"), b""),
    "dump": (_number(r"jit-PID\.dump(?:\.window)?"), (0x4A695444).to_bytes(4, sys.byteorder)),
    "injected": (_number(r"jitted-PID-\d+\.so"), b"\x7fELF"),
}
_MARK = b"py::"
_LOOKED_AT = 1 << 16


def add_arguments(parser):
    parser.description += ("  That is: /tmp/perf-PID.map, jit-PID.dump, jitted-PID-N.so and ELF images, of processes "
                           "that have ended, if this package or Python wrote them.  perf.data stays; without its "
                           "images a recording has no names any more.")
    parser.add_argument("--days", type=float, default=0, help="only what is at least so old (default: all)")
    parser.add_argument("--user", default=str(os.geteuid()), help="whose files: a name or number, or all (default: yours)")
    parser.add_argument("-n", "--dry-run", action="store_true", help="say what would be removed, and leave it")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of one path a line")


def left(uid=None, older_than=0, tmp="/tmp", pids=None):
    """What is left of ended processes, as dicts with path, kind, pid, uid, size (bytes) and age (s).

    uid     None: everyone's
    pids    of these processes only, whether they have ended or not
    """
    found = []
    places = [(tmp, _IN_TMP)]
    for directory in images.directories():
        # Those of other users differ in the last word.
        own = re.fullmatch(r"(/.*/python-perf-)\d+", directory)
        users = [user.pw_uid for user in pwd.getpwall()] if own and uid is None else [uid] if own else []
        for path in dict.fromkeys([f"{own[1]}{user}" for user in users] if own else [directory]):
            places.append((path, {"image": (images.owner, b"\x7fELF")}))
    for directory, kinds in places:
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            for kind, (owner, magic) in kinds.items():
                pid = owner(entry.name)
                if pid is None or (os.path.exists(f"/proc/{pid}") if pids is None else pid not in pids):
                    continue
                info = _ours(entry.path, kind, magic, uid)
                if info and time.time() - info.st_mtime >= older_than:
                    found.append({"path": entry.path, "kind": kind, "pid": pid, "uid": info.st_uid,
                                  "size": info.st_size, "age": round(time.time() - info.st_mtime)})
    # A forked child still runs in its parent's image.
    mapped = images.mapped_files() if found and pids is None else ()
    return sorted((file for file in found if file["path"] not in mapped), key=lambda file: file["path"])


def _ours(path, kind, magic, uid):
    """The file's status if it is a file of ours by owner and contents."""
    try:
        # Somebody may have put a pipe, a link or a directory there.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or uid is not None and info.st_uid != uid:
                return None
            head = file.read(_LOOKED_AT)
    except OSError:
        return None
    if kind == "image":
        # Its directory is ours alone; one that was not finished may be empty.
        return info if head.startswith(magic) or not head.strip(b"\0") else None
    return info if head.startswith(magic) and _MARK in head else None


def remove(files):
    """Remove them; those that are gone now."""
    removed = []
    for file in files:
        try:
            os.unlink(file["path"])
            removed.append(file)
        except FileNotFoundError:
            pass        # somebody else was faster
        except OSError as error:
            print(f"perf-trampoline: {file['path']} stays: {error.strerror}", file=sys.stderr)
    return removed


def remove_of(pids):
    """Remove what these processes of this user left."""
    remove(left(os.geteuid(), pids=pids))


def run(options):
    if options.user == "all":
        uid = None
    else:
        try:
            uid = int(options.user) if options.user.isdigit() else pwd.getpwnam(options.user).pw_uid
        except KeyError:
            raise ValueError(f"there is no user {options.user}") from None
    files = left(uid, options.days * 24 * 3600)
    if not options.dry_run:
        files = remove(files)
    if options.json:
        print(json.dumps(files, indent=1))
        return 0
    for file in files:
        print(file["path"])
    if sys.stdout.isatty():
        size = sum(file["size"] for file in files)
        print(f"{len(files)} files, {size / 1e6:.1f} MB{', would be removed' if options.dry_run else ' removed'}",
              file=sys.stderr)
    return 0
