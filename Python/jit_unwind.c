/* Unwind data for copies of the trampoline: a template lifted out of the assembled object, and patched fields.

   perf inject --jit builds this ELF file of a code region, and both of its unwinders look for the data there:

       (A) ELF header, one program header
       (B) .text            code_size bytes, at a multiple of 8
       (C) padding to 8
       (D) .eh_frame        CIE, FDE: the template
       (E) .eh_frame_hdr    20 bytes, directly behind
       (F) other sections

   so that D -> B is -ALIGN8(code_size), whatever the file and the address. libdw reads only (D), libunwind only the
   search table in (E) and the FDE that it names: each hides an error in the other.

   An ELF image of many trampolines has one CIE and an FDE for each, and a search table of as many entries.

   The code of CPython's own JIT keeps a frame record at all its instructions, so a second template, which has one row,
   describes it wherever it is; CPython's build tells how far above the record the frame ends. gdb's manual tells of
   registering such code in "JIT Compilation Interface".

   DWARF 5 section 6.4 and the Linux Standard Base, "Exception Frames", describe the bytes. */

#include "pycore_perf_trampoline.h"

#ifdef _PyPerf_HAVE_JIT_CODE
#  include "pycore_jit_unwind.h"
#endif

#if defined(PY_HAVE_PERF_TRAMPOLINE) || defined(PY_HAVE_JIT_GDB_UNWIND)
#  include "pycore_perf_eh_frame_generated.h"
#endif

#if defined(PERF_TRAMPOLINE_ARCH) && !defined(_PyPerf_STUBS)

#include <string.h>

extern const unsigned char _Py_trampoline_func_start[] __attribute__((visibility("hidden")));
extern const unsigned char _Py_trampoline_func_end[] __attribute__((visibility("hidden")));

static const _PyPerf_Template template = {
    .arch = PERF_TRAMPOLINE_ARCH,
    .e_machine = PERF_TRAMPOLINE_E_MACHINE,
    .e_flags = PERF_TRAMPOLINE_E_FLAGS,
    .code = perf_trampoline_code,
    .code_size = sizeof(perf_trampoline_code),
    .elf_class = PERF_TRAMPOLINE_ELF_CLASS,
    .elf_data = PERF_TRAMPOLINE_ELF_DATA,
    .hash_entry_size = PERF_TRAMPOLINE_HASH_ENTRY_SIZE,
};

/* libunwind takes (E) for granted at a multiple of 4. */
static_assert(sizeof(perf_trampoline_eh_frame) % 4 == 0 && PERF_TRAMPOLINE_CIE_SIZE % 4 == 0, ".eh_frame is padded");
/* A perf map's size field is written as two digits. */
static_assert(sizeof(perf_trampoline_code) <= 0xff, "a trampoline is small");

const _PyPerf_Template *
_PyPerf_GetTemplate(const char **out_reason)
{
    size_t linked_size = _Py_trampoline_func_end - _Py_trampoline_func_start;
    if (linked_size != template.code_size || memcmp(_Py_trampoline_func_start, template.code, linked_size) != 0) {
        *out_reason = "the trampoline in this build is not the one that its unwind data was made from: "
                      "run make regen-perf-trampoline, then make";
        return NULL;
    }
    return &template;
}

#define CIE_SIZE PERF_TRAMPOLINE_CIE_SIZE
#define FDE_SIZE (sizeof(perf_trampoline_eh_frame) - CIE_SIZE)

size_t
elf_ehframe_size_perf(size_t num_regions)
{
    return CIE_SIZE + num_regions * FDE_SIZE;
}

void
elf_init_ehframe_perf(uint8_t *eh_frame, const _PyPerf_CodeRegions *regions)
{
    /* All patched fields are four bytes in the machine's own order, the address relative to its own place
       (pcrel|sdata4): the generator refuses any other template. */
    memcpy(eh_frame, perf_trampoline_eh_frame, CIE_SIZE);
    for (size_t i = 0; i < regions->num_regions; i++) {
        size_t offset = CIE_SIZE + i * FDE_SIZE;    /* of this FDE; the template's is at CIE_SIZE */
        uint8_t *fde = eh_frame + offset;
        uint32_t cie_pointer = (uint32_t)offset + 4;
        int32_t initial_location = (int32_t)(regions->code_offset + i * regions->spacing
                                             - (offset + PERF_TRAMPOLINE_INITIAL_LOCATION_OFFSET - CIE_SIZE));
        memcpy(fde, perf_trampoline_eh_frame + CIE_SIZE, FDE_SIZE);
        memcpy(fde + 4, &cie_pointer, 4);
        memcpy(fde + PERF_TRAMPOLINE_INITIAL_LOCATION_OFFSET - CIE_SIZE, &initial_location, 4);
        memcpy(fde + PERF_TRAMPOLINE_ADDRESS_RANGE_OFFSET - CIE_SIZE, &regions->code_size, 4);
    }
}

void
elf_init_ehframe_hdr_perf(uint8_t *eh_frame_hdr, int32_t hdr_offset, const _PyPerf_CodeRegions *regions)
{
    struct {
        uint8_t version, eh_frame_ptr_enc, fde_count_enc, table_enc;
        int32_t eh_frame_ptr;       /* relative to itself */
        uint32_t fde_count;
    } header = {
        1, 0x1b /* pcrel|sdata4 */, 0x03 /* udata4 */, 0x3b /* datarel|sdata4 */,
        -(hdr_offset + 4), (uint32_t)regions->num_regions,
    };
    static_assert(sizeof(header) + 8 == _PyPerf_EH_FRAME_HDR_SIZE(1), "perf reads exactly 20 bytes");
    memcpy(eh_frame_hdr, &header, sizeof(header));
    for (size_t i = 0; i < regions->num_regions; i++) {
        int32_t entry[2] = {            /* initial location and FDE, relative to (E) */
            (int32_t)(regions->code_offset + i * regions->spacing) - hdr_offset,
            (int32_t)(CIE_SIZE + i * FDE_SIZE) - hdr_offset,
        };
        memcpy(eh_frame_hdr + sizeof(header) + i * sizeof(entry), entry, sizeof(entry));
    }
}

#elif !defined(_PyPerf_STUBS)

const _PyPerf_Template *
_PyPerf_GetTemplate(const char **out_reason)
{
    *out_reason = "there is no trampoline for this architecture";
    return NULL;
}

size_t
elf_ehframe_size_perf(size_t num_regions)
{
    return (void)num_regions, 0;
}

void
elf_init_ehframe_perf(uint8_t *eh_frame, const _PyPerf_CodeRegions *regions)
{
    (void)eh_frame, (void)regions;
}

void
elf_init_ehframe_hdr_perf(uint8_t *eh_frame_hdr, int32_t hdr_offset, const _PyPerf_CodeRegions *regions)
{
    (void)eh_frame_hdr, (void)hdr_offset, (void)regions;
}

#endif

#if defined(_PyPerf_HAVE_JIT_CODE) && defined(PERF_TRAMPOLINE_FRAME_ADDRESS_RANGE_OFFSET) && !defined(_PyPerf_CPYTHONS_OWN)

#include <elf.h>
#include <stdio.h>
#include <string.h>

#if __has_include("jit_unwind_info.h")
#  include "jit_unwind_info.h"
#endif

/* Of a trampoline in perf's file, or, with absolute addresses, of the JIT's code. */
size_t
_PyJitUnwind_EhFrameSize(int absolute)
{
#ifndef _PyPerf_STUBS
    if (!absolute) {
        return elf_ehframe_size_perf(1);
    }
#endif
    return absolute ? sizeof(perf_frame_eh_frame) : 0;
}

size_t
_PyJitUnwind_BuildEhFrame(uint8_t *eh_frame, size_t room, const void *code, size_t code_size, int absolute)
{
    size_t size = _PyJitUnwind_EhFrameSize(absolute);
    if (eh_frame == NULL || code == NULL || code_size == 0 || size > room) {
        return 0;
    }
    if (absolute) {
        memcpy(eh_frame, perf_frame_eh_frame, size);
        memcpy(eh_frame + PERF_TRAMPOLINE_FRAME_INITIAL_LOCATION_OFFSET, &code, 8);
        memcpy(eh_frame + PERF_TRAMPOLINE_FRAME_ADDRESS_RANGE_OFFSET, &code_size, 8);
#ifdef JIT_UNWIND_CFA_OFFSET
        uint8_t *rules = eh_frame + PERF_TRAMPOLINE_FRAME_RULES_OFFSET;     /* of the CFA, and of two slots below it */
        static_assert(JIT_UNWIND_CFA_OFFSET < 128 && JIT_UNWIND_CFA_OFFSET % 8 == 0, "a number of one byte");
        int above = JIT_UNWIND_CFA_OFFSET - rules[2];
        rules[2] += above;
        rules[4] += above / PERF_TRAMPOLINE_FRAME_DATA_ALIGNMENT;
        rules[6] += above / PERF_TRAMPOLINE_FRAME_DATA_ALIGNMENT;
#endif
    }
#ifndef _PyPerf_STUBS
    else {
        _PyPerf_CodeRegions region = {-(int32_t)_PyPerf_ALIGN(code_size, 8), (uint32_t)code_size, 0, 1};
        elf_init_ehframe_perf(eh_frame, &region);
    }
#endif
    return size;
}

#ifdef PY_HAVE_JIT_GDB_UNWIND

struct jit_code_entry {
    struct jit_code_entry *next_entry, *prev_entry;
    const void *symfile_addr;
    uint64_t symfile_size;
};

/* gdb knows these two by name. */
struct {
    uint32_t version, action_flag;      /* 1: register relevant_entry, 2: unregister it */
    struct jit_code_entry *relevant_entry, *first_entry;
} __jit_debug_descriptor __attribute__((visibility("default"))) = {.version = 1};

extern void __jit_debug_register_code(void);

void __attribute__((noinline, visibility("default")))
__jit_debug_register_code(void)
{
    __asm__ volatile("" ::: "memory");      /* gdb stops here and reads what was stored before the call */
}

PyMutex _Py_jit_debug_mutex;

static void
tell_gdb(struct jit_code_entry *entry, uint32_t action)
{
    __jit_debug_descriptor.relevant_entry = entry;
    __jit_debug_descriptor.action_flag = action;
    __jit_debug_register_code();
    __jit_debug_descriptor.action_flag = 0;
    __jit_debug_descriptor.relevant_entry = NULL;
}

enum {TEXT = 1, EH_FRAME, SYMTAB, STRTAB, NUM_SECTIONS};

/* An ELF file of one function, whose code is where it is. */
struct symfile {
    struct jit_code_entry entry;
    Elf64_Ehdr header;
    Elf64_Shdr section[NUM_SECTIONS];
    Elf64_Sym symbol[2];
    uint8_t eh_frame[sizeof(perf_frame_eh_frame)];
    char strings[];
};

/* In that file. */
#define OFFSET(member) (offsetof(struct symfile, member) - offsetof(struct symfile, header))

static const struct section_names {
    char none[1], text[6], eh_frame[10], symtab[8], strtab[8];
} section_names = {"", ".text", ".eh_frame", ".symtab", ".strtab"};
#define NAME(section) offsetof(struct section_names, section)

void *
_PyJitUnwind_GdbRegisterCode(const void *code, size_t code_size, const char *function, const char *filename)
{
    size_t name_size = snprintf(NULL, 0, "py::%s:%s", function, filename) + 1;
    size_t strings_size = sizeof(section_names) + name_size;
    struct symfile *file = PyMem_RawCalloc(1, sizeof(*file) + strings_size);
    if (file == NULL
        || _PyJitUnwind_BuildEhFrame(file->eh_frame, sizeof(file->eh_frame), code, code_size, 1) == 0)
    {
        PyMem_RawFree(file);
        return NULL;
    }
    file->header = (Elf64_Ehdr){
        .e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, PERF_TRAMPOLINE_ELF_CLASS, PERF_TRAMPOLINE_ELF_DATA, EV_CURRENT},
        .e_type = ET_DYN, .e_machine = PERF_TRAMPOLINE_E_MACHINE, .e_version = EV_CURRENT,
        .e_shoff = OFFSET(section), .e_flags = PERF_TRAMPOLINE_E_FLAGS, .e_ehsize = sizeof(Elf64_Ehdr),
        .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = NUM_SECTIONS, .e_shstrndx = STRTAB,
    };
    Elf64_Shdr section[NUM_SECTIONS] = {
        [TEXT] = {.sh_name = NAME(text), .sh_type = SHT_NOBITS, .sh_flags = SHF_ALLOC | SHF_EXECINSTR,
                  .sh_addr = (uintptr_t)code, .sh_size = code_size, .sh_addralign = 1},
        [EH_FRAME] = {.sh_name = NAME(eh_frame), .sh_type = SHT_PROGBITS, .sh_flags = SHF_ALLOC,
                      .sh_addr = (uintptr_t)file->eh_frame, .sh_offset = OFFSET(eh_frame),
                      .sh_size = sizeof(file->eh_frame), .sh_addralign = 1},
        [SYMTAB] = {.sh_name = NAME(symtab), .sh_type = SHT_SYMTAB, .sh_offset = OFFSET(symbol), .sh_size = sizeof(file->symbol),
                    .sh_link = STRTAB, .sh_info = 1, .sh_addralign = 8, .sh_entsize = sizeof(Elf64_Sym)},
        [STRTAB] = {.sh_name = NAME(strtab), .sh_type = SHT_STRTAB, .sh_offset = OFFSET(strings), .sh_size = strings_size,
                    .sh_addralign = 1},
    };
    memcpy(file->section, section, sizeof(section));
    file->symbol[1] = (Elf64_Sym){.st_name = sizeof(section_names), .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC),
                                  .st_shndx = TEXT, .st_value = (uintptr_t)code, .st_size = code_size};
    memcpy(file->strings, &section_names, sizeof(section_names));
    snprintf(file->strings + sizeof(section_names), name_size, "py::%s:%s", function, filename);

    struct jit_code_entry *entry = &file->entry;
    entry->symfile_addr = &file->header;
    entry->symfile_size = OFFSET(strings) + strings_size;
    PyMutex_Lock(&_Py_jit_debug_mutex);
    entry->next_entry = __jit_debug_descriptor.first_entry;
    if (entry->next_entry != NULL) {
        entry->next_entry->prev_entry = entry;
    }
    __jit_debug_descriptor.first_entry = entry;
    tell_gdb(entry, 1);
    PyMutex_Unlock(&_Py_jit_debug_mutex);
    return file;
}

void
_PyJitUnwind_GdbUnregisterCode(void *handle)
{
    if (handle == NULL) {
        return;
    }
    struct jit_code_entry *entry = &((struct symfile *)handle)->entry;
    PyMutex_Lock(&_Py_jit_debug_mutex);
    *(entry->prev_entry != NULL ? &entry->prev_entry->next_entry : &__jit_debug_descriptor.first_entry) = entry->next_entry;
    if (entry->next_entry != NULL) {
        entry->next_entry->prev_entry = entry->prev_entry;
    }
    tell_gdb(entry, 2);
    PyMutex_Unlock(&_Py_jit_debug_mutex);
    PyMem_RawFree(handle);
}

#endif

#ifdef PY_HAVE_JIT_GNU_BACKTRACE_UNWIND

/* libgcc's, for backtrace(). */
extern void __register_frame(void *eh_frame);
extern void __deregister_frame(void *eh_frame);

void *
_PyJitUnwind_GnuBacktraceRegisterCode(const void *code, size_t code_size)
{
    size_t size = _PyJitUnwind_EhFrameSize(1);
    uint8_t *eh_frame = PyMem_RawCalloc(1, size + 4);       /* a length of 0 ends it */
    if (eh_frame == NULL || _PyJitUnwind_BuildEhFrame(eh_frame, size, code, code_size, 1) == 0) {
        PyMem_RawFree(eh_frame);
        return NULL;
    }
    __register_frame(eh_frame);
    return eh_frame;
}

void
_PyJitUnwind_GnuBacktraceUnregisterCode(void *handle)
{
    if (handle != NULL) {
        __deregister_frame(handle);
        PyMem_RawFree(handle);
    }
}

#endif

#endif
