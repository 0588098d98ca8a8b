/* Backend "perf": /tmp/perf-PID.map, a line `START SIZE NAME` for each function (hexadecimal, no 0x).

   perf looks for this very name, whatever TMPDIR says (tools/perf/Documentation/jit-interface.txt in Linux).
   Other writers may append lines of their own, CPython's PyUnstable_WritePerfMapEntry() does. */

#include "pycore_perf_trampoline.h"

#ifndef _PyPerf_STUBS

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static _PyPerf_File map_file;
static char size_field[8];      /* " SIZE ", the same for all functions */

static int
map_open(void)
{
    char path[64];
    if (map_file.is_open) {
        return 0;
    }
    const char *reason;
    snprintf(size_field, sizeof(size_field), " %02x ", (unsigned)_PyPerf_GetTemplate(&reason)->code_size);
    snprintf(path, sizeof(path), "/tmp/perf-%d.map", (int)_PyPerf_ProcessId());
    return _PyPerfFile_Open(&map_file, path, true);
}

static int
map_reserve(_PyPerf_CodeMemory *out_memory)
{
    static void *_Atomic original;
    const char *reason;
    return _PyPerf_ReserveAnonymous(out_memory, &original, _PyPerf_ALIGN(_PyPerf_GetTemplate(&reason)->code_size, 16));
}

static int
map_publish(const _PyPerf_CodeMemory *Py_UNUSED(memory), uintptr_t slot, PyCodeObject *code)
{
    static char name[_PyPerf_NAME_MAX];
    size_t name_size = _PyPerf_FormatName(code, name);
    char digits[2 * sizeof(slot)], *start = digits + sizeof(digits);
    for (uintptr_t rest = slot; rest != 0; rest >>= 4) {
        *--start = "0123456789abcdef"[rest & 15];
    }
    size_t start_size = digits + sizeof(digits) - start;

    /* A reader may come at any moment, and no prefix of a line may pass for a line. What stands between START and
       NAME is one aligned word, and is stored last: before, START is a line without a size and NAME one without a
       number, and readers skip both. */
    char *line = _PyPerfFile_Reserve(&map_file, 3 + start_size + 4 + name_size + 1);
    if (line == NULL) {
        return -1;
    }
    line += -((uintptr_t)line + start_size) % 4;
    uint32_t word;
    memcpy(&word, size_field, 4);
    memcpy(line, start, start_size);
    memcpy(line + start_size + 4, name, name_size);
    __atomic_store_n((uint32_t *)(line + start_size), word, __ATOMIC_RELEASE);
    return _PyPerfFile_Commit(&map_file);
}

static char parents_path[sizeof(map_file.path)];

static void
map_after_fork(void)
{
    memcpy(parents_path, map_file.path, sizeof(parents_path));
    _PyPerfFile_AfterFork(&map_file);
}

int
_PyPerfMap_Inherit(void)
{
    char buffer[4096];
    int from = open(parents_path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK), to = -1;
    ssize_t size = -1;
    if (from >= 0 && _PyPerfTrampoline_OpenFiles(&_PyPerf_map_backend) == 0) {
        to = _PyPerfFile_Descriptor(&map_file);
    }
    _PyPerf_HeldSignals held;
    _PyPerf_HoldSignals(&held);
    while (to >= 0 && (size = read(from, buffer, sizeof(buffer))) > 0 && write(to, buffer, size) == size) {
    }
    _PyPerf_LetSignals(&held);
    if (size != 0) {
        _PyPerf_Fail("cannot copy %s for a forked process: %s", parents_path, strerror(errno));
    }
    if (from >= 0) {
        close(from);
    }
    if (to >= 0) {
        close(to);
    }
    return size == 0 ? 0 : -1;
}

static void
map_close(void)
{
    _PyPerfFile_Close(&map_file);
}

static const char *
map_path(size_t index)
{
    return index == 0 && map_file.path[0] != '\0' ? map_file.path : NULL;
}

const _PyPerf_Backend _PyPerf_map_backend = {
    .name = "perf",
    .relets = false,
    .open = map_open,
    .reserve = map_reserve,
    .publish = map_publish,
    .retire = _PyPerf_RetirePages,
    .after_fork = map_after_fork,
    .close = map_close,
    .path = map_path,
};

#endif
