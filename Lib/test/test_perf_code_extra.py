"""Code extras without a GIL: read while they are written.  The two functions that do it run under ThreadSanitizer."""

import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from perf_support import SOURCE

import roots

# Two writers, who take turns as the trampolines' lock has them do, give every extra of a code object its value; others
# read meanwhile. One word per extra that is read twice the same once it has been seen.
PROGRAM = r'''
#include "pycore_perf_compat.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum {NUM_EXTRAS = 200, NUM_READERS = 4, ROUNDS = 50};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static PyCodeObject code;
static int done, values[NUM_EXTRAS];

void *PyMem_Calloc(size_t count, size_t size) { return calloc(count, size); }
void PyMem_Free(void *memory) { free(memory); }

static void *
write_all(void *unused)
{
    (void)unused;
    for (int i = 0; i < NUM_EXTRAS; i++) {
        pthread_mutex_lock(&lock);
        if (_PyPerf_CodeExtraAt(&code, i) == NULL && _PyPerf_SetCodeExtra(&code, i, &values[i]) < 0) {
            abort();
        }
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void *
read_all(void *unused)
{
    (void)unused;
    while (!__atomic_load_n(&done, __ATOMIC_ACQUIRE)) {
        for (int i = 0; i < NUM_EXTRAS; i++) {
            void *first = _PyPerf_CodeExtraAt(&code, i), *again = _PyPerf_CodeExtraAt(&code, i);
            if ((first != NULL && first != &values[i]) || (first != NULL && again != first)) {
                abort();
            }
        }
    }
    return NULL;
}

int
main(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t threads[NUM_READERS + 2];
        for (int i = 0; i < NUM_READERS + 2; i++) {
            pthread_create(&threads[i], NULL, i < NUM_READERS ? read_all : write_all, NULL);
        }
        pthread_join(threads[NUM_READERS], NULL);
        pthread_join(threads[NUM_READERS + 1], NULL);
        __atomic_store_n(&done, 1, __ATOMIC_RELEASE);
        for (int i = 0; i < NUM_READERS; i++) {
            pthread_join(threads[i], NULL);
        }
        for (int i = 0; i < NUM_EXTRAS; i++) {
            if (_PyPerf_CodeExtraAt(&code, i) != &values[i]) {
                abort();
            }
        }
        if (_PyPerf_SetCodeExtra(&code, 254, values) == 0 || _PyPerf_CodeExtraAt(&code, 255) != NULL) {
            abort();            /* the interpreter has no such extras */
        }
        code.co_extra = NULL;
        done = 0;
    }
    puts("all read");
}
'''


class CodeExtraTest(unittest.TestCase):

    def check_readers(self, version):
        try:
            python = roots.python(version)
        except roots.Unavailable as error:
            self.skipTest(str(error))
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / 'extra.c').write_text(PROGRAM)
            command = ['gcc', '-O2', '-g', '-fsanitize=thread', '-DPy_GIL_DISABLED=1', '-ffunction-sections', '-Wl,--gc-sections',
                       f'-I{SOURCE}/Include/internal', *python.include_flags, 'extra.c', '-o', 'extra', '-lpthread']
            done = subprocess.run(command, cwd=directory, text=True, capture_output=True)
            self.assertEqual(done.returncode, 0, f'{shlex.join(command)}\n{done.stderr}')
            done = subprocess.run(['setarch', '-R', './extra'], cwd=directory, text=True, capture_output=True)
            self.assertEqual((done.stdout, done.stderr, done.returncode), ('all read\n', '', 0))

    def test_3_13(self):
        self.check_readers('3.13')

    def test_3_14(self):
        self.check_readers('3.14')

    def test_3_15(self):
        self.check_readers('3.15')


if __name__ == '__main__':
    unittest.main()
