/* Backend "perf_jit": /tmp/jit-PID.dump, from which perf inject --jit makes an ELF file for each function.

   perf finds the dump by the executable mapping of its first page, and libdw takes a file for one of ours only under
   /tmp/jitted-, which perf makes beside the dump: so the directory is not a choice.

   A function is three records, in this order: JIT_CODE_UNWINDING_INFO and JIT_CODE_DEBUG_INFO apply to the next
   JIT_CODE_LOAD. They are stored as one group that begins and ends at a multiple of 8; its first word, the id and size
   of the first record, is stored last. Until then a reader finds the zero that ends a dump. */

#include "pycore_perf_trampoline.h"

#ifndef _PyPerf_STUBS

#include "pycore_perf_jitdump.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Some perf versions derive a build-id from the code alone and merge files with equal ones: 8 bytes behind the copy
   of the code, within its size, tell each from every other. They are never executed. */
#define SALT_SIZE 8

static _PyPerf_File dump_file;
static void *marker = MAP_FAILED;
static uint64_t code_index;

/* Sizes that are the same for all functions. */
static size_t code_size, unwinding_size, mapped_size;

/* 0 when it has failed. */
static uint64_t
monotonic_ns(void)
{
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) < 0) {
        _PyPerf_Fail("cannot read CLOCK_MONOTONIC: %s", strerror(errno));
        return 0;
    }
    return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void
jitdump_close(void)
{
    if (marker != MAP_FAILED) {
        munmap(marker, sysconf(_SC_PAGESIZE));
        marker = MAP_FAILED;
    }
    _PyPerfFile_Close(&dump_file);
}

static int
jitdump_open(void)
{
    if (dump_file.is_open) {
        return 0;
    }
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    char path[64];
    snprintf(path, sizeof(path), "/tmp/jit-%d.dump", (int)_PyPerf_ProcessId());
    if (_PyPerfFile_Open(&dump_file, path, false) < 0) {
        return -1;
    }
    uint64_t now = monotonic_ns();
    jitheader *header = now == 0 ? NULL : (jitheader *)_PyPerfFile_Reserve(&dump_file, sizeof(jitheader));
    if (header == NULL) {
        goto error;
    }
    *header = (jitheader){
        .magic = JITHEADER_MAGIC, .version = JITHEADER_VERSION, .total_size = sizeof(jitheader),
        .elf_mach = template->e_machine, .pid = _PyPerf_ProcessId(), .timestamp = now,
    };
    int fd = _PyPerfFile_Descriptor(&dump_file);
    marker = mmap(NULL, sysconf(_SC_PAGESIZE), PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
    close(fd);
    if (marker == MAP_FAILED) {
        _PyPerf_Fail("cannot map %s as executable, so perf would not find it: %s", path,
                     errno == EPERM || errno == EACCES ? _PyPerf_FORBIDDEN : strerror(errno));
        goto error;
    }
    code_index = 0;
    code_size = _PyPerf_ALIGN(template->code_size, 8) + SALT_SIZE;
    unwinding_size = elf_ehframe_size_perf(1) + _PyPerf_EH_FRAME_HDR_SIZE(1);
    mapped_size = _PyPerf_ALIGN(unwinding_size, 16);
    return 0;

error:
    unlink(path);
    jitdump_close();
    return -1;
}

static int
jitdump_reserve(_PyPerf_CodeMemory *out_memory)
{
    static void *_Atomic original;
    /* perf lays unwind data behind the code, in a map that must not hide the next slot's. */
    return _PyPerf_ReserveAnonymous(out_memory, &original, _PyPerf_ALIGN(code_size + mapped_size, 64));
}

static int
jitdump_publish(const _PyPerf_CodeMemory *Py_UNUSED(memory), uintptr_t slot, PyCodeObject *code)
{
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    static char name[_PyPerf_NAME_MAX], path[_PyPerf_NAME_MAX];
    size_t name_size = _PyPerf_FormatName(code, name);
    size_t path_size = _PyPerf_EncodePath(code->co_filename, path, sizeof(path));
    if (path_size == 1 && path[0] == '\xff') {      /* would mean the same file as in the entry before */
        path_size = sprintf(path, "./\xff");
    }
    uint64_t now = monotonic_ns();
    if (now == 0) {
        return -1;
    }

    jr_code_debug_info debug = {
        .p = {JIT_CODE_DEBUG_INFO, sizeof(debug) + sizeof(debug_entry) + path_size + 1, now},
        .code_addr = slot, .nr_entry = 1,
    };
    debug_entry entry = {.addr = slot, .lineno = code->co_firstlineno};
    jr_code_load load = {
        .p = {JIT_CODE_LOAD, sizeof(load) + name_size + 1 + code_size, now},
        .pid = _PyPerf_ProcessId(), .tid = _PyPerf_ThreadId(),
        .vma = slot, .code_addr = slot, .code_size = code_size, .code_index = code_index,
    };
    /* perf takes the code from a JIT_CODE_LOAD's end, others from behind the name: only the first record may be
       padded, so it pads the group. */
    size_t tail = debug.p.total_size + load.p.total_size;
    size_t unwinding_total = sizeof(jr_code_unwinding_info) + unwinding_size;
    unwinding_total += -(unwinding_total + tail) % 8;
    jr_code_unwinding_info unwinding = {
        .p = {JIT_CODE_UNWINDING_INFO, unwinding_total, now},
        .unwinding_size = unwinding_size, .eh_frame_hdr_size = _PyPerf_EH_FRAME_HDR_SIZE(1), .mapped_size = mapped_size,
    };

    char *group = _PyPerfFile_Reserve(&dump_file, unwinding_total + tail);
    if (group == NULL) {
        return -1;
    }
    /* D -> B in jit_unwind.c; code_size is a multiple of 8. */
    const _PyPerf_CodeRegions region = {.code_offset = -(int32_t)code_size, .code_size = code_size, .num_regions = 1};
    uint8_t *eh_frame = (uint8_t *)group + sizeof(unwinding);
    elf_init_ehframe_perf(eh_frame, &region);
    elf_init_ehframe_hdr_perf(eh_frame + elf_ehframe_size_perf(1), elf_ehframe_size_perf(1), &region);

    char *end = group + unwinding_total;
    end = mempcpy(end, &debug, sizeof(debug));
    end = mempcpy(end, &entry, sizeof(entry));
    end = mempcpy(end, path, path_size) + 1;
    end = mempcpy(end, &load, sizeof(load));
    end = mempcpy(end, name, name_size) + 1;
    memcpy(end, template->code, template->code_size);
    uint64_t salt = (uint64_t)_PyPerf_ProcessId() << 40 ^ code_index++;
    memcpy(end + code_size - SALT_SIZE, &salt, SALT_SIZE);

    uint64_t first_word;
    memcpy(&first_word, &unwinding, 8);
    memcpy(group + 8, (char *)&unwinding + 8, sizeof(unwinding) - 8);
    __atomic_store_n((uint64_t *)group, first_word, __ATOMIC_RELEASE);
    return _PyPerfFile_Commit(&dump_file);
}

static void
jitdump_after_fork(void)
{
    if (marker != MAP_FAILED) {
        munmap(marker, sysconf(_SC_PAGESIZE));
        marker = MAP_FAILED;
    }
    _PyPerfFile_AfterFork(&dump_file);
}

static const char *
jitdump_path(size_t index)
{
    return index == 0 && dump_file.path[0] != '\0' ? dump_file.path : NULL;
}

const _PyPerf_Backend _PyPerf_jitdump_backend = {
    .name = "perf_jit",
    .relets = true,
    .open = jitdump_open,
    .reserve = jitdump_reserve,
    .publish = jitdump_publish,
    .retire = _PyPerf_RetirePages,
    .after_fork = jitdump_after_fork,
    .close = jitdump_close,
    .path = jitdump_path,
};

#endif
