/* The perf trampoline for x86-64.

       PyObject *
       trampoline(PyThreadState *ts, _PyInterpreterFrame *frame,
                  int throwflag, evaluator_t evaluator)
       {
           return evaluator(ts, frame, throwflag);
       }

   System V ABI, AMD64 supplement: 3.2.1 "Registers", 3.2.2 "The Stack
   Frame", 3.2.3 "Parameter Passing".

   On entry:
       rdi     ts                  passed on as it is
       rsi     frame               passed on as it is
       edx     throwflag           passed on as it is
       rcx     evaluator
       rsp     return address; CFA = rsp+8, 16-byte aligned

   The frame, offsets from the CFA:
        -8     return address
       -16     saved rbp (DWARF 6)         <- rbp, rsp during the call

   Frame-pointer contract: rbp -> {saved rbp, return address}.  The CFA stays
   on rsp all the same: where the evaluator returns, compilers describe rbp by
   a slot below rsp, which a profiler that copies the stack does not have. */

#include "pycore_asm_trampoline.h"

#if defined(__x86_64__) && !defined(__ILP32__)

    TRAMPOLINE_START
    .cfi_startproc
    TRAMPOLINE_ENTRY_HINT
    push    %rbp
        .cfi_def_cfa_offset 16
        .cfi_offset %rbp, -16
    mov     %rsp, %rbp
    call    *%rcx
    pop     %rbp
        .cfi_def_cfa_offset 8
        .cfi_restore %rbp
    ret
    .cfi_endproc
    TRAMPOLINE_END

#endif
