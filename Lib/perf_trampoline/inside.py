"""What attaching.py has a running process do.  It runs in a thread of its own, beside the program's."""

import os

import perf_trampoline


def act(request, reply):
    """Do as *request* says and put {"error": a sentence or None, "status": ..., "named": ...} into the file *reply*."""
    answer = {"error": None, "named": 0}
    try:
        if request["backend"] is None:
            perf_trampoline.deactivate()
        else:
            perf_trampoline.activate(request["backend"], filter=request["filter"])
            if request["existing"] and perf_trampoline.is_active():
                answer["named"] = perf_trampoline.name_existing()
            if not perf_trampoline.is_active():
                answer["error"] = perf_trampoline.status()["failure"] or "another frame evaluator is in the way"
        answer["status"] = perf_trampoline.status()
    except Exception as error:
        answer["error"] = str(error) or type(error).__name__
    # Whoever reads it sees it whole, and only what this user wrote.
    descriptor = os.open(f"{reply}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, repr(answer).encode("utf-8", "backslashreplace"))
    finally:
        os.close(descriptor)
    os.rename(f"{reply}.new", reply)
