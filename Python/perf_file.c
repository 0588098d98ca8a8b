/* Files that profilers read while we write them.

   One system call for each Python function is what costs most in a writer that flushes, and what a buffer saves is
   lost with the process. So room is taken in the file first, for hundreds of entries or thousands, and filled through a
   shared mapping: every store is in the file at once, and stays there after SIGKILL. The room is written, not only a
   longer length: a store into a hole of a full file system would be a SIGBUS, and the kernel gets pages ready by the
   dozen.

   The mapping is the process's own; a forked child does not even inherit it (MADV_DONTFORK).

   Should somebody truncate the file, the next store would be a SIGBUS, and kill the program. A handler puts private
   memory under that window: the store goes there, and the file is given up. The code of an ELF image is in a file as
   well; it is made anew. */

#include "pycore_perf_trampoline.h"

#ifndef _PyPerf_STUBS

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Room is taken for as much again as is in the file, and some pieces of this size more: the first must do for a worker
   that becomes another user at once. The tail that stays unused in a map is hardly longer than the map. */
#define PIECE_SIZE (16 * 1024)
#define MAX_PIECES 16
/* Mapped beyond the end of the file, for the rooms to come: to map and unmap is dear, most of all in virtual machines. */
#define WINDOW_SIZE (512 * 1024)

#ifndef MADV_POPULATE_WRITE
#  define MADV_POPULATE_WRITE 23        /* Linux 5.14 */
#endif

/* --- Windows --- */

static struct {
    _Atomic uintptr_t start;            /* 0: free */
    _Atomic size_t size;
    _Atomic size_t slot_size;           /* 0: not code */
    atomic_bool lost;
} windows[256];
#define NUM_WINDOWS (sizeof(windows) / sizeof(windows[0]))

static atomic_int num_lost;
static atomic_int num_passed_on;
static struct sigaction first_action, former_action;

/* Whoever came after us and restores what he found, us, does not get the signal again. */
static void
pass_on(int signum, siginfo_t *info, void *context)
{
    struct sigaction action = num_passed_on++ == 0 ? former_action : first_action;
    if (action.sa_flags & SA_SIGINFO) {
        action.sa_sigaction(signum, info, context);
    }
    else if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) {
        action.sa_handler(signum);
    }
    else {      /* a fault happens again, and ends the process as it would have */
        sigaction(SIGBUS, &action, NULL);
        if (info->si_code <= 0) {
            raise(signum);
        }
    }
    num_passed_on--;
}

static void
handle_sigbus(int signum, siginfo_t *info, void *context)
{
    uintptr_t address = info->si_code > 0 ? (uintptr_t)info->si_addr : 0;
    for (size_t i = 0; i < NUM_WINDOWS; i++) {
        void *start = (void *)windows[i].start;
        size_t size = windows[i].size, slot_size = windows[i].slot_size;
        if (start != NULL && address - (uintptr_t)start < size
            && mmap(start, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED)
        {
            if (slot_size != 0) {
                _PyPerf_FillSlots(start, size, slot_size);
                mprotect(start, size, PROT_READ | PROT_EXEC);
            }
            windows[i].lost = true;
            num_lost++;
            return;
        }
    }
    pass_on(signum, info, context);
}

/* faulthandler and its like may have come since, and would take a truncated file for the end. */
static void
keep_handler(void)
{
    struct sigaction now, ours = {.sa_sigaction = handle_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, NULL, &now) == 0 && !((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle_sigbus)) {
        former_action = now;
        sigaction(SIGBUS, &ours, NULL);
    }
}

static void
install_handler(void)
{
    sigaction(SIGBUS, NULL, &first_action);
    keep_handler();
}

bool
_PyPerfWindow_Guard(void *start, size_t size, size_t slot_size)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install_handler);
    for (size_t i = 0; i < NUM_WINDOWS; i++) {
        uintptr_t none = 0;
        if (atomic_compare_exchange_strong(&windows[i].start, &none, (uintptr_t)start)) {
            windows[i].slot_size = slot_size;
            windows[i].lost = false;
            windows[i].size = size;
            return true;
        }
    }
    return false;
}

char *
_PyPerfWindow_Map(int fd, off_t offset, size_t size)
{
    char *window = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    if (window == MAP_FAILED) {
        return NULL;
    }
    if (!_PyPerfWindow_Guard(window, size, 0)) {
        munmap(window, size);
        errno = ENOMEM;
        return NULL;
    }
    madvise(window, size, MADV_DONTFORK);
    return window;
}

void
_PyPerfWindow_Unmap(char *window, size_t size)
{
    for (size_t i = 0; i < NUM_WINDOWS; i++) {
        uintptr_t start = (uintptr_t)window;
        if (atomic_compare_exchange_strong(&windows[i].start, &start, 0)) {
            munmap(window, size);
        }
    }
}

void
_PyPerfWindow_MakeReady(const char *start, size_t size)
{
    size_t lead = (uintptr_t)start % sysconf(_SC_PAGESIZE);
    keep_handler();
    madvise((char *)start - lead, size + lead, MADV_POPULATE_WRITE);
}

bool
_PyPerfWindow_IsLost(const char *window)
{
    if (num_lost == 0) {
        return false;
    }
    for (size_t i = 0; i < NUM_WINDOWS; i++) {
        if (windows[i].start == (uintptr_t)window) {
            return windows[i].lost;
        }
    }
    return true;
}

void
_PyPerfWindow_AfterFork(void)
{
    for (size_t i = 0; i < NUM_WINDOWS; i++) {
        if (windows[i].slot_size == 0) {
            windows[i].start = 0;
        }
    }
}

/* --- Signals --- */

void
_PyPerf_HoldSignals(_PyPerf_HeldSignals *out_held)
{
    sigset_t ours;
    sigemptyset(&ours);
    sigaddset(&ours, SIGXFSZ);
    sigaddset(&ours, SIGPIPE);
    sigpending(&out_held->pending);
    pthread_sigmask(SIG_BLOCK, &ours, &out_held->mask);
}

void
_PyPerf_LetSignals(const _PyPerf_HeldSignals *held)
{
    static const int signals[] = {SIGXFSZ, SIGPIPE};
    const struct timespec at_once = {0};
    int saved_errno = errno;
    for (size_t i = 0; i < Py_ARRAY_LENGTH(signals); i++) {
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, signals[i]);
        while (!sigismember(&held->pending, signals[i]) && sigtimedwait(&one, NULL, &at_once) < 0 && errno == EINTR) {
        }
    }
    pthread_sigmask(SIG_SETMASK, &held->mask, NULL);
    errno = saved_errno;
}

/* --- Files --- */

/* Does this process have the file open, through another descriptor than `fd`? */
static bool
is_open_elsewhere(int fd, const struct stat *st)
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

static bool
is_same_file(const _PyPerf_File *file, const struct stat *st)
{
    return S_ISREG(st->st_mode) && st->st_dev == file->dev && st->st_ino == file->ino;
}

static int
open_same_file(const _PyPerf_File *file, const char *path)
{
    struct stat st;
    int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (file->appended_by_others ? O_APPEND : 0));
    if (fd >= 0 && (fstat(fd, &st) < 0 || !is_same_file(file, &st))) {
        close(fd);
        errno = ESTALE;
        fd = -1;
    }
    return fd;
}

/* Descriptors are the program's: it may close them all and open its own under the same numbers. So none is kept. */
int
_PyPerfFile_Descriptor(const _PyPerf_File *file)
{
    return open_same_file(file, file->path);
}

/* perf records mappings of data too where it copies stacks, and perf inject reads a jitdump from its beginning for each
   mapping of that name: a window has another. Without hard links it has that. */
static char *
map_window(const _PyPerf_File *file, int fd, off_t offset)
{
    char path[sizeof(file->path) + sizeof(".window")];
    snprintf(path, sizeof(path), "%s.window", file->path);
    bool linked = !file->appended_by_others && link(file->path, path) == 0;
    int other_fd = linked ? open_same_file(file, path) : -1;
    if (linked) {
        unlink(path);
    }
    char *window = _PyPerfWindow_Map(other_fd >= 0 ? other_fd : fd, offset, WINDOW_SIZE);
    if (other_fd >= 0) {
        close(other_fd);
    }
    return window;
}

int
_PyPerfFile_Open(_PyPerf_File *file, const char *path, bool appended_by_others)
{
    const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
    int saved_errno = errno, fd = -1;
    struct stat st;

    snprintf(file->path, sizeof(file->path), "%s", path);
    file->appended_by_others = appended_by_others;
    for (int tries = 0; fd < 0 && tries < 3; tries++) {
        fd = open(path, flags | O_CREAT | O_EXCL, 0600);
        if (fd >= 0) {
            (void)!fchmod(fd, 0600);            /* whatever the umask is */
            break;
        }
        if (errno != EEXIST) {
            break;
        }
        if (appended_by_others) {
            fd = open(path, flags);
            int status = fd < 0 ? -1 : fstat(fd, &st);
            if (status < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EIO)) {
                break;                          /* it may well be ours */
            }
            if (status == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() && st.st_nlink == 1
                && (is_same_file(file, &st) || is_open_elsewhere(fd, &st))) {
                break;
            }
        }
        if (fd >= 0) {
            close(fd);
            fd = -1;
        }
        /* Left by an earlier process of this number; names of its functions would be taken for ours. In /tmp only
           the owner may remove it: a file that somebody else planted stops us here. */
        if (unlink(path) < 0 && errno != ENOENT) {
            break;
        }
    }
    file->is_open = fd >= 0 && fstat(fd, &st) == 0;
    if (file->is_open) {
        file->dev = st.st_dev;
        file->ino = st.st_ino;
        file->user = st.st_uid;
        file->end = 0;
    }
    else {
        _PyPerf_Fail("cannot create %s: %s", path,
                     errno == EEXIST || errno == EPERM || errno == EACCES
                     ? "it belongs to another user, or the directory is not writable" : strerror(errno));
        file->path[0] = '\0';
    }
    if (fd >= 0) {
        close(fd);
    }
    errno = saved_errno;
    return file->is_open ? 0 : -1;
}

static void
release_window(_PyPerf_File *file)
{
    if (file->window != NULL) {
        _PyPerfWindow_Unmap(file->window, WINDOW_SIZE);
        file->window = NULL;
        file->window_room = file->window_used = 0;
    }
}

/* Take room behind everything in the file, and have it in the window. -1 with errno. */
static int
take_room(_PyPerf_File *file, int fd, size_t size)
{
    static char filler[PIECE_SIZE];     /* not on a thread's small stack */
    struct iovec pieces[MAX_PIECES];
    int more = file->appended_by_others ? 1 : 4;        /* an entry of a jitdump is four times as long */
    int num_pieces = Py_MIN(Py_MAX((size_t)file->end, size) / PIECE_SIZE + more, MAX_PIECES);
    size_t rest = file->window_room - file->window_used;
    off_t offset = file->end + rest;
    ssize_t room;
    char fill = file->appended_by_others ? '\n' : 0;
    if (filler[0] != fill) {
        memset(filler, fill, PIECE_SIZE);
    }
    for (int i = 0; i < num_pieces; i++) {
        pieces[i] = (struct iovec){filler, PIECE_SIZE};
    }
    if (file->appended_by_others) {
        room = writev(fd, pieces, num_pieces);
        offset = lseek(fd, 0, SEEK_CUR) - room;
    }
    else {
        room = pwritev(fd, pieces, num_pieces, offset);
    }
    if (room < (ssize_t)size) {
        errno = room < 0 ? errno : ENOSPC;
        return -1;
    }
    if (offset != file->end + (off_t)rest) {        /* others have appended */
        file->end = offset;
        rest = 0;
        release_window(file);
    }
    if (file->window == NULL || file->window_room + room > WINDOW_SIZE) {
        size_t lead = file->end % sysconf(_SC_PAGESIZE);
        char *window = map_window(file, fd, file->end - (off_t)lead);
        if (window == NULL) {
            return -1;
        }
        release_window(file);
        file->window = window;
        file->window_used = lead;
        file->window_room = lead + rest;
    }
    _PyPerfWindow_MakeReady(file->window + file->window_room, room);
    file->window_room += room;
    return 0;
}

char *
_PyPerfFile_Reserve(_PyPerf_File *file, size_t size)
{
    if (!file->is_open) {
        return NULL;
    }
    if (file->window_room - file->window_used < size) {
        int saved_errno = errno;
        int fd = _PyPerfFile_Descriptor(file);
        _PyPerf_HeldSignals held;
        _PyPerf_HoldSignals(&held);
        int status = fd < 0 ? -1 : take_room(file, fd, size);
        _PyPerf_LetSignals(&held);
        if (status < 0) {
            _PyPerf_Fail("cannot write %s: %s", file->path,
                         errno == ESTALE || errno == ENOENT ? "it was removed"
                         : errno == EACCES && file->user != geteuid() ? "the process was another user when it was made"
                         : strerror(errno));
        }
        if (fd >= 0) {
            close(fd);
        }
        errno = saved_errno;
        if (status < 0) {
            return NULL;
        }
    }
    char *reserved = file->window + file->window_used;
    file->window_used += size;
    file->end += size;
    return reserved;
}

int
_PyPerfFile_Commit(_PyPerf_File *file)
{
    if (_PyPerfWindow_IsLost(file->window)) {
        release_window(file);
        file->is_open = false;
        return _PyPerf_Fail("%s was truncated", file->path);
    }
    return 0;
}

void
_PyPerfFile_Close(_PyPerf_File *file)
{
    release_window(file);
    if (file->is_open && !file->appended_by_others) {
        /* Should it fail, a tail of zeros stays; readers end there. */
        int fd = _PyPerfFile_Descriptor(file);
        if (fd >= 0) {
            (void)!ftruncate(fd, file->end);
            close(fd);
        }
    }
    file->is_open = false;
}

void
_PyPerfFile_AfterFork(_PyPerf_File *file)
{
    *file = (_PyPerf_File){0};
}

#endif
