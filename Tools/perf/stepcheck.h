/* The package's own code in a program without an interpreter, for stepcheck.c and unwindcheck.c. */

#ifndef STEPCHECK_H
#define STEPCHECK_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* In place of pycore_perf_compat.h, whatever the core reads of Python.h. */
#define Py_INTERNAL_PERF_COMPAT_H
#define PY_HAVE_PERF_TRAMPOLINE
typedef struct PyObject PyObject;
typedef struct PyInterpreterState PyInterpreterState;
typedef struct {
    PyObject *co_filename;
    int co_firstlineno;
} PyCodeObject;
#include "../../Python/jit_unwind.c"

void
_PyPerf_FillSlots(char *memory, size_t size, size_t slot_size)
{
    for (size_t at = 0; at < size; at += slot_size) {
        memcpy(memory + at, template.code, template.code_size);
    }
    __builtin___clear_cache(memory, memory + size);
}

/* `num_slots` trampolines in anonymous memory, executable and not writable, and behind them the unwind data. */
static inline uint8_t *
make_slots(size_t num_slots, uint32_t slot_size, uint8_t **out_eh_frame)
{
    const char *reason;
    size_t page_size = sysconf(_SC_PAGESIZE), size = _PyPerf_ALIGN(num_slots * slot_size, page_size);
    char *memory = mmap(NULL, size + page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (_PyPerf_GetTemplate(&reason) == NULL || memory == MAP_FAILED) {
        abort();
    }
    _PyPerf_FillSlots(memory, num_slots * slot_size, slot_size);
    *out_eh_frame = (uint8_t *)memory + size;
    elf_init_ehframe_perf(*out_eh_frame, &(_PyPerf_CodeRegions){-(int32_t)size, template.code_size, slot_size, num_slots});
    if (mprotect(memory, size, PROT_READ | PROT_EXEC) < 0) {
        abort();
    }
    return (uint8_t *)memory;
}

#endif
