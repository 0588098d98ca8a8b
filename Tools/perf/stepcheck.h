/* The unwind code of the package, Python/jit_unwind.c itself, in a program without an interpreter. */

#ifndef STEPCHECK_H
#define STEPCHECK_H

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* In place of pycore_perf_compat.h: of Python.h the prototypes need only names. */
#define Py_INTERNAL_PERF_COMPAT_H
#define PY_HAVE_PERF_TRAMPOLINE
typedef struct PyObject PyObject;
typedef struct PyCodeObject PyCodeObject;
typedef struct PyInterpreterState PyInterpreterState;
#include "../../Python/jit_unwind.c"

/* `count` copies of the trampoline, `slot_size` apart, executable and not writable; one more page, for unwind data,
   stays writable: it is where the copies end on a page. */
static inline uint8_t *
copy_trampoline(size_t count, size_t slot_size, uint8_t **out_page)
{
    const char *reason;
    const _PyPerf_Template *copied = _PyPerf_GetTemplate(&reason);
    size_t page_size = sysconf(_SC_PAGESIZE), size = _PyPerf_ALIGN(count * slot_size, page_size);
    uint8_t *memory = mmap(NULL, size + page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copied == NULL || memory == MAP_FAILED) {
        abort();
    }
    for (size_t i = 0; i < count; i++) {
        memcpy(memory + i * slot_size, copied->code, copied->code_size);
    }
    __builtin___clear_cache((char *)memory, (char *)memory + size);
    if (mprotect(memory, size, PROT_READ | PROT_EXEC) < 0) {
        abort();
    }
    *out_page = memory + size;
    return memory;
}

#endif
