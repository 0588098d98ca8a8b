"""Runs in gdb, attached to a process: have the main thread run Python code, at a place where that is safe.

Where a thread happens to stop it may hold any lock: that of malloc, of the loader.  All that is called there is
Py_AddPendingCall(), made for signal handlers and threads without the interpreter's lock.  What is queued is a function of
CPython that does nothing.  A breakpoint stops the main thread on its way into that one: out of the evaluation loop, where
any Python code may run.  There our library is loaded, and it queues what is to run when gdb is gone.

When the main thread waits for something, as it may for ever, a stop of any thread on its way into the evaluation loop is as
good: Python code is about to run there.
"""

import os
import re
import select
import threading

import gdb

SETTINGS = (
    "set pagination off", "set confirm off", "set width 0", "set print thread-events off",
    "set print inferior-events off", "handle all nostop noprint pass", "handle SIGINT nostop noprint pass")


PATIENCE = 2        # seconds for the main thread alone


class Refused(Exception):
    pass


def address(symbol):
    try:
        return int(gdb.parse_and_eval(f"(unsigned long)&{symbol}"))
    except gdb.error:
        raise Refused(f"it has no symbol {symbol}") from None


def call(function, prototype, *arguments):
    """Call it in the process; other threads run on, since they may hold what it waits for."""
    return int(gdb.parse_and_eval(f"(long)(({prototype}){function:#x})({', '.join(arguments)})"))


def string(text):
    return '"' + "".join(f"\\{byte:03o}" for byte in os.fsencode(text)) + '"'


def is_handling_pending_calls():
    """May the stopped thread hold the lock of the queue?"""
    frame = gdb.newest_frame()
    for _ in range(8):
        name = frame and frame.name() or ""
        if re.search("add_?pending_?call|make_?pending_?call|(push|pop)_pending", name, re.I):
            return True
        frame = frame and frame.older()
    return False


def breakpoint_at(address):
    breakpoint = gdb.Breakpoint(f"*{address:#x}", internal=True)
    breakpoint.silent = True
    return breakpoint


def wait_for(breakpoints, seconds, caller):
    """Run the process until it is at one of them; False when the time is over, or the caller has closed the pipe."""
    gdb.execute("handle SIGINT stop print pass", to_string=True)
    over = threading.Event()

    def watch():
        select.select([caller], [], [], seconds)
        while not over.is_set():        # before the process runs it is in vain
            gdb.post_event(lambda: over.is_set() or gdb.execute("interrupt"))
            over.wait(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        while True:
            gdb.execute("continue", to_string=True)
            if gdb.selected_thread() is None:
                raise Refused("it has ended")
            if any(breakpoint.hit_count for breakpoint in breakpoints):
                return True
            try:
                sender = int(gdb.parse_and_eval("$_siginfo._sifields._kill.si_pid"))
            except gdb.error:
                sender = 0
            if sender == os.getpid():
                gdb.execute("queue-signal 0")       # gdb interrupts with the signal that the keyboard sends
                return False
    finally:
        over.set()
        gdb.execute("handle SIGINT nostop noprint pass", to_string=True)


def run(program, bias, version, library, text, seconds, caller):
    if bias is not None:
        gdb.execute(f"add-symbol-file {program} -o {bias:#x}", to_string=True)
    # A wrong idea of where things are would be fatal to the process.
    if int(gdb.parse_and_eval(f"*(unsigned int *){address('Py_Version'):#x}")) >> 16 != version[0] << 8 | version[1]:
        raise Refused("gdb does not find its symbols where they are")
    add, marker = address("Py_AddPendingCall"), address("Py_MakePendingCalls")
    dlopen = address("dlopen")
    if is_handling_pending_calls():
        raise Refused("busy")
    places = [breakpoint_at(marker)]
    try:
        if call(add, "int (*)(void *, void *)", f"(void *){marker:#x}", "(void *)0") & 0xffffffff:
            raise Refused("its queue of pending calls is full")
        at_once = False
        if not wait_for(places, min(seconds, PATIENCE), caller) and seconds > PATIENCE:
            places.append(breakpoint_at(address("_PyEval_EvalFrameDefault")))
            wait_for(places, seconds - PATIENCE, caller)
            at_once = places[0].hit_count == 0
        if not any(place.hit_count for place in places):
            raise Refused(f"it has not come to run Python code for {seconds:g} seconds; nothing was changed")
    finally:
        for place in places:
            place.delete()
    if call(dlopen, "void *(*)(const char *, int)", string(library), str(os.RTLD_NOW)) == 0:
        raise Refused(f"it cannot load {library}")
    if call(address("perf_trampoline_run"), "int (*)(const char *, int)", string(text), str(int(at_once))) & 0xffffffff:
        raise Refused("its queue of pending calls is full, or it can start no thread")


def main(*arguments):
    """Print one line: `ok`, or why not."""
    for setting in SETTINGS:
        gdb.execute(setting, to_string=True)
    verdict = "ok"
    try:
        if gdb.selected_inferior().pid == 0:
            raise Refused("gdb cannot attach to it")
        run(*arguments)
    except (Refused, gdb.error, gdb.MemoryError) as error:
        verdict = str(error)
    if gdb.selected_inferior().pid != 0:
        gdb.execute("detach", to_string=True)
    print(f"\nperf_trampoline: {verdict}", flush=True)
