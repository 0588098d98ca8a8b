"""What bench.py measures: `programs.py [--floor DIR] PROGRAM [ARGUMENT...]` prints one line of JSON.

Times are of the processor, not of the clock: the machine may have other work.
"""

import functools
import gc
import itertools
import json
import os
import resource
import sys
import time
import types


def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


class Account:
    def __init__(self):
        self.balance = 0

    def deposit(self, amount):
        self.balance = self.balance + amount & 7    # no new integer, which may take more or less long


def methods(n):
    account = Account()
    for amount in itertools.repeat(1, n):
        account.deposit(amount)


def nested(n):
    def innermost(x):
        return x

    def inner(x):
        return innermost(x)

    def outer(x):
        return inner(x)
    for x in itertools.repeat(1, n):
        outer(x)


# Name: function, its argument and the Python calls that it makes, for timing and for counting.
WORKLOADS = {
    'fib': (fib, (23, 92735), (16, 3193)),
    'methods': (methods, (90000, 90002), (3000, 3002)),
    'nested': (nested, (30000, 90001), (1000, 3001)),
}


def timed(function, *arguments):
    before = time.process_time_ns()
    function(*arguments)
    return time.process_time_ns() - before


def calls():
    """Nanoseconds per call in each workload."""
    return {name: min(timed(function, argument) for _ in range(9)) / num_calls
            for name, (function, (argument, num_calls), _) in WORKLOADS.items()}


def repeat(name, times):
    """Run a small workload; returns the calls it makes each time."""
    gc.disable()                    # it would come at other places in another column
    function, _, (argument, num_calls) = WORKLOADS[name]
    for _ in range(int(times)):
        function(argument)
    return num_calls


def callback():
    return None


VERBS = 'get', 'set_default', 'parse_header', '_resolve', 'on_connection_lost', '__init__', 'as_dict', 'validate'
NOUNS = 'Request', 'ConnectionPool', 'BaseSerializer', 'Field', 'QuerySet', 'TemplateLoader', 'Session'
PACKAGES = 'requests', 'sqlalchemy/orm', 'django/db/models', 'numpy/core', 'urllib3/util'


@functools.lru_cache(1)
def file_name(number):
    return f'/usr/lib/python3/dist-packages/{PACKAGES[number % 5]}/module_{number}.py'


def function(number):
    """A function like those of real programs: about 75 characters of name and file, some 40 functions to a file."""
    name = f'{VERBS[number % 8]}_{number}'
    return types.FunctionType(callback.__code__.replace(
        co_name=name, co_qualname=f'{NOUNS[number // 8 % 7]}.{name}', co_firstlineno=number % 40 * 15 + 1,
        co_filename=file_name(number // 40)), {})


def call_all(functions):
    for f in functions:
        f()


def register(number):
    """Nanoseconds and page faults that the first call of a new function takes more than a later one."""
    functions = [function(i) for i in range(int(number))]
    call_all([function(-1)])        # whatever is done once
    gc.disable()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = timed(call_all, functions)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    later = min(timed(call_all, functions) for _ in range(5))
    return {'ns': (first - later) / len(functions), 'page faults': faults / len(functions)}


def once(number, end):
    """Make and call so many functions; end while they are still alive, or after they are dead."""
    gc.disable()
    functions = [function(i) for i in range(int(number))]
    call_all(functions)
    if end == 'dead':
        functions.clear()
    print(json.dumps({'pid': os.getpid()}), flush=True)
    os._exit(0)


def resident():
    with open('/proc/self/status') as status:
        return next(int(line.split()[1]) for line in status if line.startswith('VmRSS'))


def churn(number):
    """KiB of resident memory that functions with distinct names leave behind."""
    for i in range(20000):
        function(i)()
    before = resident()
    for i in range(20000, 20000 + int(number)):
        function(i)()
    return resident() - before


def deep(depth, seconds):
    """Spin, that deep in a recursion."""
    def recurse(depth):
        return recurse(depth - 1) if depth else spin()

    def spin():
        while time.process_time() < float(seconds):
            pass
    sys.setrecursionlimit(10000)
    recurse(int(depth))


def busy(number, seconds):
    """Call functions in turn for so long."""
    for f in itertools.cycle([function(i) for i in range(int(number))]):
        if time.process_time() > float(seconds):
            break
        for _ in range(100):
            f()


if __name__ == '__main__':
    arguments = sys.argv[1:]
    if arguments[0] == '--floor':
        sys.path.insert(0, arguments[1])
        import floor
        floor.install()
        del arguments[:2]
    print(json.dumps({'pid': os.getpid(), 'result': globals()[arguments[0]](*arguments[1:])}))
