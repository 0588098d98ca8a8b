/* The perf trampoline for ppc64le.

       PyObject *
       trampoline(PyThreadState *ts, _PyInterpreterFrame *frame,
                  int throwflag, evaluator_t evaluator)
       {
           return evaluator(ts, frame, throwflag);
       }

   64-Bit ELF V2 ABI: 2.2 "Function Calling Sequence".

   On entry:
       r3      ts                  passed on as it is
       r4      frame               passed on as it is
       r5      throwflag           passed on as it is
       r6      evaluator
       LR      return address (DWARF 65)
       r2      the caller's TOC pointer
       r1      CFA = r1+0, 16-byte aligned, back chain at 0(r1)

   The frame, offsets from the CFA:
       +16     saved LR, in the caller's frame
        -8     saved r2
       -16     LR save area, for the evaluator
       -24     CR save area, for the evaluator
       -32     back chain                  <- r1 during the call

   Frame-pointer contract: none is needed, the ABI demands the back chain;
   LR at 16 of the caller's frame.

   The trampoline uses no TOC, so one entry point serves as global and local
   entry, and a copy works at any address.  The evaluator's global entry
   derives its own TOC from r12.  The load of r2 directly behind the call is
   what unwinders look for to restore it, hence no CFI for r2. */

#include "pycore_asm_trampoline.h"

#if defined(__powerpc64__) && defined(__LITTLE_ENDIAN__) && _CALL_ELF == 2

    .abiversion 2
    TRAMPOLINE_START
    .cfi_startproc
    mflr    %r0
    std     %r0, 16(%r1)
        .cfi_offset lr, 16
    stdu    %r1, -32(%r1)
        .cfi_def_cfa_offset 32
    std     %r2, 24(%r1)
    mr      %r12, %r6
    mtctr   %r12
    bctrl
    ld      %r2, 24(%r1)
    addi    %r1, %r1, 32
        .cfi_def_cfa_offset 0
    ld      %r0, 16(%r1)
    mtlr    %r0
        .cfi_restore lr
    blr
    .cfi_endproc
    TRAMPOLINE_END

#endif
