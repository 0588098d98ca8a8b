/* Unwind data for one copy of the trampoline: a template lifted out of the assembled object, and two patched fields.

   perf inject --jit builds this ELF file of a code region, and both of its unwinders look for the data there:

       (A) ELF header, one program header
       (B) .text            code_size bytes, at a multiple of 8
       (C) padding to 8
       (D) .eh_frame        CIE, FDE: the template
       (E) .eh_frame_hdr    20 bytes, directly behind
       (F) other sections

   so that D -> B is -ALIGN8(code_size), whatever the file and the address. libdw reads only (D), libunwind only the
   search table in (E) and the FDE that it names: each hides an error in the other.

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
    .eh_frame = perf_trampoline_eh_frame,
    .eh_frame_size = sizeof(perf_trampoline_eh_frame),
    .initial_location_offset = PERF_TRAMPOLINE_INITIAL_LOCATION_OFFSET,
    .address_range_offset = PERF_TRAMPOLINE_ADDRESS_RANGE_OFFSET,
};

/* libunwind takes (E) for granted at a multiple of 4. */
static_assert(sizeof(perf_trampoline_eh_frame) % 4 == 0, ".eh_frame is padded");
/* A perf map's size field is written as two digits. */
static_assert(sizeof(perf_trampoline_code) >= 0x10 - 15 && sizeof(perf_trampoline_code) <= 0xf0, "a slot is small");

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

void
elf_init_ehframe_perf(uint8_t *eh_frame, int32_t code_offset, uint32_t code_size)
{
    /* Both fields are four bytes in the machine's own order, the address relative to its own place (pcrel|sdata4):
       the generator refuses any other template. */
    int32_t initial_location = code_offset - PERF_TRAMPOLINE_INITIAL_LOCATION_OFFSET;
    memcpy(eh_frame, perf_trampoline_eh_frame, sizeof(perf_trampoline_eh_frame));
    memcpy(eh_frame + PERF_TRAMPOLINE_INITIAL_LOCATION_OFFSET, &initial_location, 4);
    memcpy(eh_frame + PERF_TRAMPOLINE_ADDRESS_RANGE_OFFSET, &code_size, 4);
}

void
elf_init_ehframe_hdr_perf(uint8_t *eh_frame_hdr, int32_t code_offset)
{
    const int32_t eh_frame_size = sizeof(perf_trampoline_eh_frame);
    struct {
        uint8_t version, eh_frame_ptr_enc, fde_count_enc, table_enc;
        int32_t eh_frame_ptr;       /* relative to itself */
        uint32_t fde_count;
        int32_t initial_location;   /* this and the next relative to (E) */
        int32_t fde;
    } header = {
        1, 0x1b /* pcrel|sdata4 */, 0x03 /* udata4 */, 0x3b /* datarel|sdata4 */,
        -(eh_frame_size + 4), 1,
        code_offset - eh_frame_size, PERF_TRAMPOLINE_CIE_SIZE - eh_frame_size,
    };
    static_assert(sizeof(header) == _PyPerf_EH_FRAME_HDR_SIZE, "perf reads exactly 20 bytes");
    memcpy(eh_frame_hdr, &header, sizeof(header));
}

#else

const _PyPerf_Template *
_PyPerf_GetTemplate(const char **out_reason)
{
    *out_reason = "there is no trampoline for this architecture";
    return NULL;
}

void elf_init_ehframe_perf(uint8_t *eh_frame, int32_t code_offset, uint32_t code_size)
{
    (void)eh_frame, (void)code_offset, (void)code_size;
}

void elf_init_ehframe_hdr_perf(uint8_t *eh_frame_hdr, int32_t code_offset)
{
    (void)eh_frame_hdr, (void)code_offset;
}

#endif
