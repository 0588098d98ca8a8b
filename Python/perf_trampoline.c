/* Perf trampolines: slots for code objects, the evaluator that calls through them, and their life cycle.

   The way of one call is  interpreter -> py_trampoline_evaluator -> slot -> _PyEval_EvalFrameDefault.  The evaluator
   leaves no frame of its own: it takes the address of no local, so that the call of the slot is a jump.

   The address of a code object's slot is one of its extras. When the code object dies its slot does not: a thread may
   still return through it (the evaluator drops its reference last, and destructors run), and a perf map cannot say
   that an address had two meanings. So code memory is never unmapped and never changed. All slots hold the same bytes,
   all arenas are one piece of shared memory mapped again and again, and what is given back when the functions of a
   page are all dead is the page's place in memory, which a late return brings back.

   A dead slot is let again to a function of the same name, file and line: code that is compiled over and over grows
   nothing. Where records carry time (jitdump) it is let to any function.

   One lock guards all of this. It is not the interpreter's: interpreters with a GIL each, or none, share the process.
   No call that can run Python code or wait for other threads is made under it. */

#include "pycore_perf_trampoline.h"

#ifndef _PyPerf_STUBS

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <wchar.h>

typedef PyObject *(*py_evaluator)(PyThreadState *, struct _PyInterpreterFrame *, int);
typedef PyObject *(*py_trampoline)(PyThreadState *, struct _PyInterpreterFrame *, int, py_evaluator);

#ifdef Py_DEBUG
#  define CODE_ARENA_SIZE 1              /* one page: growth is walked through in every test */
#else
#  define CODE_ARENA_SIZE (64 * 1024)
#endif

struct arena {
    _PyPerf_CodeMemory memory;
    size_t num_used;                /* slots handed out, in order of address */
    bool inherited;                 /* from the process that forked us: its names are in files that are not ours */
    struct arena *next;             /* that has unused slots too */
    uint32_t *num_live_on_page;
    struct slot {
        uint64_t key;               /* of its function */
        uintptr_t address;
        struct slot *next;          /* dead as well, and in the same bucket */
    } slots[];
};

struct backend_state {
    const _PyPerf_Backend *ops;
    Py_ssize_t extra_index;         /* the same in all interpreters, -1 before the first */
    struct arena **arenas;          /* by address */
    size_t num_arenas;
    struct arena *current;          /* has unused slots; NULL: memory must be reserved first */
    bool open;
    bool failed;
};

static struct backend_state backends[] = {
    {.ops = &_PyPerf_map_backend, .extra_index = -1},
    {.ops = &_PyPerf_jitdump_backend, .extra_index = -1},
    {.ops = &_PyPerf_elf_backend, .extra_index = -1},
};
#define NUM_BACKENDS (sizeof(backends) / sizeof(backends[0]))

static struct slot *dead_slots[16384];      /* by key */

/* Never freed: an evaluator may be under way in one when its interpreter ends. */
struct interp {
    PyInterpreterState *interp;     /* NULL: free to use */
    py_evaluator evaluator;         /* what ran frames before us */
    bool active;
    bool installed;                 /* we have put ours in its place, and not taken it away */
    int num_aside;                  /* calls that have put `evaluator` back for a while */
    bool has_index[NUM_BACKENDS];
    struct interp *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct interp *interps;
static struct backend_state *active_backend;
static Py_ssize_t active_index;     /* active_backend->extra_index, for the evaluator */
static size_t num_functions;
static size_t num_slots;
static pid_t process_id;
static bool forked;                 /* and functions have the slots of the parent still */

/* initial-exec: one instruction instead of a call. The C library keeps room for such small ones in the static block. */
static _Thread_local struct {
    uintptr_t stack_limit;          /* below it the evaluator steps aside; the first call finds it out */
    uintptr_t stack_base;
    pid_t thread_id;
} this_thread
#ifdef __GLIBC__
__attribute__((tls_model("initial-exec")))
#endif
= {.stack_limit = UINTPTR_MAX};

/* --- Failures --- */

static pthread_mutex_t failure_lock = PTHREAD_MUTEX_INITIALIZER;
static char failure[sizeof(((_PyPerf_Status *)NULL)->failure)];
static struct stat error_output;    /* what descriptor 2 was when we came */

static void
look_at_error_output(void)
{
    if (error_output.st_mode == 0 && fstat(STDERR_FILENO, &error_output) < 0) {
        error_output.st_mode = ~(mode_t)0;      /* closed: nothing is the same */
    }
}

/* Descriptor 2 may be a file or a connection of the program's by now, and its bytes are not ours to add to; what is
   appended to or a terminal is still for messages. Nor is anybody kept waiting until they are read. */
static void
say(const char *sentence)
{
    struct stat st;
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
    look_at_error_output();
    if (fstat(STDERR_FILENO, &st) == 0 && poll(&ready, 1, 0) == 1 && (ready.revents & POLLOUT)
        && ((st.st_dev == error_output.st_dev && st.st_ino == error_output.st_ino) || isatty(STDERR_FILENO)
            || (S_ISREG(st.st_mode) && (fcntl(STDERR_FILENO, F_GETFL) & O_APPEND))))
    {
        _PyPerf_HeldSignals held;
        _PyPerf_HoldSignals(&held);
        dprintf(STDERR_FILENO, "perf trampoline: %s\n", sentence);
        _PyPerf_LetSignals(&held);
    }
}

void
_PyPerf_MakeOneLine(char *sentence)
{
    for (char *c = sentence; *c != '\0'; c++) {
        if ((unsigned char)*c < ' ' || *c == 0x7f) {
            *c = '?';
        }
    }
}

int
_PyPerf_Fail(const char *format, ...)
{
    char sentence[sizeof(failure)];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    _PyPerf_MakeOneLine(sentence);
    pthread_mutex_lock(&failure_lock);
    bool is_new = strcmp(failure, sentence) != 0;
    strcpy(failure, sentence);
    pthread_mutex_unlock(&failure_lock);
    if (is_new) {
        say(sentence);
    }
    return -1;
}

pid_t
_PyPerf_ProcessId(void)
{
    if (process_id == 0) {
        process_id = getpid();
    }
    return process_id;
}

pid_t
_PyPerf_ThreadId(void)
{
    if (this_thread.thread_id == 0) {
        this_thread.thread_id = syscall(SYS_gettid);
    }
    return this_thread.thread_id;
}

/* --- Names --- */

/* `c`, not ASCII, in UTF-8; returns its bytes. */
static size_t
encode_character(Py_UCS4 c, char *out)
{
    size_t size = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = size - 1; i > 0; i--, c >>= 6) {
        out[i] = (char)(0x80 | (c & 0x3f));
    }
    out[0] = (char)(c | (0xf00 >> size & 0xff));
    return size;
}

/* What `c` becomes in a name; returns its bytes. */
static size_t
escape_character(Py_UCS4 c, char *out)
{
    if (c >= ' ' && c < 0x7f && c != ';' && c != '\\') {
        *out = (char)c;
        return 1;
    }
    if (c < 0x80) {
        return sprintf(out, "\\x%02x", (unsigned)c);
    }
    if (c >= 0xdc80 && c <= 0xdcff) {       /* surrogateescape: a byte that was not UTF-8 */
        return sprintf(out, "\\x%02x", (unsigned)(c - 0xdc00));
    }
    if (c < 0xa0 || c == 0x2028 || c == 0x2029 || (c >= 0xd800 && c <= 0xdfff)) {
        return sprintf(out, "\\u%04x", (unsigned)c & 0xffff);
    }
    return encode_character(c, out);
}

/* No character needs more. */
#define ESCAPED_MAX 6

/* Copy what stands for itself, eight bytes at a time, and return its length: what follows needs a closer look. Of
   almost every name that is nothing. */
static size_t
copy_plain(const uint8_t *text, size_t size, char *out)
{
    const uint64_t ones = 0x0101010101010101u;
    for (size_t i = 0; size >= 8; ) {
        uint64_t word;
        memcpy(&word, text + i, 8);
        uint64_t semicolon = word ^ ';' * ones, backslash = word ^ '\\' * ones;
        /* High bits: 0x80 and above, 0x7f, below ' ', ';', '\\'. What a carry adds is above one of these. */
        uint64_t odd = word | (word + ones) | (word - ' ' * ones) | (semicolon - ones) | (backslash - ones);
        if ((odd & 0x80 * ones) != 0) {
            return i;
        }
        memcpy(out + i, &word, 8);
        if (i + 8 == size) {
            return size;
        }
        i = Py_MIN(i + 8, size - 8);        /* the last eight may overlap those before */
    }
    return 0;
}

static size_t
escape(PyObject *text, Py_ssize_t begin, char *out, size_t room)
{
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    size_t used = 0;
    for (Py_ssize_t i = begin; i < length && used + ESCAPED_MAX < room; i++) {
        if (kind == PyUnicode_1BYTE_KIND) {
            size_t plain = copy_plain((const uint8_t *)data + i, Py_MIN((size_t)(length - i), room - used - ESCAPED_MAX),
                                      out + used);
            i += plain;
            used += plain;
            if (i == length || used + ESCAPED_MAX >= room) {
                break;
            }
        }
        used += escape_character(PyUnicode_READ(kind, data, i), out + used);
    }
    return used;
}

size_t
_PyPerf_FormatName(PyCodeObject *code, char *name)
{
    char scratch[ESCAPED_MAX + 1];
    memcpy(name, "py::", 4);
    size_t size = 4 + escape(code->co_qualname, 0, name + 4, _PyPerf_NAME_MAX / 2 - 4);
    name[size++] = ':';

    size_t room = _PyPerf_NAME_MAX / 2, tail = ESCAPED_MAX;
    Py_ssize_t begin = PyUnicode_GET_LENGTH(code->co_filename);
    if ((size_t)begin * ESCAPED_MAX < room - 2 * ESCAPED_MAX) {
        begin = 0;                          /* it fits, whatever is in it */
    }
    while (begin > 0 && tail + ESCAPED_MAX < room) {
        tail += escape_character(PyUnicode_READ_CHAR(code->co_filename, --begin), scratch);
    }
    return size + escape(code->co_filename, begin, name + size, room);
}

static bool file_system_is_utf8;

static void
look_at_file_system_encoding(void)
{
    PyObject *text = PyUnicode_FromOrdinal(0xe9);
    PyObject *encoded = text == NULL ? NULL : PyUnicode_EncodeFSDefault(text);
    file_system_is_utf8 = encoded != NULL && strcmp(PyBytes_AS_STRING(encoded), "\xc3\xa9") == 0;
    PyErr_Clear();
    Py_XDECREF(encoded);
    Py_XDECREF(text);
}

/* Where names of files are not UTF-8 they are in the encoding of the C library's locale. A codec may be Python code. */
static size_t
encode_by_locale(Py_UCS4 c, char *out)
{
    if (file_system_is_utf8) {
        return encode_character(c, out);
    }
    char bytes[MB_LEN_MAX];
    mbstate_t state = {0};
    size_t size = wcrtomb(bytes, (wchar_t)c, &state);
    if (size > ESCAPED_MAX) {       /* (size_t)-1: there is none */
        return escape_character(c, out);
    }
    memcpy(out, bytes, size);
    return size;
}

size_t
_PyPerf_EncodePath(PyObject *text, char *path, size_t size)
{
    size_t used = PyUnicode_GET_LENGTH(text);
    if (PyUnicode_IS_ASCII(text) && used <= size && memchr(PyUnicode_DATA(text), 0, used) == NULL) {
        memcpy(path, PyUnicode_DATA(text), used);
        return used;
    }
    used = 0;
    for (Py_ssize_t i = 0; i < PyUnicode_GET_LENGTH(text) && used + ESCAPED_MAX < size; i++) {
        Py_UCS4 c = PyUnicode_READ_CHAR(text, i);
        if (c != 0 && c < 0x80) {
            path[used++] = (char)c;
        }
        else if (c >= 0xdc80 && c <= 0xdcff) {
            path[used++] = (char)(c - 0xdc00);
        }
        else if (c == 0 || (c >= 0xd800 && c <= 0xdfff)) {      /* in no file's name */
            used += escape_character(c, path + used);
        }
        else {
            used += encode_by_locale(c, path + used);
        }
    }
    return used;
}

/* What a function is known by: its name, file and line. Hashes of strings are kept in them, and keyed. */
static uint64_t
function_key(PyCodeObject *code)
{
    uint64_t key = (uint64_t)PyObject_Hash(code->co_qualname) * 0x9e3779b97f4a7c15u;
    key = (key ^ key >> 32) + (uint64_t)PyObject_Hash(code->co_filename);
    key = key * 0xd6e8feb86659fd93u + (uint64_t)code->co_firstlineno;
    return key ^ key >> 32;
}

/* --- Code memory --- */

void
_PyPerf_FillSlots(char *memory, size_t size, size_t slot_size)
{
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    for (size_t offset = 0; offset + slot_size <= size; offset += slot_size) {
        memcpy(memory + offset, template->code, template->code_size);
    }
    __builtin___clear_cache(memory, memory + size);
}

int
_PyPerf_ReserveAnonymous(_PyPerf_CodeMemory *out_memory, void *_Atomic *original, size_t slot_size)
{
    size_t size = _PyPerf_ALIGN(CODE_ARENA_SIZE, sysconf(_SC_PAGESIZE));
    void *memory = MAP_FAILED;
    if (*original == NULL) {
        void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED) {
            goto error;
        }
        _PyPerf_FillSlots(pages, size, slot_size);
        void *none = NULL;
        if (mprotect(pages, size, PROT_READ) < 0 || !atomic_compare_exchange_strong(original, &none, pages)) {
            munmap(pages, size);        /* another thread was first, or it is refused */
        }
        if (*original == NULL) {
            goto error;
        }
    }
    /* An old size of 0 maps a shared piece a second time. An emulator may not know that: then it is a copy. */
    memory = mremap(*original, 0, size, MREMAP_MAYMOVE);
    if (memory == MAP_FAILED) {
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            goto error;
        }
        _PyPerf_FillSlots(memory, size, slot_size);
    }
    /* perf learns of the mapping here, and must do so before the first record that names one of its slots. */
    if (mprotect(memory, size, PROT_READ | PROT_EXEC) < 0) {
        goto error;
    }
    *out_memory = (_PyPerf_CodeMemory){.base = (uintptr_t)memory, .slot_size = slot_size, .num_slots = size / slot_size};
    return 0;

error:
    _PyPerf_Fail("no executable memory for trampolines: %s", strerror(errno));
    if (memory != MAP_FAILED) {
        munmap(memory, size);
    }
    return -1;
}

void
_PyPerf_RetirePages(void *pages, size_t size)
{
    madvise(pages, size, MADV_DONTNEED);
}

static size_t
find_arena(const struct backend_state *backend, uintptr_t slot)
{
    /* The number of arenas that begin at or before `slot`. */
    size_t low = 0, high = backend->num_arenas;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (backend->arenas[middle]->memory.base <= slot) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

static int
add_arena(struct backend_state *backend, const _PyPerf_CodeMemory *memory)
{
    size_t num_pages = memory->num_slots * memory->slot_size / sysconf(_SC_PAGESIZE) + 1;
    struct arena *arena = calloc(1, sizeof(*arena) + memory->num_slots * sizeof(arena->slots[0]));
    uint32_t *num_live_on_page = calloc(num_pages, sizeof(*num_live_on_page));
    struct arena **arenas = realloc(backend->arenas, (backend->num_arenas + 1) * sizeof(*arenas));
    if (arenas != NULL) {
        backend->arenas = arenas;
    }
    if (arena == NULL || num_live_on_page == NULL || arenas == NULL) {
        free(num_live_on_page);
        free(arena);
        return _PyPerf_Fail("no memory for trampolines");
    }
    arena->memory = *memory;
    arena->num_live_on_page = num_live_on_page;
    arena->next = backend->current;
    backend->current = arena;
    size_t at = find_arena(backend, memory->base);
    memmove(arenas + at + 1, arenas + at, (backend->num_arenas - at) * sizeof(*arenas));
    arenas[at] = arena;
    backend->num_arenas++;
    return 0;
}

/* --- Slots --- */

static struct slot **
find_bucket(uint64_t key)
{
    return &dead_slots[key % Py_ARRAY_LENGTH(dead_slots)];
}

/* Take a dead slot of `key`, this very `slot` unless that is 0. */
static uintptr_t
take_dead_slot(uint64_t key, uintptr_t slot)
{
    for (struct slot **link = find_bucket(key), *dead; (dead = *link) != NULL; link = &dead->next) {
        if (dead->key == key && (slot == 0 || dead->address == slot)) {
            *link = dead->next;
            return dead->address;
        }
    }
    return 0;
}

/* Count `slot` on the page or two that it lies on: +1 or -1. What no longer serves a living function is given back. */
static void
count_slot(struct backend_state *backend, struct arena *arena, uintptr_t slot, int change)
{
    size_t page_size = sysconf(_SC_PAGESIZE);
    size_t offset = slot - arena->memory.base;
    size_t end_of_used = arena->num_used * arena->memory.slot_size;
    size_t last_page = (offset + arena->memory.slot_size - 1) / page_size;
    for (size_t page = offset / page_size; page <= last_page; page++) {
        arena->num_live_on_page[page] += change;
        if (arena->num_live_on_page[page] == 0 && (page + 1) * page_size <= end_of_used) {
            backend->ops->retire((void *)(arena->memory.base + page * page_size), page_size);
        }
    }
    num_slots += change;
}

/* An arena whose functions are all dead is forgotten, with the keys of its slots; its addresses are never let again. */
static void
forget_dead_arena(struct backend_state *backend, size_t at)
{
    struct arena *arena = backend->arenas[at];
    size_t slot_size = arena->memory.slot_size;
    if (arena->num_used < arena->memory.num_slots) {
        return;
    }
    for (size_t page = 0; page <= (arena->num_used * slot_size - 1) / sysconf(_SC_PAGESIZE); page++) {
        if (arena->num_live_on_page[page] != 0) {
            return;
        }
    }
    for (size_t i = 0; i < arena->num_used; i++) {
        take_dead_slot(arena->slots[i].key, arena->slots[i].address);
    }
    backend->ops->retire((void *)arena->memory.base, _PyPerf_ALIGN(arena->num_used * slot_size, sysconf(_SC_PAGESIZE)));
    backend->num_arenas--;
    memmove(backend->arenas + at, backend->arenas + at + 1, (backend->num_arenas - at) * sizeof(*backend->arenas));
    free(arena->num_live_on_page);
    free(arena);
}

static void
slot_died(struct backend_state *backend, uintptr_t slot)
{
    size_t at = find_arena(backend, slot) - 1;
    struct arena *arena = backend->arenas[at];
    if (!arena->inherited) {
        struct slot *dead = &arena->slots[(slot - arena->memory.base) / arena->memory.slot_size];
        struct slot **bucket = find_bucket(dead->key);
        dead->next = *bucket;
        *bucket = dead;
    }
    count_slot(backend, arena, slot, -1);
    if (!backend->ops->relets) {
        forget_dead_arena(backend, at);
    }
}

/* The free function of our code extra: called when a code object dies, with its slot. */
static void
code_died(void *extra)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < NUM_BACKENDS; i++) {
        size_t at = find_arena(&backends[i], (uintptr_t)extra);
        if (at > 0) {
            const _PyPerf_CodeMemory *memory = &backends[i].arenas[at - 1]->memory;
            if ((uintptr_t)extra - memory->base < memory->num_slots * memory->slot_size) {
                slot_died(&backends[i], (uintptr_t)extra);
                break;
            }
        }
    }
    pthread_mutex_unlock(&lock);
}

static int
open_backend(struct backend_state *backend)
{
    backend->failed = backend->ops->open() < 0;
    backend->open = !backend->failed;
    return backend->failed ? -1 : 0;
}

static int
publish(struct backend_state *backend, const struct arena *arena, uintptr_t slot, PyCodeObject *code)
{
    int status = backend->ops->publish(&arena->memory, slot, code);
    backend->failed = status < 0;
    num_functions += status == 0;
    return status;
}

/* A slot for `code`, published. 0 when the backend has failed, else when memory must be reserved first. */
static uintptr_t
take_slot(struct backend_state *backend, PyCodeObject *code)
{
    if (backend->failed || (!backend->open && open_backend(backend) < 0)) {
        return 0;
    }
    uint64_t key = (uintptr_t)backend ^ (backend->ops->relets ? 0 : function_key(code));
    uintptr_t slot = take_dead_slot(key, 0);
    if (slot != 0) {
        struct arena *arena = backend->arenas[find_arena(backend, slot) - 1];
        if (backend->ops->relets && publish(backend, arena, slot, code) != 0) {
            return 0;
        }
        count_slot(backend, arena, slot, +1);
        return slot;
    }
    while (backend->current != NULL) {
        struct arena *arena = backend->current;
        slot = arena->memory.base + arena->num_used * arena->memory.slot_size;
        int status = publish(backend, arena, slot, code);
        if (status < 0) {
            return 0;
        }
        if (status == _PyPerf_FULL) {
            arena->memory.num_slots = arena->num_used;
        }
        else {
            arena->slots[arena->num_used++] = (struct slot){key, slot, NULL};
            count_slot(backend, arena, slot, +1);
        }
        if (arena->num_used == arena->memory.num_slots) {
            backend->current = arena->next;
        }
        if (status != _PyPerf_FULL) {
            return slot;
        }
    }
    return 0;
}

/* --- Interpreters --- */

static struct interp *
find_interp(PyInterpreterState *interp)
{
    struct interp *found = __atomic_load_n(&interps, __ATOMIC_ACQUIRE);
    while (found != NULL && found->interp != interp) {
        found = found->next;
    }
    return found;
}

static struct interp *
get_interp(PyInterpreterState *interp)
{
    struct interp *found = find_interp(interp);
    if (found == NULL && (found = find_interp(NULL)) == NULL) {
        found = calloc(1, sizeof(*found));
        if (found == NULL) {
            return NULL;
        }
        found->evaluator = _PyEval_EvalFrameDefault;
        found->next = interps;
        __atomic_store_n(&interps, found, __ATOMIC_RELEASE);
    }
    found->interp = interp;
    return found;
}

/* Code objects may be shared by interpreters, so an extra must have the same number in each. Numbers only ascend, and
   those passed over stay empty. Called in the interpreter concerned, without the lock; -1 when there is none left. */
static int
request_index(struct interp *interp, struct backend_state *backend)
{
    size_t number = backend - backends;
    bool failed = false;
    if (!__atomic_load_n(&interp->has_index[number], __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&lock);
        Py_ssize_t index = backend->extra_index;
        if (!interp->has_index[number]) {
            do {
                index = PyUnstable_Eval_RequestCodeExtraIndex(code_died);
            } while (index >= 0 && index < backend->extra_index);
            failed = index < 0 || (backend->extra_index >= 0 && index != backend->extra_index);
        }
        if (!failed) {
            backend->extra_index = index;
            __atomic_store_n(&interp->has_index[number], true, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&lock);
    }
    return failed ? -1 : 0;
}

/* --- The evaluator --- */

static py_evaluator our_evaluator(const struct interp *interp);

static void
reserve_memory(struct backend_state *backend)
{
    _PyPerf_CodeMemory memory;
    PyThreadState *ts = PyEval_SaveThread();
    int status = backend->ops->reserve(&memory);
    PyEval_RestoreThread(ts);
    pthread_mutex_lock(&lock);
    if (status < 0 || add_arena(backend, &memory) < 0) {
        backend->failed = true;
    }
    pthread_mutex_unlock(&lock);
}

/* Stands for the slot of a function that the filter leaves out. */
static PyObject *
pass_on(PyThreadState *ts, struct _PyInterpreterFrame *frame, int throwflag, py_evaluator evaluator)
{
    return evaluator(ts, frame, throwflag);
}

/* The slot of `code`, or what stands for it, after its first call here. NULL when there is none to be had. */
static Py_NO_INLINE py_trampoline
register_code(struct interp *interp, PyCodeObject *code, PyObject *globals)
{
    PyObject *type, *value, *traceback;     /* the frame may be resumed by throw() */
    PyErr_Fetch(&type, &value, &traceback);
    struct backend_state *backend = active_backend;
    uintptr_t slot = 0;
    bool done = request_index(interp, backend) < 0;
    while (!done) {
        const char *filter = _PyPerfFilter_Get();
        bool wanted = _PyPerfFilter_Wants(filter, code, globals);
        pthread_mutex_lock(&lock);
        if (filter != _PyPerfFilter_Get()) {
            pthread_mutex_unlock(&lock);
            continue;
        }
        slot = (uintptr_t)_PyPerf_CodeExtraAt(code, backend->extra_index);     /* another thread may have been here */
        if (slot == 0) {
            slot = wanted ? take_slot(backend, code) : (uintptr_t)pass_on;
            if (slot != 0 && _PyPerf_SetCodeExtra(code, backend->extra_index, (void *)slot) < 0) {
                if (wanted) {
                    slot_died(backend, slot);
                }
                slot = 0;
                done = true;
            }
        }
        done = done || slot != 0 || backend->failed;
        pthread_mutex_unlock(&lock);
        if (!done) {
            reserve_memory(backend);
        }
    }
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return (py_trampoline)slot;
}

/* The slot that `code` has, or gets now. */
static py_trampoline
find_slot(struct interp *interp, PyCodeObject *code, PyObject *globals)
{
    if (forked) {
        _PyPerfTrampoline_AfterForkChild(NULL);
    }
    py_trampoline slot = (py_trampoline)_PyPerf_CodeExtraAt(code, active_index);
    if (slot == NULL && interp->active) {
        slot = register_code(interp, code, globals);
        if (slot == NULL && active_backend->failed) {
            _PyPerfTrampoline_Deactivate();
        }
    }
    return slot;
}

/* Our evaluator takes C stack for every Python call, the interpreter's own takes none. So that a program recurses as
   deep with us as without, at half of the stack the former evaluator is put back until this call returns. Other threads
   of the interpreter go without names so long. */
static Py_NO_INLINE PyObject *
step_aside(struct interp *interp, PyThreadState *ts, struct _PyInterpreterFrame *frame, int throwflag)
{
    __atomic_add_fetch(&interp->num_aside, 1, __ATOMIC_SEQ_CST);
    _PyInterpreterState_SetEvalFrameFunc(interp->interp, interp->evaluator);
    PyObject *result = interp->evaluator(ts, frame, throwflag);
    if (__atomic_sub_fetch(&interp->num_aside, 1, __ATOMIC_SEQ_CST) == 0 && interp->active
        && _PyInterpreterState_GetEvalFrameFunc(interp->interp) == interp->evaluator)
    {
        _PyInterpreterState_SetEvalFrameFunc(interp->interp, our_evaluator(interp));
    }
    return result;
}

/* How much of a stack our evaluator may use up. From 3.14 on the interpreter itself keeps clear of the last 32 KiB. */
static size_t
stack_share(size_t size)
{
    return size < 1024 * 1024 ? size / 4 : Py_MIN(size / 2, 4 * 1024 * 1024);
}

static void
find_stack(void)
{
    pthread_attr_t attr;
    void *base = NULL;
    size_t size = 0;
    if (pthread_getattr_np(pthread_self(), &attr) == 0) {
        pthread_attr_getstack(&attr, &base, &size);
        pthread_attr_destroy(&attr);
    }
    this_thread.stack_base = (uintptr_t)base;
    this_thread.stack_limit = (uintptr_t)base + size - stack_share(size);
}

static inline bool
stack_is_low(void)
{
    return (uintptr_t)__builtin_frame_address(0) < this_thread.stack_limit;
}

static Py_NO_INLINE PyObject *
evaluate_first_time(PyThreadState *ts, struct _PyInterpreterFrame *frame, int throwflag)
{
    struct interp *interp = find_interp(ts->interp);
    if (interp == NULL) {       /* forgotten: the interpreter is about to end */
        return _PyEval_EvalFrameDefault(ts, frame, throwflag);
    }
    if (this_thread.stack_limit == UINTPTR_MAX) {
        find_stack();
    }
    /* Below the base it is not this thread's own stack, and nothing is known of it. */
    if ((stack_is_low() && (uintptr_t)__builtin_frame_address(0) >= this_thread.stack_base)
        || _PyPerf_RecursionBudgetLow(ts))
    {
        return step_aside(interp, ts, frame, throwflag);
    }
    py_trampoline trampoline = find_slot(interp, _PyPerf_FrameCode(frame), _PyPerf_FrameGlobals(frame));
    if (trampoline == NULL) {
        return interp->evaluator(ts, frame, throwflag);
    }
    return trampoline(ts, frame, throwflag, interp->evaluator);
}

static PyObject *
py_trampoline_evaluator(PyThreadState *ts, struct _PyInterpreterFrame *frame, int throwflag)
{
    void *trampoline = _PyPerf_CodeExtraAt(_PyPerf_FrameCode(frame), active_index);
    if (trampoline == NULL || stack_is_low() || _PyPerf_RecursionBudgetLow(ts)) {
        return evaluate_first_time(ts, frame, throwflag);
    }
    return ((py_trampoline)trampoline)(ts, frame, throwflag, _PyEval_EvalFrameDefault);
}

/* The same where another evaluator was there before us: it runs inside the trampoline. */
static PyObject *
py_chained_evaluator(PyThreadState *ts, struct _PyInterpreterFrame *frame, int throwflag)
{
    void *trampoline = _PyPerf_CodeExtraAt(_PyPerf_FrameCode(frame), active_index);
    struct interp *interp = find_interp(ts->interp);
    if (trampoline == NULL || interp == NULL || stack_is_low() || _PyPerf_RecursionBudgetLow(ts)) {
        return evaluate_first_time(ts, frame, throwflag);
    }
    return ((py_trampoline)trampoline)(ts, frame, throwflag, interp->evaluator);
}

static py_evaluator
our_evaluator(const struct interp *interp)
{
    return interp->evaluator == _PyEval_EvalFrameDefault ? py_trampoline_evaluator : py_chained_evaluator;
}

static bool
is_ours(py_evaluator evaluator)
{
    return evaluator == py_trampoline_evaluator || evaluator == py_chained_evaluator;
}

/* --- Verification of private layouts --- */

static PyCodeObject *expected_code;
static PyObject *expected_globals;
static int num_expected_seen;

static PyObject *
py_verifying_evaluator(PyThreadState *ts, struct _PyInterpreterFrame *frame, int throwflag)
{
    num_expected_seen += _PyPerf_FrameCode(frame) == expected_code && _PyPerf_FrameGlobals(frame) == expected_globals;
    return _PyEval_EvalFrameDefault(ts, frame, throwflag);
}

int
_PyPerfTrampoline_Verify(void)
{
    static int verdict = -1;
    if (verdict >= 0) {
        return verdict;
    }
    PyObject *code = Py_CompileString("None", "<perf trampoline>", Py_eval_input);
    PyObject *globals = PyDict_New();
    PyObject *result = NULL;
    if (code == NULL || globals == NULL) {
        goto done;
    }
    PyInterpreterState *interp = PyInterpreterState_Get();
    py_evaluator former = _PyInterpreterState_GetEvalFrameFunc(interp);
    expected_code = (PyCodeObject *)code;
    expected_globals = globals;
    num_expected_seen = 0;
    _PyInterpreterState_SetEvalFrameFunc(interp, py_verifying_evaluator);
    result = PyEval_EvalCode(code, globals, globals);
    _PyInterpreterState_SetEvalFrameFunc(interp, former);
    if (result == NULL) {
        goto done;
    }
    /* The extras: what the public call stores must be what we read. */
    static int stored;
    bool was_empty = ((PyCodeObject *)code)->co_extra == NULL;
    Py_ssize_t index = PyUnstable_Eval_RequestCodeExtraIndex(NULL);
    if (index >= 0 && PyUnstable_Code_SetExtra(code, index, &stored) < 0) {
        Py_CLEAR(result);
        goto done;
    }
    verdict = num_expected_seen == 1 && was_empty && ((PyCodeObject *)code)->co_extra != NULL && index >= 0
              && _PyPerf_CodeExtraAt((PyCodeObject *)code, index) == &stored;
    void *read = NULL;
    if (verdict && (_PyPerf_SetCodeExtra((PyCodeObject *)code, index, &verdict) < 0
                    || PyUnstable_Code_GetExtra(code, index, &read) < 0 || read != &verdict)) {
        verdict = PyErr_Occurred() ? -1 : 0;
    }

done:
    Py_XDECREF(result);
    Py_XDECREF(globals);
    Py_XDECREF(code);
    return verdict;
}

/* --- Life cycle --- */

static void
before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void
after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

/* Also in the child of a C library's fork(), which may only exec: nothing is opened here. It may run Python code as well,
   without a word to the interpreter: what follows from the fork is done at its first call, which finds no slot. */
static void
after_fork_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&failure_lock, NULL);
    forked = true;
    active_index = PY_SSIZE_T_MAX;
    num_functions = 0;
    process_id = 0;
    this_thread.thread_id = 0;
    memset(dead_slots, 0, sizeof(dead_slots));
    _PyPerfWindow_AfterFork();
    for (struct backend_state *backend = backends; backend < backends + NUM_BACKENDS; backend++) {
        for (size_t i = 0; i < backend->num_arenas; i++) {
            backend->arenas[i]->inherited = true;
        }
        backend->current = NULL;
        if (backend->open) {
            backend->ops->after_fork();
            backend->open = false;
        }
    }
}

void
_PyPerfTrampoline_AfterForkChild(const _PyPerf_Backend *inherited)
{
    /* With a new number for our extra no function has a slot, so each is named in a file of this process when it is
       called, unless the parent's file names it for the child as well. Where numbers have run out functions keep the
       slots and names of the parent. */
    struct interp *interp = find_interp(PyInterpreterState_Get());
    if (interp == NULL) {       /* one that has slots will ask again */
        return;
    }
    forked = false;
    for (struct backend_state *backend = backends; backend < backends + NUM_BACKENDS; backend++) {
        Py_ssize_t inherited_index = backend->extra_index;
        if (inherited_index < 0 || backend->ops == inherited || backend->ops->inherits) {
            continue;
        }
        backend->extra_index = -1;
        for (struct interp *each = interps; each != NULL; each = each->next) {
            each->has_index[backend - backends] = false;
        }
        if (backend == active_backend && request_index(interp, backend) < 0) {
            backend->extra_index = inherited_index;
            interp->has_index[backend - backends] = true;
        }
    }
    if (active_backend != NULL) {
        active_index = active_backend->extra_index;
    }
}

static struct backend_state *
find_backend(const _PyPerf_Backend *ops)
{
    struct backend_state *backend = backends;
    while (backend->ops != ops) {
        backend++;
    }
    return backend;
}

int
_PyPerfTrampoline_Activate(const _PyPerf_Backend *ops)
{
    PyInterpreterState *this_interp = PyInterpreterState_Get();
    py_evaluator evaluator = _PyInterpreterState_GetEvalFrameFunc(this_interp);
    static bool fork_handlers;
    struct backend_state *backend = find_backend(ops);

    look_at_error_output();
    look_at_file_system_encoding();
    pthread_mutex_lock(&failure_lock);
    failure[0] = '\0';
    pthread_mutex_unlock(&failure_lock);
    pthread_mutex_lock(&lock);
    if (!fork_handlers) {
        fork_handlers = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
    }
    struct interp *interp = get_interp(this_interp);
    int status = interp == NULL || !fork_handlers ? _PyPerf_Fail("no memory for trampolines") : open_backend(backend);
    pthread_mutex_unlock(&lock);
    if (status < 0) {
        return -1;
    }
    if (forked) {
        _PyPerfTrampoline_AfterForkChild(NULL);
    }
#ifdef Py_GIL_DISABLED
    /* A code object's extras must not move while another thread reads them: take all the room before there is a first. */
    for (size_t i = 0; i < NUM_BACKENDS; i++) {
        (void)request_index(interp, &backends[i]);
    }
#endif
    if (request_index(interp, backend) < 0) {
        return _PyPerf_Fail("code objects of this interpreter have no room for one more extra");
    }
    active_index = backend->extra_index;
    active_backend = backend;
    interp->active = true;
    /* Whoever came after us while we were installed may call our evaluator from his: to stand before him as well
       would be a circle. */
    bool free_place = !interp->installed || evaluator == _PyEval_EvalFrameDefault || evaluator == interp->evaluator;
    if (!is_ours(evaluator) && free_place && interp->num_aside == 0) {
        interp->evaluator = evaluator;
        interp->installed = true;
        _PyInterpreterState_SetEvalFrameFunc(this_interp, our_evaluator(interp));
    }
    return 0;
}

void
_PyPerfTrampoline_Deactivate(void)
{
    PyInterpreterState *this_interp = PyInterpreterState_Get();
    struct interp *interp = find_interp(this_interp);
    if (interp != NULL && interp->active) {
        interp->active = false;
        /* Somebody who came after us stays: his evaluator may go on to call ours, which then only passes on. */
        if (is_ours(_PyInterpreterState_GetEvalFrameFunc(this_interp))) {
            _PyInterpreterState_SetEvalFrameFunc(this_interp, interp->evaluator);
            interp->installed = false;
        }
    }
}

int
_PyPerfTrampoline_NameCode(PyCodeObject *code, PyObject *globals)
{
    struct interp *interp = find_interp(PyInterpreterState_Get());
    if (interp == NULL || !interp->active) {
        return -1;
    }
    py_trampoline slot = find_slot(interp, code, globals);
    return slot == NULL ? -1 : slot != pass_on;
}

int
_PyPerfTrampoline_SetFilter(const char *patterns)
{
    if (forked) {
        _PyPerfTrampoline_AfterForkChild(NULL);
    }
    pthread_mutex_lock(&lock);
    int status = _PyPerfFilter_Set(patterns);
    pthread_mutex_unlock(&lock);
    struct interp *this_interp = find_interp(PyInterpreterState_Get());
    if (status <= 0 || this_interp == NULL) {
        return status < 0 ? -1 : 0;
    }
    /* With a new number for our extra every function is judged anew. */
    for (struct interp *interp = interps; interp != NULL; interp = interp->next) {
        memset(interp->has_index, 0, sizeof(interp->has_index));
    }
    for (struct backend_state *backend = backends; backend < backends + NUM_BACKENDS; backend++) {
        if (backend->extra_index >= 0) {
            Py_ssize_t former_index = backend->extra_index++;
            if (backend == active_backend && request_index(this_interp, backend) < 0) {
                backend->extra_index = former_index;
                this_interp->has_index[backend - backends] = true;
                return _PyPerf_Fail("code objects have no room for one more extra: the former filter's decisions stay");
            }
        }
    }
    if (active_backend != NULL) {
        active_index = active_backend->extra_index;
    }
    return 0;
}

int
_PyPerfTrampoline_OpenFiles(const _PyPerf_Backend *ops)
{
    pthread_mutex_lock(&lock);
    int status = open_backend(find_backend(ops));
    pthread_mutex_unlock(&lock);
    return status;
}

int
_PyPerfTrampoline_Publish(const _PyPerf_Backend *ops, const void *address, PyCodeObject *code)
{
    pthread_mutex_lock(&lock);
    struct backend_state *backend = find_backend(ops);
    int status = backend->open && !backend->failed ? ops->publish(NULL, (uintptr_t)address, code) : -1;
    pthread_mutex_unlock(&lock);
    return status;
}

void
_PyPerfTrampoline_CloseFiles(const _PyPerf_Backend *ops)
{
    pthread_mutex_lock(&lock);
    ops->close();
    find_backend(ops)->open = false;
    pthread_mutex_unlock(&lock);
}

static void
forget_interpreter(PyObject *capsule)
{
    _PyPerfTrampoline_ForgetInterpreter(PyCapsule_GetPointer(capsule, NULL));
}

/* A module may be dropped and imported again; only the interpreter's own dictionary lives as long as it. */
int
_PyPerfTrampoline_WatchInterpreter(void)
{
    PyInterpreterState *interp = PyInterpreterState_Get();
    PyObject *dict = PyInterpreterState_GetDict(interp);
    const char *key = "_perf_trampoline";
    if (dict == NULL || PyDict_GetItemString(dict, key) != NULL) {
        return 0;
    }
    PyObject *capsule = PyCapsule_New(interp, NULL, forget_interpreter);
    int status = capsule == NULL ? -1 : PyDict_SetItemString(dict, key, capsule);
    Py_XDECREF(capsule);
    return status;
}

void
_PyPerfTrampoline_ForgetInterpreter(PyInterpreterState *this_interp)
{
    pthread_mutex_lock(&lock);
    struct interp *interp = find_interp(this_interp);
    if (interp != NULL) {
        interp->active = interp->installed = false;
        interp->evaluator = _PyEval_EvalFrameDefault;
        memset(interp->has_index, 0, sizeof(interp->has_index));
        interp->interp = NULL;
    }
    pthread_mutex_unlock(&lock);
}

void
_PyPerfTrampoline_GetStatus(_PyPerf_Status *out_status)
{
    PyInterpreterState *this_interp = PyInterpreterState_Get();
    py_evaluator evaluator = _PyInterpreterState_GetEvalFrameFunc(this_interp);
    pthread_mutex_lock(&lock);
    struct interp *interp = find_interp(this_interp);
    *out_status = (_PyPerf_Status){.num_functions = num_functions, .num_slots = num_slots};
    if (interp != NULL && interp->active) {
        out_status->backend = active_backend->ops;
        out_status->displaced = !is_ours(evaluator) && interp->num_aside == 0;
        out_status->chained = interp->evaluator != _PyEval_EvalFrameDefault;
    }
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&failure_lock);
    memcpy(out_status->failure, failure, sizeof(failure));
    pthread_mutex_unlock(&failure_lock);
}

/* After the interpreter's finalization, by exit(): no function is registered any more. */
static __attribute__((destructor)) void
close_files(void)
{
    if (pthread_mutex_trylock(&lock) == 0) {
        for (size_t i = 0; i < NUM_BACKENDS; i++) {
            backends[i].ops->close();
            backends[i].failed = true;
        }
        pthread_mutex_unlock(&lock);
    }
}

#endif
