/* A chain of five trampolines, walked from its end by every unwinder that the architecture has.

       unwindcheck             slots in anonymous memory, unwind data registered in the process
       unwindcheck DIRECTORY   slots in an ELF image there, which unwinders find as any shared object

   A line per unwinder: its name, then "agrees" or the list it gave beside the right one. CHAIN_NEXT, CHAIN_RA
   and CHAIN_RA_IN_NEXT are the table's chain. */

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <unwind.h>
#ifdef HAVE_LIBUNWIND
#  define UNW_LOCAL_ONLY
#  include <libunwind.h>
#endif

static const _PyPerf_Template *template;

#define LENGTH 5
#define MAX_FRAMES 64

extern void __register_frame(void *eh_frame);

/* What the ELF backend wants of the rest of the package. */
int _PyPerf_Fail(const char *format, ...) { return fprintf(stderr, "%s\n", format), -1; }
size_t _PyPerf_FormatName(PyCodeObject *code, char *name) { return sprintf(name, "py::f%d", code->co_firstlineno); }
size_t _PyPerf_EncodePath(PyObject *text, char *path, size_t size) { return (void)text, snprintf(path, size, "f.py"); }
pid_t _PyPerf_ProcessId(void) { return getpid(); }
void _PyPerf_RetirePages(void *pages, size_t size) { (void)pages, (void)size; }

void
_PyPerf_FillSlots(char *memory, size_t size, size_t slot_size)
{
    for (size_t at = 0; at + slot_size <= size; at += slot_size) {
        memcpy(memory + at, template->code, template->code_size);
    }
    __builtin___clear_cache(memory, memory + size);
}

/* For gdb too. */
static _PyPerf_CodeMemory memory;
static trampoline_t *slots[LENGTH];
static uintptr_t return_addresses[LENGTH];      /* into each slot */
static uintptr_t expected[2 * LENGTH + 1], found[MAX_FRAMES];
static size_t num_found;
static int failed;
static struct link_map *image;
void ready(void) {}
void (*volatile tell_ready)(void) = ready;

static void
compare(const char *name)
{
    const uintptr_t *first = found, *end = found + num_found;
    while (first < end && *first != expected[0]) {
        first++;                                /* the walker's own frames */
    }
    if ((size_t)(end - first) >= LENGTH * 2 + 1 && memcmp(first, expected, sizeof(expected)) == 0) {
        printf("%s agrees\n", name);
        return;
    }
    failed = 1;
    printf("%s does not agree:\n", name);
    for (size_t i = 0; i < 2 * LENGTH + 1 || i < num_found; i++) {
        printf("%18lx %18lx\n", i < num_found ? found[i] : 0, i < 2 * LENGTH + 1 ? expected[i] : 0);
    }
}

static _Unwind_Reason_Code
collect(struct _Unwind_Context *context, void *unused)
{
    (void)unused;
    if (num_found < MAX_FRAMES) {
        found[num_found++] = _Unwind_GetIP(context);
    }
    return _URC_NO_REASON;
}

static void
walk_with_libgcc(void)
{
    _Unwind_Backtrace(collect, NULL);
}

#ifdef HAVE_LIBUNWIND
static void
walk_with_libunwind(void)
{
    unw_context_t context;
    unw_cursor_t cursor;
    unw_getcontext(&context);
    unw_init_local(&cursor, &context);
    do {
        unw_word_t ip;
        unw_get_reg(&cursor, UNW_REG_IP, &ip);
        found[num_found++] = ip;
    } while (num_found < MAX_FRAMES && unw_step(&cursor) > 0);
}
#endif

/* As the kernel does for perf record -g. The chain ends where main's callers do not keep it. */
static void
walk_chain(void)
{
    uintptr_t frame = (uintptr_t)__builtin_frame_address(0);
    while (num_found < 2 * LENGTH + 2) {
        uintptr_t next = *(uintptr_t *)(frame + CHAIN_NEXT);
        found[num_found++] = *(uintptr_t *)((CHAIN_RA_IN_NEXT ? next : frame) + CHAIN_RA);
        frame = next;
    }
}

static void
walk_by(const char *name, void (*walk)(void))
{
    num_found = 0;
    walk();
    compare(name);
}

static bool silent;

/* Called by the evaluator as a trampoline is, so that the return address in it is known. */
__attribute__((noinline)) static void *
end_of_chain(void *ts, void *frame, int level, evaluator_t *evaluator)
{
    (void)frame, (void)level, (void)evaluator;
    uintptr_t *next = expected;
    for (int i = LENGTH - 1; i >= 0; i--) {
        *next++ = (uintptr_t)__builtin_return_address(0);
        *next++ = return_addresses[i];
        uintptr_t offset = return_addresses[i] - (uintptr_t)slots[i];
        if (offset == 0 || offset > template->code_size) {
            abort();
        }
    }
    *next = (uintptr_t)__builtin_return_address(0);
    if (!silent) {
        walk_by("frame chain", walk_chain);
        walk_by("libgcc", walk_with_libgcc);
#ifdef HAVE_LIBUNWIND
        walk_by("libunwind", walk_with_libunwind);
#endif
    }
    return ts;
}

__attribute__((noinline)) static void *
evaluator(void *ts, void *frame, int level)
{
    if (level > 0) {
        return_addresses[level - 1] = (uintptr_t)__builtin_return_address(0);
    }
    trampoline_t *callee = level < LENGTH ? slots[level] : end_of_chain;
    return (char *)callee(ts, frame, level + 1, evaluator) + 1;
}

static void
make_registered(void)
{
    uint8_t *base, *eh_frame;
    _PyPerf_CodeRegions regions = make_slots(LENGTH, &base, &eh_frame);
    memory = (_PyPerf_CodeMemory){.base = (uintptr_t)base, .slot_size = regions.spacing, .num_slots = LENGTH};
    __register_frame(eh_frame);                 /* zeros follow, which end it */
#ifdef HAVE_LIBUNWIND
    size_t hdr_offset = elf_ehframe_size_perf(LENGTH) + 4;
    uint8_t *hdr = eh_frame + hdr_offset;
    elf_init_ehframe_hdr_perf(hdr, hdr_offset, &regions);
    static unw_dyn_info_t info;
    info = (unw_dyn_info_t){
        .start_ip = memory.base, .end_ip = memory.base + LENGTH * memory.slot_size, .format = UNW_INFO_FORMAT_TABLE,
        .u.ti = {.segbase = (uintptr_t)hdr, .table_len = LENGTH * 8 / sizeof(unw_word_t),
                 .table_data = (unw_word_t *)(hdr + 12)},
    };
    _U_dyn_register(&info);
#endif
}

int
main(int argc, char **argv)
{
    const char *reason, *directory = argc > 1 ? argv[1] : NULL;
    template = _PyPerf_GetTemplate(&reason);
    if (directory == NULL) {
        make_registered();
    }
    else {
        _PyPerfElf_SetDirectories(directory);
        Dl_info info;
        if (_PyPerf_elf_backend.reserve(&memory) < 0
            || !dladdr1((void *)memory.base, &info, (void **)&image, RTLD_DL_LINKMAP))
        {
            return 2;
        }
    }
    for (int i = 0; i < LENGTH; i++) {
        slots[i] = (trampoline_t *)(memory.base + i * memory.slot_size);
        if (directory && _PyPerf_elf_backend.publish(&memory, (uintptr_t)slots[i], &(PyCodeObject){NULL, i + 1}) != 0) {
            return 2;
        }
    }
    if (evaluator(NULL, NULL, 0) != (char *)NULL + LENGTH + 1) {
        return 2;
    }
    silent = true;
    tell_ready();
    evaluator(NULL, NULL, 0);
    return failed;
}
