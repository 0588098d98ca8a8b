#!/bin/sh
# CPython 3.14 or 3.15 with the core in the place of its own, without its source: relink.sh VERSION ROOT PROGRAM [plain]
#
# ROOT is a Debian root with static libraries (roots.root(..., keep_static=True) of libpython3.X-dev), PROGRAM goes into its
# usr/bin and is run by its loader.  A plain one, to compare with, has CPython's own.
set -eu
version=$1 root=$2 program=$3
source=$(cd "$(dirname "$0")/../.." && pwd)
include=$root/usr/include libraries=$root/usr/lib/x86_64-linux-gnu
variables=$(echo "$root/usr/lib/python$version"/_sysconfigdata__linux_*.py)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

cp "$libraries/libpython$version.a" theirs.a
if [ "${4-}" != plain ]; then
    jit=$(grep -o -e '-D_Py_JIT' -e '-D_Py_TIER2=[0-9]*' "$variables" | sort -u)
    gcc -c -g -O2 -Wall -std=c11 -fvisibility=hidden -fcf-protection -fno-omit-frame-pointer $jit -DPy_BUILD_CORE \
        -I"$source/Include/internal" -isystem "$include/python$version" -isystem "$include/python$version/internal" \
        -isystem "$include/python$version/internal/mimalloc" -idirafter "$include" "$source"/Python/*.c
    gcc -c -fcf-protection -I"$source/Include/internal" "$source/Python/asm_trampoline_x86_64.S"
    ar d theirs.a $(ar t theirs.a | grep -x -e asm_trampoline.o -e 'perf_\(jit_\)\?trampoline.o' -e jit_unwind.o)
fi
echo 'int Py_BytesMain(int, char **); int main(int c, char **v) { return Py_BytesMain(c, v); }' | gcc -xc -c -o main.o -
libs=$(sed -n "s/^ *'\(LIBS\|MODLIBS\)': '\([^']*\)'.*/\2/p" "$variables" | tr '\\\n' '  ' | sed 's/-lzstd/-l:libzstd.so.1/g')
gcc -no-pie --sysroot="$root" -B"$libraries" -Wl,-export-dynamic -o "$program" *.o \
    -Wl,--whole-archive theirs.a -Wl,--no-whole-archive -L"$libraries" -Wl,-rpath-link,"$libraries" -lexpat -lz $libs -lm \
    -Wl,--unresolved-symbols=ignore-in-object-files
