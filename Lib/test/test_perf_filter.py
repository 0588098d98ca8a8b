"""PERF_TRAMPOLINE_FILTER and its kind: only wanted functions have slots, whatever the backend, in children too."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_perf_trampoline import BACKENDS, TrampolineTest

# Modules of several names and files, each with one function, which is called.
MODULES = '''
def module(name, path):
    it = {'__name__': name}
    exec(compile('def f(): return 1', path, 'exec'), it)
    f = it['f']
    f.__code__ = f.__code__.replace(co_qualname='in_' + name.replace('.', '_'))
    return f
ALL = [module(name, path) for name, path in (
    ('app', '/srv/app/__init__.py'), ('app.views', '/srv/app/views.py'), ('app.tests.deep', '/srv/app/tests/deep.py'),
    ('application', '/srv/application.py'), ('lib', '/usr/lib/x/lib.py'))]
def call(): return [f() for f in ALL]
'''
NAMES = {'app', 'app_views', 'app_tests_deep', 'application', 'lib'}


class FilterTest(TrampolineTest):

    def named(self, pid, backend):
        """Which of the modules' functions are named in the files of that process."""
        return {name.split(':')[2][3:] for name in self.names(pid, backend) if name.startswith('py::in_')}

    def check_named(self, expected, source, backend='perf', **options):
        done = self.check(MODULES + source, **options)
        self.assertEqual(self.named(done.pid, backend), expected)
        return done

    def check_filter(self, patterns, expected):
        with self.subTest(patterns):
            self.check_named(expected, f'activate("perf", filter={patterns!r}); call()')

    def test_no_filter(self):
        self.check_filter('', NAMES)

    def test_module_stands_for_what_is_in_it(self):
        self.check_filter('app', {'app', 'app_views', 'app_tests_deep'})
        self.check_filter('app.tests', {'app_tests_deep'})

    def test_patterns_of_modules(self):
        self.check_filter('app.*', {'app_views', 'app_tests_deep'})
        self.check_filter('app*', {'app', 'app_views', 'app_tests_deep', 'application'})
        self.check_filter('*.deep', {'app_tests_deep'})
        self.check_filter('l?b,[a-c]pp', {'lib', 'app', 'app_views', 'app_tests_deep'})
        self.check_filter('nothing', set())

    def test_paths(self):
        self.check_filter('/srv/app', {'app', 'app_views', 'app_tests_deep'})
        self.check_filter('/srv/*', NAMES - {'lib'})
        self.check_filter('*/views.py', {'app_views'})
        self.check_filter('/srv/[!a]*', set())

    def test_exclusion(self):
        self.check_filter('!app', {'application', 'lib'})
        self.check_filter('app,!app.tests', {'app', 'app_views'})
        self.check_filter('!/srv/*,!lib', set())

    def test_last_pattern_that_fits_decides(self):
        self.check_filter('app,!app.*,app.tests', {'app', 'app_tests_deep'})
        self.check_filter('!app,app.views', {'app_views', 'application', 'lib'})

    def test_each_backend_has_no_slot_for_unwanted_functions(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                self.check_named({'lib'}, f'''
activate({backend!r}, filter='nothing')
call()
before = status()
activate({backend!r}, filter='lib')
call(); call()
print(status()['slots'] - before['slots'], status()['functions'] - before['functions'])
''', backend, stdout='1 1\n')

    def test_variable(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                self.check_named({'lib'}, 'call(); print(status()["filter"])', backend, stdout='lib\n',
                                 env={'PERF_TRAMPOLINE_FILTER': 'lib',
                                      {'perf': 'PYTHONPERFSUPPORT', 'perf_jit': 'PYTHON_PERF_JIT_SUPPORT',
                                       'perf_elf': 'PYTHON_PERF_ELF_SUPPORT'}[backend]: '1'})

    def test_argument_goes_before_variable(self):
        self.check_named({'lib'}, 'activate("perf", filter="lib"); activate("perf"); call()',
                         env={'PERF_TRAMPOLINE_FILTER': 'app'})

    def test_other_filter_judges_anew(self):
        self.check_named({'lib', 'application'}, '''
activate('perf', filter='lib'); call()
import perf_trampoline
perf_trampoline.set_filter('application'); call()
perf_trampoline.set_filter('lib'); call()
print(perf_trampoline.is_active())
''', stdout='True\n')

    def test_same_filter_changes_nothing(self):
        self.check_named({'lib'}, '''
activate('perf', filter='lib'); call()
functions = status()['functions']
for _ in range(1000): activate('perf', filter='lib'); call()
print(status()['functions'] == functions, status()['failure'])
''', stdout='True None\n')

    def test_filters_without_number(self):
        """Each uses up one of the interpreter's numbers for extras; when they are gone the program runs on."""
        done = self.run_program(MODULES + '''
import perf_trampoline
activate('perf')
for i in range(600): perf_trampoline.set_filter(f'lib,x{i}'); assert call() == [1] * 5
print(perf_trampoline.is_active(), status()['failure'])
''')
        self.assertRegex(done.stdout, r'\ATrue code objects have no room for one more extra.*\n\Z')

    def test_filter_survives_deactivation_and_other_backends(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                self.check_named({'lib'}, f'''
activate('perf', filter='lib'); deactivate(); call()
activate({backend!r}); call()
''', backend)

    def test_filter_survives_fork(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                done = self.run_program(MODULES + f'''
activate({backend!r}, filter='lib,app.views')
ALL[-1]()
child = os.fork()
call()
if child: wait(child); print(child)
''')
                self.remove_files_of(int(done.stdout))
                self.assertEqual(self.named(done.pid, backend), {'lib', 'app_views'})
                inherited = {'lib'} if backend == 'perf_elf' else set()     # the parent's image names it for the child
                self.assertEqual(self.named(int(done.stdout), backend), {'lib', 'app_views'} - inherited)

    def test_existing_functions(self):
        self.check_named({'lib'}, '''
import perf_trampoline
activate('perf', filter='lib')
print(perf_trampoline.name_existing() >= 1)
''', stdout='True\n')

    def test_bad_patterns(self):
        for patterns, reason in (('app,,lib', "pattern 2 of the filter, '', is empty"),
                                 ('!', "pattern 1 of the filter, '!', is empty"),
                                 ('app,', "pattern 2 of the filter, '', is empty"), ('[a-', "has a [ without its ]"),
                                 ('app, lib', 'has a space or a control character'), ('a\\', 'ends in a backslash'),
                                 ('a\nb', "'a?b', has a space or a control character"), ('[a b]', 'has a space'),
                                 ('[\\]', 'has a [ without its ]'), ('[[:alpha:]]', 'has a class of characters'),
                                 ('x' * 9000, 'is too long')):
            with self.subTest(patterns[:9]):
                self.check(f'''
try: activate('perf', filter={patterns!r})
except ValueError as error: print({reason!r} in str(error), len(str(error).splitlines()), str(error).count('separated by'))
print(sys.is_stack_trampoline_active(), status()['filter'] == '')
''', stdout='True 1 1\nFalse True\n')

    def test_bad_pattern_in_the_environment(self):
        """The program runs, without trampolines, and is told once."""
        done = self.run_program('print(sys.is_stack_trampoline_active())', '-X', 'perf',
                                env={'PERF_TRAMPOLINE_FILTER': '[a'})
        self.assertEqual(done.stdout, 'False\n')
        self.assertRegex(done.stderr, r"\Aperf trampoline: pattern 1 of the filter, '\[a', has a \[ without its \].*\n\Z")

    def test_no_python_code_runs_for_a_decision(self):
        """Globals may be a dict whose methods are Python, __name__ anything."""
        self.check('''
class Globals(dict):
    def __getitem__(self, key): raise SystemExit('asked')
    __missing__ = get = __contains__ = __getitem__
class Odd:
    def __str__(self): raise SystemExit('asked')
activate('perf', filter='lib')
exec('def f(): pass', g := Globals(__name__=Odd())); dict.__getitem__(g, 'f')()
exec('def f(): pass', g := Globals()); dict.__getitem__(g, 'f')()
for name in None, 7, 'a' * 100000, '\\udcff', 'a\\0b':
    exec('def f(): return 1\\nf()', {'__name__': name})
print(sys.is_stack_trampoline_active())
''', stdout='True\n')


if __name__ == '__main__':
    unittest.main()
