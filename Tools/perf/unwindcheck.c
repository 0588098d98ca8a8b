/* A chain of five trampolines, walked from its end by every unwinder that the architecture has.

       unwindcheck             slots in anonymous memory, unwind data registered in the process
       unwindcheck DIRECTORY   slots in an ELF image there, which unwinders find as any shared object

   A line per unwinder: its name, then "agrees", or the list it gave beside the right one. CHAIN_NEXT, CHAIN_RA and
   CHAIN_RA_IN_NEXT are the table's chain; REGISTERS is R(DWARF number) for sp, then for the callee-saved registers;
   SP_IS_CFA if sp is none of these. */

#include <dlfcn.h>
#include <elfutils/libdwfl.h>
#include <link.h>
#include <stdio.h>
#include <unwind.h>
#define UNW_LOCAL_ONLY
#include <libunwind.h>

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
static trampoline_t *callees[LENGTH + 1];       /* the slots, and the end */
static uintptr_t return_addresses[LENGTH + 1];  /* into main, and into each slot */
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

__attribute__((noinline)) static bool
add(uintptr_t ip)
{
    found[num_found++] = ip;
    return num_found < MAX_FRAMES;
}

static _Unwind_Reason_Code
collect(struct _Unwind_Context *context, void *unused)
{
    (void)unused;
    return add(_Unwind_GetIP(context)) ? _URC_NO_REASON : _URC_END_OF_STACK;
}

static void
walk_with_libgcc(void)
{
    _Unwind_Backtrace(collect, NULL);
}

static void
walk_with_libunwind(void)
{
    unw_context_t context;
    unw_cursor_t cursor;
    unw_getcontext(&context);
    unw_init_local(&cursor, &context);
    unw_word_t ip;
    do {
        unw_get_reg(&cursor, UNW_REG_IP, &ip);
    } while (add(ip) && unw_step(&cursor) > 0);
}

/* libdw begins with the registers of any frame, as perf has them from a sample. Ours are those of the evaluator at
   expected[0], which libgcc has found. */
static struct { int dwarf; Dwarf_Word value; } registers[] = {
#define R(dwarf) {dwarf, 0},
    REGISTERS
#undef R
};
#define NUM_REGISTERS (sizeof(registers) / sizeof(registers[0]))

static _Unwind_Reason_Code
take_registers(struct _Unwind_Context *context, void *unused)
{
    (void)unused;
    if (_Unwind_GetIP(context) != expected[0]) {
        return _URC_NO_REASON;
    }
    for (size_t i = 0; i < NUM_REGISTERS; i++) {
        registers[i].value = i == 0 && SP_IS_CFA ? _Unwind_GetCFA(context)
                                                 : _Unwind_GetGR(context, registers[i].dwarf);
    }
    return _URC_END_OF_STACK;
}

static pid_t
next_thread(Dwfl *dwfl, void *argument, void **state)
{
    (void)dwfl, (void)argument;
    bool first = *state == NULL;
    *state = registers;
    return first ? getpid() : 0;
}

static bool
read_memory(Dwfl *dwfl, Dwarf_Addr address, Dwarf_Word *result, void *argument)
{
    (void)dwfl, (void)argument;
    *result = *(Dwarf_Word *)address;
    return true;
}

static bool
set_registers(Dwfl_Thread *thread, void *argument)
{
    (void)argument;
    dwfl_thread_state_register_pc(thread, expected[0]);
    for (size_t i = 0; i < NUM_REGISTERS; i++) {
        if (!dwfl_thread_state_registers(thread, registers[i].dwarf, 1, &registers[i].value)) {
            return false;
        }
    }
    return true;
}

static int
add_frame(Dwfl_Frame *frame, void *argument)
{
    (void)argument;
    Dwarf_Addr pc;
    return dwfl_frame_pc(frame, &pc, NULL) && add(pc) ? DWARF_CB_OK : DWARF_CB_ABORT;
}

static void
walk_with_libdw(void)
{
    static const Dwfl_Callbacks callbacks = {
        .find_elf = dwfl_linux_proc_find_elf, .find_debuginfo = dwfl_standard_find_debuginfo,
    };
    static const Dwfl_Thread_Callbacks threads = {
        .next_thread = next_thread, .memory_read = read_memory, .set_initial_registers = set_registers,
    };
    _Unwind_Backtrace(take_registers, NULL);
    Dwfl *dwfl = dwfl_begin(&callbacks);
    if (dwfl_linux_proc_report(dwfl, getpid()) != 0 || dwfl_report_end(dwfl, NULL, NULL) != 0
        || !dwfl_attach_state(dwfl, NULL, getpid(), &threads, NULL)
        || dwfl_getthread_frames(dwfl, getpid(), add_frame, NULL) < 0)
    {
        printf("libdw: %s\n", dwfl_errmsg(-1));
    }
    dwfl_end(dwfl);
}

/* As the kernel does for perf record -g. It must not be inlined, for on s390x this builtin gives the caller's frame;
   nor be a leaf, for on riscv64 these have no return address in theirs. */
__attribute__((noinline)) static void
walk_chain(void)
{
    uintptr_t frame = (uintptr_t)__builtin_frame_address(0);
    for (int i = 0; i < 2 * LENGTH + 2; i++) {
        uintptr_t next = *(uintptr_t *)(frame + CHAIN_NEXT);
        add(*(uintptr_t *)((CHAIN_RA_IN_NEXT ? next : frame) + CHAIN_RA));
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
        *next++ = return_addresses[i + 1];
        uintptr_t offset = return_addresses[i + 1] - (uintptr_t)callees[i];
        if (offset == 0 || offset > template->code_size) {
            abort();
        }
    }
    *next = (uintptr_t)__builtin_return_address(0);
    if (!silent) {
        walk_by("frame chain", walk_chain);
        walk_by("libgcc", walk_with_libgcc);
        if (image) {                            /* it does not know __register_frame() */
            walk_by("libunwind", walk_with_libunwind);
            walk_by("libdw", walk_with_libdw);
        }
    }
    return ts;
}

/* Without a branch, lest the compiler makes two calls of one. */
__attribute__((noinline)) static void *
evaluator(void *ts, void *frame, int level)
{
    return_addresses[level] = (uintptr_t)__builtin_return_address(0);
    return (char *)callees[level](ts, frame, level + 1, evaluator) + 1;
}

int
main(int argc, char **argv)
{
    const char *reason, *directory = argc > 1 ? argv[1] : NULL;
    template = _PyPerf_GetTemplate(&reason);
    if (directory == NULL) {
        uint8_t *slots, *eh_frame;
        memory.slot_size = make_slots(LENGTH, &slots, &eh_frame);
        memory.base = (uintptr_t)slots;
        __register_frame(eh_frame);             /* zeros follow, which end it */
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
        uintptr_t slot = memory.base + i * memory.slot_size;
        callees[i] = (trampoline_t *)slot;
        if (directory && _PyPerf_elf_backend.publish(&memory, slot, &(PyCodeObject){NULL, i + 1}) != 0) {
            return 2;
        }
    }
    callees[LENGTH] = end_of_chain;
    if (evaluator(NULL, NULL, 0) != (char *)NULL + LENGTH + 1) {
        return 2;
    }
    silent = true;
    tell_ready();
    evaluator(NULL, NULL, 0);
    return failed;
}
