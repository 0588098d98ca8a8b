/* BUILD/python: runs BUILD/bin/python, which lies where site.py looks for a virtual environment.

   A script would do, but for perf: it remembers the C library of the shell at an address that the interpreter's own may
   not have, and some versions unwind with the wrong one. This program is linked statically. */

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int
main(int argc, char **argv)
{
    static const char interpreter[] = "/bin/python";
    char path[PATH_MAX + sizeof(interpreter)];
    ssize_t size = readlink("/proc/self/exe", path, PATH_MAX);
    path[size > 0 ? size : 0] = '\0';
    char *slash = strrchr(path, '/');
    if (argc > 0 && slash != NULL) {
        strcpy(slash, interpreter);
        argv[0] = path;
        execv(path, argv);
    }
    perror(path);
    return 127;
}
