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

   DWARF 5 section 6.4 and the Linux Standard Base, "Exception Frames", describe the bytes. */

#include "pycore_perf_trampoline.h"

#ifdef PY_HAVE_PERF_TRAMPOLINE
#  include "pycore_perf_eh_frame_generated.h"
#endif

#ifdef PERF_TRAMPOLINE_ARCH

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
