/* Which functions get slots: those whose module or file is named by the patterns of a filter, separated by commas.

   A pattern with a slash is for the code's file name, any other for its module (__name__ of its globals), and names
   what lies below as well: `json` is json.decoder too, `/srv/app` every file in it. `*`, `?` and `[...]` are those of
   fnmatch(3), without its classes, and stand for slashes and dots too. A `!` before a pattern leaves functions out. The
   last pattern that fits decides; a function that none fits is out, or in when the first pattern leaves out. */

#include "pycore_perf_trampoline.h"

#ifndef _PyPerf_STUBS

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As it was set. A filter is never freed: there is no more than one for each number that an extra can have. */
static const char *_Atomic filter = "";

static size_t
pattern_size(const char *pattern)
{
    return strcspn(pattern, ",");
}

/* Where the set ends that begins at pattern[i], as fnmatch() reads it; size if it does not. */
static size_t
end_of_set(const char *pattern, size_t i, size_t size)
{
    i += 1 + (i + 1 < size && (pattern[i + 1] == '!' || pattern[i + 1] == '^'));
    for (size_t first = i; i < size && (i == first || pattern[i] != ']'); i++) {
        i += pattern[i] == '\\';
    }
    return Py_MIN(i, size);
}

/* fnmatch() takes what it cannot read for plain characters; a filter that does so is a slip. */
static const char *
whats_wrong(const char *pattern, size_t size)
{
    size_t begin = size > 0 && pattern[0] == '!';
    if (size == begin) {
        return "is empty";
    }
    for (size_t i = begin; i < size; i++) {
        if ((unsigned char)pattern[i] <= ' ' || pattern[i] == 0x7f) {
            return "has a space or a control character";
        }
    }
    for (size_t i = begin; i < size; i++) {
        if (pattern[i] == '\\') {
            if (++i == size) {
                return "ends in a backslash";
            }
        }
        else if (pattern[i] == '[') {
            size_t end = end_of_set(pattern, i, size);
            if (end == size) {
                return "has a [ without its ]";
            }
            while (++i < end) {
                if (pattern[i] == '[' && strchr(":.=", pattern[i + 1]) != NULL) {
                    return "has a class of characters";
                }
            }
        }
    }
    return size > _PyPerf_NAME_MAX ? "is too long" : NULL;
}

const char *
_PyPerfFilter_Check(const char *patterns, char *room, size_t size)
{
    for (size_t number = 1; *patterns != '\0'; number++) {
        size_t length = pattern_size(patterns);
        const char *wrong = whats_wrong(patterns, length);
        bool ends_in_comma = patterns[length] == ',' && patterns[length + 1] == '\0';
        if (wrong == NULL && ends_in_comma) {
            length = 0, patterns = "", number++, wrong = "is empty";
        }
        if (wrong != NULL) {
            snprintf(room, size, "pattern %zu of the filter, '%.*s', %s; patterns are modules (json.*) or paths "
                     "(/srv/app/*), separated by commas, with ! before those to leave out",
                     number, (int)Py_MIN(length, 200), patterns, wrong);
            _PyPerf_MakeOneLine(room);
            return room;
        }
        patterns += length + (patterns[length] == ',');
    }
    return NULL;
}

int
_PyPerfFilter_Set(const char *patterns)
{
    char room[512];
    const char *wrong = _PyPerfFilter_Check(patterns, room, sizeof(room));
    if (wrong != NULL) {
        return _PyPerf_Fail("%s", wrong);
    }
    if (strcmp(patterns, _PyPerfFilter_Get()) == 0) {
        return 0;
    }
    const char *copy = *patterns == '\0' ? "" : strdup(patterns);
    if (copy == NULL) {
        return _PyPerf_Fail("no memory for a filter");
    }
    filter = copy;
    return 1;
}

const char *
_PyPerfFilter_Get(void)
{
    return filter;
}

/* In the words of fnmatch(), which knows "and what is below" for paths only. */
static void
dots_to_slashes(char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '.') {
            *text = '/';
        }
    }
}

static size_t
encode_module(PyObject *globals, char *text)
{
    PyObject *name = NULL;
    if (globals != NULL && PyDict_Check(globals)) {
#if PY_VERSION_HEX >= 0x030d0000
        if (PyDict_GetItemStringRef(globals, "__name__", &name) < 0) {
            PyErr_Clear();
        }
#else
        name = Py_XNewRef(PyDict_GetItemString(globals, "__name__"));
#endif
    }
    size_t size = name != NULL && PyUnicode_Check(name) ? _PyPerf_EncodePath(name, text, _PyPerf_NAME_MAX) : 0;
    Py_XDECREF(name);
    return size;
}

bool
_PyPerfFilter_Wants(const char *patterns, PyCodeObject *code, PyObject *globals)
{
    if (*patterns == '\0') {
        return true;
    }
    char path[_PyPerf_NAME_MAX + 1], module[_PyPerf_NAME_MAX + 1], glob[_PyPerf_NAME_MAX + 1];
    path[_PyPerf_EncodePath(code->co_filename, path, _PyPerf_NAME_MAX)] = '\0';
    module[encode_module(globals, module)] = '\0';
    dots_to_slashes(module);

    bool wanted = *patterns == '!';
    for (const char *pattern = patterns; *pattern != '\0'; ) {
        size_t size = pattern_size(pattern);
        bool out = *pattern == '!';
        memcpy(glob, pattern + out, size - out);
        glob[size - out] = '\0';
        const char *text = path;
        if (strchr(glob, '/') == NULL) {
            dots_to_slashes(glob);
            text = module;
        }
        if (fnmatch(glob, text, FNM_LEADING_DIR) == 0) {
            wanted = !out;
        }
        pattern += size + (pattern[size] == ',');
    }
    return wanted;
}

#endif
