/* The perf trampoline for s390x.

       PyObject *
       trampoline(PyThreadState *ts, _PyInterpreterFrame *frame,
                  int throwflag, evaluator_t evaluator)
       {
           return evaluator(ts, frame, throwflag);
       }

   s390x ELF ABI: 1.2 "Function Calling Sequence".

   On entry:
       r2      ts                  passed on as it is
       r3      frame               passed on as it is
       r4      throwflag           passed on as it is
       r5      evaluator
       r14     return address (DWARF 14)
       r15     stack pointer (DWARF 15); CFA = r15+160, 8-byte aligned

   The frame, offsets from the CFA:
       -40     saved r15, in the caller's register save area
       -48     saved r14, in the caller's register save area
      -160     caller's back chain         <- r15 on entry
      -320     back chain                  <- r15 during the call

   Frame-pointer contract: back chain at 0(r15); r14 in the caller's save
   area.  The ABI leaves the back chain to the compiler (-mbackchain); we
   always store it. */

#include "pycore_asm_trampoline.h"

#if defined(__s390x__)

    TRAMPOLINE_START
    .cfi_startproc
    stmg    %r14, %r15, 112(%r15)
        .cfi_offset %r14, -48
        .cfi_offset %r15, -40
    lgr     %r1, %r15
    aghi    %r15, -160
        .cfi_def_cfa_offset 320
    stg     %r1, 0(%r15)
    basr    %r14, %r5
    lmg     %r14, %r15, 272(%r15)
        .cfi_def_cfa_offset 160
        .cfi_restore %r14
        .cfi_restore %r15
    br      %r14
    .cfi_endproc
    TRAMPOLINE_END

#endif
