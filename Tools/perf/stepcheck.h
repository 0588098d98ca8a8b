/* For a program of the package's own code without an interpreter: included first, by the compiler's command line. */

#ifndef STEPCHECK_H
#define STEPCHECK_H
#ifndef __ASSEMBLER__

#define _GNU_SOURCE
#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* In place of pycore_perf_compat.h, whatever the core reads of Python.h. */
#define Py_INTERNAL_PERF_COMPAT_H
#define PY_HAVE_PERF_TRAMPOLINE
#define Py_ARRAY_LENGTH(array) (sizeof(array) / sizeof((array)[0]))
#define Py_MIN(x, y) ((x) < (y) ? (x) : (y))
#define Py_MAX(x, y) ((x) > (y) ? (x) : (y))
typedef ssize_t Py_ssize_t;
typedef struct PyObject PyObject;
typedef struct PyInterpreterState PyInterpreterState;
typedef struct {
    PyObject *co_filename;
    int co_firstlineno;
} PyCodeObject;

#include "pycore_perf_trampoline.h"

typedef void *evaluator_t(void *ts, void *frame, int throwflag);
typedef void *trampoline_t(void *ts, void *frame, int throwflag, evaluator_t *evaluator);

/* Trampolines in anonymous memory, executable and not writable, and on the next page their unwind data. Returns how far
   they are apart. */
static inline size_t
make_slots(size_t num_slots, uint8_t **out_slots, uint8_t **out_eh_frame)
{
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    if (template == NULL) {
        abort();
    }
    size_t slot_size = _PyPerf_ALIGN(template->code_size, 16), page_size = sysconf(_SC_PAGESIZE);
    size_t size = _PyPerf_ALIGN(num_slots * slot_size, page_size);
    uint8_t *slots = mmap(NULL, size + page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slots == MAP_FAILED) {
        abort();
    }
    for (size_t i = 0; i < num_slots; i++) {
        memcpy(slots + i * slot_size, template->code, template->code_size);
    }
    __builtin___clear_cache((char *)slots, (char *)slots + size);
    _PyPerf_CodeRegions regions = {-(int32_t)size, template->code_size, slot_size, num_slots};
    elf_init_ehframe_perf(slots + size, &regions);
    if (mprotect(slots, size, PROT_READ | PROT_EXEC) < 0) {
        abort();
    }
    *out_slots = slots;
    *out_eh_frame = slots + size;
    return slot_size;
}

#endif
#endif
