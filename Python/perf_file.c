/* Files that profilers read while we write them.

   One system call for each Python function is what costs most in a writer that flushes, and what a buffer saves is
   lost with the process. So room is taken in the file first, some hundred entries at a time, and filled through a shared
   mapping: every store is in the file at once, and stays there after SIGKILL. The room is allocated, not only a longer
   length: a store into a hole of a full file system would be a SIGBUS.

   The mapping is the process's own; a forked child does not even inherit it (MADV_DONTFORK). */

#include "pycore_perf_trampoline.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The tail that stays unused in a map is at most this long. */
#define SHARED_ROOM (16 * 1024)
#define OWN_ROOM (256 * 1024)

/* Has this process the file open, through another descriptor than `fd`? */
static bool
open_elsewhere(int fd, const struct stat *st)
{
    bool found = false;
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *entry;
    while (dir != NULL && !found && (entry = readdir(dir)) != NULL) {
        struct stat other;
        found = entry->d_name[0] != '.' && atoi(entry->d_name) != fd
                && fstatat(dirfd(dir), entry->d_name, &other, 0) == 0
                && other.st_dev == st->st_dev && other.st_ino == st->st_ino;
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return found;
}

int
_PyPerfFile_Open(_PyPerf_File *file, const char *path, bool appended_by_others)
{
    const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (appended_by_others ? O_APPEND : 0);
    int saved_errno = errno;

    *file = (_PyPerf_File){.fd = -1, .appended_by_others = appended_by_others};
    snprintf(file->path, sizeof(file->path), "%s", path);
    for (int tries = 0; file->fd < 0 && tries < 3; tries++) {
        file->fd = open(path, flags | O_CREAT | O_EXCL, 0600);
        if (file->fd >= 0 || errno != EEXIST) {
            break;
        }
        struct stat st;
        int fd = appended_by_others ? open(path, flags) : -1;
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() && st.st_nlink == 1
            && open_elsewhere(fd, &st)) {
            file->fd = fd;
            break;
        }
        if (fd >= 0) {
            close(fd);
        }
        /* Left by an earlier process of this number; names of its functions would be taken for ours. In /tmp only
           the owner may remove it: a file that somebody else planted stops us here. */
        if (unlink(path) < 0 && errno != ENOENT) {
            break;
        }
    }
    if (file->fd < 0) {
        _PyPerf_Fail("cannot create %s: %s", path,
                     errno == EEXIST || errno == EPERM || errno == EACCES
                     ? "it belongs to another user, or the directory is not writable" : strerror(errno));
        file->path[0] = '\0';
    }
    errno = saved_errno;
    return file->fd < 0 ? -1 : 0;
}

static void
release_window(_PyPerf_File *file)
{
    if (file->window != NULL) {
        munmap(file->window, file->window_size);
        file->window = NULL;
    }
}

/* Take room behind everything in the file. Sets *out_offset, returns its size, 0 with errno. */
static size_t
take_room(_PyPerf_File *file, size_t size, off_t *out_offset)
{
    if (!file->appended_by_others) {
        /* Records must follow each other without a gap. */
        *out_offset = file->window_offset + file->window_used;
        size_t room = size > OWN_ROOM ? size : OWN_ROOM;
        errno = posix_fallocate(file->fd, *out_offset, room);
        return errno == 0 ? room : 0;
    }
    static char newlines[SHARED_ROOM];     /* not on a thread's small stack */
    memset(newlines, '\n', sizeof(newlines));
    ssize_t room = write(file->fd, newlines, sizeof(newlines));
    if (room < 0) {
        return 0;
    }
    *out_offset = lseek(file->fd, 0, SEEK_CUR) - room;
    errno = ENOSPC;
    return (size_t)room < size ? 0 : (size_t)room;
}

char *
_PyPerfFile_Reserve(_PyPerf_File *file, size_t size)
{
    if (file->fd < 0) {
        return NULL;
    }
    if (file->window == NULL || file->window_size - file->window_used < size) {
        int saved_errno = errno;
        off_t offset;
        size_t room = take_room(file, size, &offset);
        size_t lead = room == 0 ? 0 : offset % sysconf(_SC_PAGESIZE);
        char *window = room == 0 ? MAP_FAILED : mmap(NULL, lead + room, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd,
                                                     offset - (off_t)lead);
        if (window == MAP_FAILED) {
            _PyPerf_Fail("cannot write %s: %s", file->path, strerror(errno));
            errno = saved_errno;
            return NULL;
        }
        madvise(window, lead + room, MADV_DONTFORK);
        release_window(file);
        file->window = window;
        file->window_size = lead + room;
        file->window_used = lead;
        file->window_offset = offset - (off_t)lead;
        errno = saved_errno;
    }
    char *reserved = file->window + file->window_used;
    file->window_used += size;
    return reserved;
}

void
_PyPerfFile_Close(_PyPerf_File *file)
{
    if (file->fd >= 0) {
        release_window(file);
        if (!file->appended_by_others && ftruncate(file->fd, file->window_offset + file->window_used) < 0) {
            /* The file keeps a tail of zeros; readers end there. */
        }
        close(file->fd);
        file->fd = -1;
    }
}

void
_PyPerfFile_AfterFork(_PyPerf_File *file)
{
    if (file->fd >= 0) {
        close(file->fd);
        *file = (_PyPerf_File)_PyPerf_FILE_CLOSED;
    }
}
