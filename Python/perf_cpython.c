/* CPython's own names for all of this: what its pylifecycle.c, sysmodule.c, posixmodule.c and jit_publish.c call. An
   extension has none of them.

   CPython knows a backend as three callbacks. Ours are an adapter over the backend's operations, and tell which one is
   meant; code memory is not theirs to choose. */

#include "pycore_perf_trampoline.h"

#ifdef _PyPerf_CPYTHONS_OWN

_PyPerf_Callbacks *
_PyPerf_FindCallbacks(const char *backend)
{
    return strcmp(backend, "perf") == 0 ? &_Py_perfmap_callbacks
           : strcmp(backend, "perf_jit") == 0 ? &_Py_perfmap_jit_callbacks : NULL;
}

#elif defined(_PyPerf_IN_CPYTHON)

/* Not declared in every version. */
extern void _PyPerfTrampoline_FreeArenas(void);

#ifndef _PyPerf_STUBS

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

static void
write_entry(const _PyPerf_Backend *backend, const void *address, size_t size, PyCodeObject *code)
{
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    /* Other code would get a trampoline's unwind data. */
    if (template != NULL && size == template->code_size) {
        _PyPerfTrampoline_Publish(backend, address, code);
    }
}

static int
free_state(void *state)
{
    if (state != NULL) {
        _PyPerfTrampoline_CloseFiles(state);
    }
    return 0;
}

static void *
init_state(const _PyPerf_Backend *backend)
{
    return _PyPerfTrampoline_OpenFiles(backend) < 0 ? NULL : (void *)backend;
}

static void *
map_init(void)
{
    return init_state(&_PyPerf_map_backend);
}

static void
map_write(void *Py_UNUSED(state), const void *address, _PyPerf_CallbackSize size, PyCodeObject *code)
{
    write_entry(&_PyPerf_map_backend, address, size, code);
}

static void *
jitdump_init(void)
{
    return init_state(&_PyPerf_jitdump_backend);
}

static void
jitdump_write(void *Py_UNUSED(state), const void *address, _PyPerf_CallbackSize size, PyCodeObject *code)
{
    write_entry(&_PyPerf_jitdump_backend, address, size, code);
}

static void *
elf_init(void)
{
    return init_state(&_PyPerf_elf_backend);
}

/* An image has only its own slots. */
static void
elf_write(void *Py_UNUSED(state), const void *Py_UNUSED(address), _PyPerf_CallbackSize Py_UNUSED(size),
          PyCodeObject *Py_UNUSED(code))
{
}

_PyPerf_Callbacks _Py_perfmap_callbacks = {map_init, map_write, free_state};
_PyPerf_Callbacks _Py_perfmap_jit_callbacks = {jitdump_init, jitdump_write, free_state};
_PyPerf_Callbacks _Py_perf_elf_callbacks = {elf_init, elf_write, free_state};

static const struct {
    _PyPerf_Callbacks *callbacks;
    const _PyPerf_Backend *backend;
} choices[] = {
    {&_Py_perfmap_callbacks, &_PyPerf_map_backend},
    {&_Py_perfmap_jit_callbacks, &_PyPerf_jitdump_backend},
    {&_Py_perf_elf_callbacks, &_PyPerf_elf_backend},
};

static struct {
    int choice;                 /* -1: none yet */
    int persist_after_fork;
} state = {.choice = -1};

_PyPerf_Callbacks *
_PyPerf_FindCallbacks(const char *backend)
{
    for (size_t i = 0; i < Py_ARRAY_LENGTH(choices); i++) {
        if (strcmp(choices[i].backend->name, backend) == 0) {
            return choices[i].callbacks;
        }
    }
    return NULL;
}

/* A program that is started with -X perf starts, whatever becomes of its profile. */
static int
refuse(const char *format, const char *what)
{
    if (!Py_IsInitialized()) {
        _PyPerf_Fail(format, what);
        return 0;
    }
    PyErr_Format(PyExc_ValueError, format, what);
    return -1;
}

#define LIST_SIZE (3 * PATH_MAX)

/* Where images are made, as Lib/perf_trampoline/images.py has it for installed interpreters. Returns why not there, for
   printf, or NULL. */
static const char *
list_directories(char *list)
{
    const PyConfig *config = _PyInterpreterState_GetConfig(PyInterpreterState_Get());
    const char *chosen = config->use_environment ? getenv("PERF_TRAMPOLINE_DIR") : NULL;
    const wchar_t option[] = L"perf_elf=";
    char *encoded = NULL;
    for (Py_ssize_t i = 0; i < config->xoptions.length && encoded == NULL; i++) {
        const wchar_t *item = config->xoptions.items[i];
        if (wcsncmp(item, option, wcslen(option)) == 0) {
            encoded = Py_EncodeLocale(item + wcslen(option), NULL);
        }
    }
    if (encoded != NULL) {
        chosen = encoded;
    }
    if (chosen == NULL || *chosen == '\0') {
        const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME"), *below = "";
        if (cache == NULL || *cache == '\0') {
            cache = home;
            below = "/.cache";
        }
        int user = (int)geteuid(), size = snprintf(list, LIST_SIZE, "/tmp/python-perf-%d:", user);
        if (cache != NULL && *cache == '/' && strchr(cache, ':') == NULL && strlen(cache) < PATH_MAX) {
            size += sprintf(list + size, "%s%s/perf-trampoline-images:", cache, below);
        }
        sprintf(list + size, "/dev/shm/python-perf-%d", user);
        return NULL;
    }
    char here[PATH_MAX] = "";
    bool is_relative = *chosen != '/' && getcwd(here, sizeof(here)) != NULL;
    snprintf(list, LIST_SIZE, "%s%s%s", here, is_relative ? "/" : "", chosen);
    PyMem_Free(encoded);
    return strchr(list, ':') != NULL ? "a directory for images cannot have a colon in its name: %s"
           : strncmp(list, "/tmp/perf-", 10) == 0
           ? "perf reads no images in %s: choose a directory that does not begin with /tmp/perf-" : NULL;
}

#ifdef _PyPerf_HAVE_JIT_CODE
/* The JIT would name its code in our dump, but is never on together with a trampoline. */
void
_PyPerfJit_WriteNamedCode(const void *Py_UNUSED(code_addr), size_t Py_UNUSED(code_size), const char *Py_UNUSED(entry),
                          const char *Py_UNUSED(filename))
{
}
#endif

#endif

int
_PyPerfTrampoline_SetCallbacks(_PyPerf_Callbacks *callbacks)
{
    if (callbacks == NULL) {
        return -1;
    }
#ifndef _PyPerf_STUBS
    for (int i = 0; i < (int)Py_ARRAY_LENGTH(choices); i++) {
        if (choices[i].callbacks->write_state == callbacks->write_state) {
            state.choice = i;
            return 0;
        }
    }
    return -1;
#else
    return 0;
#endif
}

void
_PyPerfTrampoline_GetCallbacks(_PyPerf_Callbacks *callbacks)
{
#ifndef _PyPerf_STUBS
    if (callbacks != NULL) {
        *callbacks = state.choice < 0 ? (_PyPerf_Callbacks){NULL, NULL, NULL} : *choices[state.choice].callbacks;
    }
#endif
}

int
_PyPerfTrampoline_Init(int activate)
{
#ifndef _PyPerf_STUBS
    const char *reason;
    if (!activate) {
        _PyPerfTrampoline_Deactivate();
        return 0;
    }
    if (_PyPerf_GetTemplate(&reason) == NULL) {
        return refuse("perf trampoline not available: %s", reason);
    }
    const _PyPerf_Backend *backend = state.choice < 0 ? &_PyPerf_map_backend : choices[state.choice].backend;
    if (backend == &_PyPerf_elf_backend) {
        char list[LIST_SIZE];
        if ((reason = list_directories(list)) != NULL) {
            return refuse(reason, list);
        }
        _PyPerfElf_SetDirectories(list);
    }
    if (_PyPerfTrampoline_WatchInterpreter() < 0) {
        return -1;
    }
    /* When it fails the program runs on without: one line on stderr tells why. */
    (void)_PyPerfTrampoline_Activate(backend);
#endif
    return 0;
}

/* The main interpreter ends. Slots and files stay: functions may die later, and be made again by the next one. */
int
_PyPerfTrampoline_Fini(void)
{
#ifndef _PyPerf_STUBS
    _PyPerfTrampoline_Deactivate();
    _PyPerfTrampoline_ForgetInterpreter(PyInterpreterState_Get());
    state.choice = -1;
    state.persist_after_fork = 0;
#endif
    return 0;
}

void
_PyPerfTrampoline_FreeArenas(void)
{
}

int
_PyIsPerfTrampolineActive(void)
{
#ifndef _PyPerf_STUBS
    _PyPerf_Status status;
    _PyPerfTrampoline_GetStatus(&status);
    return status.backend != NULL && !status.displaced;
#else
    return 0;
#endif
}

PyStatus
_PyPerfTrampoline_AfterFork_Child(void)
{
#ifndef _PyPerf_STUBS
    _PyPerf_Status status;
    _PyPerfTrampoline_GetStatus(&status);
    bool inherits = state.persist_after_fork && status.backend == &_PyPerf_map_backend && _PyPerfMap_Inherit() == 0;
    _PyPerfTrampoline_AfterForkChild(inherits ? status.backend : NULL);
#endif
    return PyStatus_Ok();
}

int
PyUnstable_PerfTrampoline_CompileCode(PyCodeObject *code)
{
#ifndef _PyPerf_STUBS
    (void)_PyPerfTrampoline_NameCode(code, NULL);
#endif
    return 0;
}

int
PyUnstable_PerfTrampoline_SetPersistAfterFork(int enable)
{
#ifndef _PyPerf_STUBS
    state.persist_after_fork = enable;
    return enable;
#else
    return 0;
#endif
}

#endif
