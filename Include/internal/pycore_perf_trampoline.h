/* Perf trampolines: every internal prototype, documented here and only here.

   A trampoline is a copy of the routine in Python/asm_trampoline_<arch>.S; one copy per Python function, its *slot*.
   Slots come from *arenas*, a *backend* tells profilers their names. Unless said otherwise functions return 0, or -1
   after they have reported a failure through _PyPerf_Fail(); none of them sets a Python exception. */

#ifndef Py_INTERNAL_PERF_TRAMPOLINE_H
#define Py_INTERNAL_PERF_TRAMPOLINE_H

#include "pycore_perf_compat.h"

#ifdef _PyPerf_IN_CPYTHON
/* CPython's callbacks for the backend of this name, or NULL. */
extern _PyPerf_Callbacks *_PyPerf_FindCallbacks(const char *backend);
#endif

#ifndef _PyPerf_STUBS

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define _PyPerf_ALIGN(n, unit) (((n) + (unit) - 1) / (unit) * (unit))

/* --- jit_unwind.c: what the assembled object says about this architecture --- */

typedef struct {
    const char *arch;
    uint16_t e_machine;
    uint32_t e_flags;
    const unsigned char *code;          /* one trampoline */
    size_t code_size;
    uint8_t elf_class, elf_data;
    uint8_t hash_entry_size;            /* of DT_HASH's words: 4 but for some ABIs */
} _PyPerf_Template;

/* NULL where this architecture has no trampoline, or where *out_reason says why it must not be used (the linked
   routine is not the one that the unwind data was made from). */
extern const _PyPerf_Template *_PyPerf_GetTemplate(const char **out_reason);

/* Copies of the trampoline at equal distances. Offsets are from the .eh_frame that describes them. */
typedef struct {
    int32_t code_offset;                /* of the first */
    uint32_t code_size;                 /* bytes of each that the unwind data is for */
    uint32_t spacing;
    size_t num_regions;
} _PyPerf_CodeRegions;

/* What CPython exports begins with _Py. */
#define elf_ehframe_size_perf _PyPerf_elf_ehframe_size
#define elf_init_ehframe_perf _PyPerf_elf_init_ehframe
#define elf_init_ehframe_hdr_perf _PyPerf_elf_init_ehframe_hdr

/* Write their unwind data to `eh_frame`: one CIE and an FDE for each, elf_ehframe_size_perf() bytes. */
extern size_t elf_ehframe_size_perf(size_t num_regions);
extern void elf_init_ehframe_perf(uint8_t *eh_frame, const _PyPerf_CodeRegions *regions);

/* Write the .eh_frame_hdr that stands at `hdr_offset` from that .eh_frame, with its search table. */
#define _PyPerf_EH_FRAME_HDR_SIZE(num_regions) (12 + 8 * (size_t)(num_regions))
extern void elf_init_ehframe_hdr_perf(uint8_t *eh_frame_hdr, int32_t hdr_offset, const _PyPerf_CodeRegions *regions);

/* --- perf_trampoline.c: slots, hook, life cycle --- */

typedef struct {
    uintptr_t base;
    size_t slot_size;
    size_t num_slots;
    void *image;                        /* the backend's own */
} _PyPerf_CodeMemory;

/* publish() found no more room in this memory for a name. */
#define _PyPerf_FULL 1

/* What a backend does. All calls but reserve() are made under one lock, by the thread that registers a function. */
typedef struct {
    const char *name;
    /* Records carry time: an address may be let again to another function. */
    bool relets;
    /* A forked child has the parent's files mapped, and their names: what has a slot keeps it. */
    bool inherits;
    int (*open)(void);
    /* Executable, not writable memory in which every slot holds a trampoline. Called with no lock held, not even the
       interpreter's, and perhaps by several threads: it may load a shared object, whose loader has a lock of its own. */
    int (*reserve)(_PyPerf_CodeMemory *out_memory);
    /* Tell profilers that `slot` runs `code`. When it returns 0, another process can read it. */
    int (*publish)(const _PyPerf_CodeMemory *memory, uintptr_t slot, PyCodeObject *code);
    /* No living function uses these pages; a thread may still return through them. */
    void (*retire)(void *pages, size_t size);
    /* In the child: let go of the parent's files; async-signal-safe. */
    void (*after_fork)(void);
    void (*close)(void);
    /* Paths of the files written by this process, by number from 0; NULL when there are no more. */
    const char *(*path)(size_t index);
} _PyPerf_Backend;

extern const _PyPerf_Backend _PyPerf_map_backend;
extern const _PyPerf_Backend _PyPerf_jitdump_backend;
extern const _PyPerf_Backend _PyPerf_elf_backend;

/* Where images are made: the first directory of the list that can hold one. Where a name ends in "-" and the number of
   the effective user of now, the user of the moment has a directory of his own. */
extern void _PyPerfElf_SetDirectories(const char *colon_separated);

/* reserve() and retire() of the backends whose slots live in anonymous memory. `original` is a backend's one piece of
   shared memory, mapped read-only; every arena is another mapping of it, executable. */
extern int _PyPerf_ReserveAnonymous(_PyPerf_CodeMemory *out_memory, void *_Atomic *original, size_t slot_size);
extern void _PyPerf_RetirePages(void *pages, size_t size);

/* Put a trampoline into every slot. */
extern void _PyPerf_FillSlots(char *memory, size_t size, size_t slot_size);

/* Check the private layouts in pycore_perf_compat.h on this very interpreter: 1 when they hold, 0 when they do not,
   -1 with a Python exception. */
extern int _PyPerfTrampoline_Verify(void);

/* Switch this interpreter's trampoline on, with `backend`, or off. On takes the place of whichever backend was on. -1
   when the files could not be made: the program runs on, _PyPerfTrampoline_GetStatus() knows the reason. */
extern int _PyPerfTrampoline_Activate(const _PyPerf_Backend *backend);
extern void _PyPerfTrampoline_Deactivate(void);

/* Give `code`, which runs with these globals, its slot before its next call. 1: it has one, 0: the filter leaves it out,
   -1: there is none to be had. */
extern int _PyPerfTrampoline_NameCode(PyCodeObject *code, PyObject *globals);

/* From now on only these functions get slots: see perf_filter.c. -1 when the patterns are not well formed. */
extern int _PyPerfTrampoline_SetFilter(const char *patterns);

/* Forget an interpreter that ends. */
extern void _PyPerfTrampoline_ForgetInterpreter(PyInterpreterState *interp);

/* Forget this interpreter when it ends. -1 with a Python exception. */
extern int _PyPerfTrampoline_WatchInterpreter(void);

/* In the child, with the interpreter usable again: functions are registered anew, in files of the child's own. Not those
   of `inherited`, which has the parent's entries there (NULL: none has). It is done by itself when functions are called. */
extern void _PyPerfTrampoline_AfterForkChild(const _PyPerf_Backend *inherited);

/* In the child: begin its map with the parent's entries. */
extern int _PyPerfMap_Inherit(void);

/* For code memory that is not ours: have the backend's files open; tell that a trampoline at `address` runs `code`; give
   the files their final length. */
extern int _PyPerfTrampoline_OpenFiles(const _PyPerf_Backend *backend);
extern int _PyPerfTrampoline_Publish(const _PyPerf_Backend *backend, const void *address, PyCodeObject *code);
extern void _PyPerfTrampoline_CloseFiles(const _PyPerf_Backend *backend);

typedef struct {
    const _PyPerf_Backend *backend;     /* on in this interpreter, or NULL */
    bool displaced;                     /* another evaluator took our place */
    bool chained;                       /* another evaluator was there before us, and still runs */
    size_t num_functions;               /* published by this process, all backends */
    size_t num_slots;                   /* now in use */
    char failure[512];                  /* the last one, or "" */
} _PyPerf_Status;

extern void _PyPerfTrampoline_GetStatus(_PyPerf_Status *out_status);

/* Report a failure, once: a line on stderr, unless that has become something else, and in the status. printf-style, one
   sentence. Returns -1. */
extern int _PyPerf_Fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What a path or a pattern brought into a sentence: control characters become '?'. */
extern void _PyPerf_MakeOneLine(char *sentence);

#define _PyPerf_FORBIDDEN "the file system is mounted noexec, or executable mappings are forbidden"

/* A write beyond a limit, or to nobody, brings a signal that kills unless the program ignores it. Around such a write of
   ours: what it brings about is gone afterwards. errno stays. */
typedef struct {
    sigset_t mask, pending;
} _PyPerf_HeldSignals;

extern void _PyPerf_HoldSignals(_PyPerf_HeldSignals *out_held);
extern void _PyPerf_LetSignals(const _PyPerf_HeldSignals *held);

/* Process and thread as the kernel numbers them, without a system call. */
extern pid_t _PyPerf_ProcessId(void);
extern pid_t _PyPerf_ThreadId(void);

/* Write `py::QUALNAME:FILENAME` for `code`, no NUL, and return its length: at most _PyPerf_NAME_MAX, else the tail of
   the qualified name and the head of the file name are missing. Whatever would end or split an entry for one of its
   readers is escaped: \xHH for a byte (controls, ';', '\' and bytes that were not UTF-8), \uHHHH for a
   control or separator beyond ASCII and for a lone surrogate. */
#define _PyPerf_NAME_MAX 8192
extern size_t _PyPerf_FormatName(PyCodeObject *code, char *name);

/* The bytes of `text` as the file system knows them, at most `size`, none of them NUL. Returns their number. */
extern size_t _PyPerf_EncodePath(PyObject *text, char *path, size_t size);

/* --- perf_filter.c: which functions get slots --- */

/* 1 when the patterns are others than before, 0 when they are the same. */
extern int _PyPerfFilter_Set(const char *patterns);

/* The patterns as they were set, "" for none; the same pointer as long as they are the same. */
extern const char *_PyPerfFilter_Get(void);

/* Runs no Python code. */
extern bool _PyPerfFilter_Wants(const char *patterns, PyCodeObject *code, PyObject *globals);

/* What is wrong with these patterns, one sentence without a full stop; NULL when nothing is. */
extern const char *_PyPerfFilter_Check(const char *patterns, char *room, size_t size);

/* --- perf_existing.c --- */

/* Name all functions of this interpreter that exist; returns their number, or -1 with an exception. */
extern Py_ssize_t _PyPerfTrampoline_NameExisting(void);

/* --- perf_file.c: files that are written through a shared mapping --- */

/* Map a piece of a file for writing, not inherited by children. NULL with errno. */
extern char *_PyPerfWindow_Map(int fd, off_t offset, size_t size);
extern void _PyPerfWindow_Unmap(char *window, size_t size);

/* Get the pages of a part for the stores that follow, in one go: a fault for each would cost more than all else. */
extern void _PyPerfWindow_MakeReady(const char *start, size_t size);

/* Has the file been truncated under a store? What was stored since is not in it. */
extern bool _PyPerfWindow_IsLost(const char *window);

/* Make executable pages of a file survive its truncation: they become memory with trampolines. False: no room. */
extern bool _PyPerfWindow_Guard(void *start, size_t size, size_t slot_size);

/* In a child: it has none of the mapped ones. */
extern void _PyPerfWindow_AfterFork(void);

typedef struct {
    char path[64];
    dev_t dev;                          /* which file that was */
    ino_t ino;
    uid_t user;                         /* and whose */
    bool is_open;
    bool appended_by_others;            /* room is taken by one O_APPEND write of newlines, and never given back */
    off_t end;                          /* of what is reserved */
    char *window;                       /* the mapped part of the file, and of what is to become it */
    size_t window_room;                 /* so much of it is in the file */
    size_t window_used;
} _PyPerf_File;

/* Create `path`, for this user alone. A file that an earlier process left there is replaced; one that this process
   itself has open (CPython's own map) goes on, if others may append to it. */
extern int _PyPerfFile_Open(_PyPerf_File *file, const char *path, bool appended_by_others);

/* A descriptor of the file, to be closed by the caller; -1 with errno, ESTALE when another file has its name. */
extern int _PyPerfFile_Descriptor(const _PyPerf_File *file);

/* `size` bytes of room at the end of the file, or NULL; zeros, or newlines in a file appended to by others. What is
   stored there is at once in the file, whatever becomes of this process. */
extern char *_PyPerfFile_Reserve(_PyPerf_File *file, size_t size);

/* After the stores: are they in the file? */
extern int _PyPerfFile_Commit(_PyPerf_File *file);

/* Give the file its final length. */
extern void _PyPerfFile_Close(_PyPerf_File *file);

/* In a child: the file stays the parent's. */
extern void _PyPerfFile_AfterFork(_PyPerf_File *file);

#endif      /* !_PyPerf_STUBS */
#endif
