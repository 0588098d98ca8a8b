/* What tests of unwinding call from Python, through ctypes: a callback is a Python function in a ctypes closure.

   The interpreter's own stack walks, exceptions and cancellations must pass through trampolines as through any frame.
   Each program ends with the probe: below the frames that were skipped the interpreter's state is not what it was. */

#include <cstdio>
#include <cstdlib>
#include <execinfo.h>
#include <pthread.h>
#include <unistd.h>

/* A build of its own: libunwind brings exceptions and forced unwinding of its own, which do not go with glibc's. */
#ifdef WITH_LIBUNWIND
#  define UNW_LOCAL_ONLY
#  include <libunwind.h>
#endif

extern "C" {

typedef void callback(void);

/* backtrace(3): one line a frame. */
void
print_backtrace(void)
{
    void *frames[256];
    int num_frames = backtrace(frames, 256);
    char **symbols = backtrace_symbols(frames, num_frames);
    for (int i = 0; i < num_frames; i++) {
        puts(symbols[i]);
    }
    free(symbols);
    fflush(stdout);
}

#ifdef WITH_LIBUNWIND
void
print_libunwind(void)
{
    unw_context_t context;
    unw_cursor_t cursor;
    unw_getcontext(&context);
    unw_init_local(&cursor, &context);
    do {
        char name[1024] = "?";
        unw_word_t offset;
        unw_get_proc_name(&cursor, name, sizeof(name), &offset);
        puts(name);
    } while (unw_step(&cursor) > 0);
    fflush(stdout);
}
#endif

void
throw_number(int number)
{
    throw number;
}

void
catch_number(callback *call)
{
    try {
        call();
    }
    catch (int number) {
        printf("caught %d\n", number);
        fflush(stdout);
        _exit(0);
    }
}

static void
print_unwound(void *)
{
    puts("unwound");
}

static void *
run_thread(void *call)
{
    pthread_cleanup_push(print_unwound, nullptr);
    ((callback *)call)();
    pthread_cleanup_pop(0);
    return nullptr;
}

/* Run it in a thread of its own, and tell how that ended. */
void
join_thread(callback *call)
{
    pthread_t thread;
    void *result;
    pthread_create(&thread, nullptr, run_thread, (void *)call);
    pthread_join(thread, &result);
    puts(result == PTHREAD_CANCELED ? "cancelled" : result == (void *)1 ? "exited" : "returned");
    fflush(stdout);
    _exit(0);
}

void
exit_thread(void)
{
    pthread_exit((void *)1);
}

void
cancel_thread(void)
{
    pthread_cancel(pthread_self());
    pthread_testcancel();
}

#ifdef WAITS_FOR_GIL
/* A library whose loading waits for the interpreter lock. */
int PyGILState_Ensure(void);
void PyGILState_Release(int);
int PyRun_SimpleString(const char *);

static __attribute__((constructor)) void
run_python(void)
{
    int state = PyGILState_Ensure();
    PyRun_SimpleString("sum(i for i in range(1000))");
    PyGILState_Release(state);
}
#endif

}
