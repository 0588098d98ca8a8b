/* The jitdump format, field for field as perf names it (tools/perf/Documentation/jitdump-specification.txt and
   tools/perf/util/jitdump.h in Linux). All numbers are in the byte order of the machine that writes. */

#ifndef Py_INTERNAL_PERF_JITDUMP_H
#define Py_INTERNAL_PERF_JITDUMP_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define JITHEADER_MAGIC 0x4A695444      /* "JiTD", or "DTiJ" read by the other byte order */
#define JITHEADER_VERSION 1

typedef struct {
    uint32_t magic;
    uint32_t version;
    uint32_t total_size;
    uint32_t elf_mach;
    uint32_t pad1;
    uint32_t pid;
    uint64_t timestamp;
    uint64_t flags;                     /* 0: time stamps are CLOCK_MONOTONIC */
} jitheader;

enum jit_record_type {
    JIT_CODE_LOAD = 0,
    JIT_CODE_MOVE = 1,
    JIT_CODE_DEBUG_INFO = 2,
    JIT_CODE_CLOSE = 3,
    JIT_CODE_UNWINDING_INFO = 4,
};

typedef struct {
    uint32_t id;
    uint32_t total_size;
    uint64_t timestamp;                 /* ns */
} jr_prefix;

typedef struct {
    jr_prefix p;
    uint32_t pid;
    uint32_t tid;
    uint64_t vma;
    uint64_t code_addr;
    uint64_t code_size;
    uint64_t code_index;
} jr_code_load;                         /* then the name, a NUL, and the code as the last code_size bytes */

typedef struct {
    jr_prefix p;
    uint64_t code_addr;
    uint64_t nr_entry;
} jr_code_debug_info;                   /* then nr_entry entries */

typedef struct {
    uint64_t addr;
    uint32_t lineno;
    uint32_t discrim;
} debug_entry;                          /* then the file name and a NUL */

typedef struct {
    jr_prefix p;
    uint64_t unwinding_size;            /* .eh_frame and .eh_frame_hdr */
    uint64_t eh_frame_hdr_size;
    uint64_t mapped_size;
} jr_code_unwinding_info;               /* then .eh_frame, then .eh_frame_hdr: the specification has them reversed */

static_assert(sizeof(jitheader) == 40 && offsetof(jitheader, pid) == 20, "jitheader");
static_assert(sizeof(jr_prefix) == 16, "jr_prefix");
static_assert(sizeof(jr_code_load) == 56 && offsetof(jr_code_load, vma) == 24, "jr_code_load");
static_assert(sizeof(jr_code_debug_info) == 32, "jr_code_debug_info");
static_assert(sizeof(debug_entry) == 16, "debug_entry");
static_assert(sizeof(jr_code_unwinding_info) == 40, "jr_code_unwinding_info");

#endif
