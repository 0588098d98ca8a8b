/* LD_PRELOAD: the FAIL_NTH-th call that our extension makes of one of these functions fails. Its name is a line of
   the file FAIL_LOG. Other callers, the interpreter among them, are served. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Atomic uintptr_t begin, end;        /* of the extension */
static atomic_long num_calls;

static int
find_end(struct dl_phdr_info *info, size_t size, void *base)
{
    if (info->dlpi_addr != (uintptr_t)base) {
        return 0;
    }
    uintptr_t last = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            last = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
        }
    }
    end = last;
    begin = info->dlpi_addr;
    return 1;
}

static int
must_fail(void *caller, const char *name, int error)
{
    static long nth;
    if ((uintptr_t)caller < begin || (uintptr_t)caller >= end) {
        return 0;
    }
    if (nth == 0) {
        nth = atol(getenv("FAIL_NTH"));
    }
    if (++num_calls != nth) {
        return 0;
    }
    int log = syscall(SYS_openat, AT_FDCWD, getenv("FAIL_LOG"), O_WRONLY | O_APPEND, 0);
    syscall(SYS_write, log, name, strlen(name));
    syscall(SYS_write, log, "\n", 1);
    syscall(SYS_close, log);
    errno = error;
    return 1;
}

/* Headers declare some of them with other types of the same shape. */
#define FAILING(type, name, parameters, arguments, failure, error)              \
    static type (*real_##name)parameters;                                       \
    type failing_##name parameters __asm__(#name);                              \
    type failing_##name parameters                                              \
    {                                                                           \
        if (must_fail(__builtin_return_address(0), #name, error)) {             \
            return failure;                                                     \
        }                                                                       \
        return real_##name arguments;                                           \
    }                                                                           \
    static __attribute__((constructor)) void find_##name(void)                  \
    {                                                                           \
        real_##name = (type (*)parameters)dlsym(RTLD_NEXT, #name);              \
    }

FAILING(int, open64, (const char *path, int flags, mode_t mode), (path, flags, mode), -1, EMFILE)
FAILING(void *, mmap64, (void *at, size_t size, int prot, int flags, int fd, off_t offset),
        (at, size, prot, flags, fd, offset), MAP_FAILED, ENOMEM)
FAILING(void *, mremap, (void *at, size_t old, size_t size, int flags, void *to), (at, old, size, flags, to), MAP_FAILED, ENOMEM)
FAILING(int, mprotect, (void *at, size_t size, int prot), (at, size, prot), -1, EACCES)
FAILING(int, madvise, (void *at, size_t size, int advice), (at, size, advice), -1, EINVAL)
FAILING(ssize_t, write, (int fd, const void *from, size_t size), (fd, from, size), -1, ENOSPC)
FAILING(ssize_t, pwrite64, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at), -1, EDQUOT)
FAILING(ssize_t, writev, (int fd, const void *pieces, int count), (fd, pieces, count), -1, ENOSPC)
FAILING(ssize_t, pwritev64, (int fd, const void *pieces, int count, off_t at), (fd, pieces, count, at), -1, EDQUOT)
FAILING(int, posix_fallocate64, (int fd, off_t at, off_t size), (fd, at, size), ENOSPC, ENOSPC)
FAILING(int, ftruncate64, (int fd, off_t size), (fd, size), -1, EPERM)
FAILING(off_t, lseek64, (int fd, off_t offset, int whence), (fd, offset, whence), -1, EINVAL)
FAILING(int, fstat64, (int fd, struct stat *st), (fd, st), -1, EIO)
FAILING(int, lstat64, (const char *path, struct stat *st), (path, st), -1, EIO)
FAILING(int, mkdir, (const char *path, mode_t mode), (path, mode), -1, EACCES)
FAILING(int, rename, (const char *from, const char *to), (from, to), -1, EACCES)
FAILING(int, link, (const char *from, const char *to), (from, to), -1, EPERM)
FAILING(int, unlink, (const char *path), (path), -1, EACCES)
FAILING(void *, opendir, (const char *path), (path), NULL, EMFILE)
FAILING(int, clock_gettime, (clockid_t clock, struct timespec *time), (clock, time), -1, EINVAL)
FAILING(int, sigaction, (int number, const void *action, void *former), (number, action, former), -1, EINVAL)
FAILING(int, pthread_getattr_np, (pthread_t thread, pthread_attr_t *attr), (thread, attr), ENOMEM, ENOMEM)
FAILING(int, __register_atfork, (void (*a)(void), void (*b)(void), void (*c)(void), void *d), (a, b, c, d), ENOMEM, ENOMEM)
FAILING(int, dlinfo, (void *handle, int what, void *out), (handle, what, out), real_dlinfo(handle, -1, out), 0)
FAILING(char *, strdup, (const char *text), (text), NULL, ENOMEM)

/* dlsym() may allocate. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void *
malloc(size_t size)
{
    return must_fail(__builtin_return_address(0), "malloc", ENOMEM) ? NULL : __libc_malloc(size);
}

void *
calloc(size_t count, size_t size)
{
    return must_fail(__builtin_return_address(0), "calloc", ENOMEM) ? NULL : __libc_calloc(count, size);
}

void *
realloc(void *block, size_t size)
{
    return must_fail(__builtin_return_address(0), "realloc", ENOMEM) ? NULL : __libc_realloc(block, size);
}

void *
dlopen(const char *path, int flags)
{
    void *(*real)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    /* dlerror() must have something to say. */
    void *handle = real(must_fail(__builtin_return_address(0), "dlopen", 0) ? "/nonexistent" : path, flags);
    struct link_map *map;
    if (handle != NULL && path != NULL && strstr(path, "/_perf_trampoline.") != NULL
        && dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0)
    {
        dl_iterate_phdr(find_end, (void *)map->l_addr);
    }
    return handle;
}
