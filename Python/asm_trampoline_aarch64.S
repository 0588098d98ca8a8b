/* The perf trampoline for aarch64.

       PyObject *
       trampoline(PyThreadState *ts, _PyInterpreterFrame *frame,
                  int throwflag, evaluator_t evaluator)
       {
           return evaluator(ts, frame, throwflag);
       }

   AAPCS64 (section numbers change from release to release): "General-purpose
   Registers", "The Frame Pointer", "Parameter passing".

   On entry:
       x0      ts                  passed on as it is
       x1      frame               passed on as it is
       w2      throwflag           passed on as it is
       x3      evaluator
       x30     return address (LR, DWARF 30)
       sp      CFA = sp+0, 16-byte aligned

   The frame, offsets from the CFA:
        -8     saved x30
       -16     saved x29 (FP, DWARF 29)    <- x29, sp during the call

   Frame-pointer contract: x29 -> {saved x29, saved x30}.  The CFA stays
   on sp, for the reason in asm_trampoline_x86_64.S.

   The return address is not signed: no perf we know of strips the signature
   from a return address found through CFI, so that a signed one ends the
   call chain. */

#include "pycore_asm_trampoline.h"

#if defined(__aarch64__) && defined(__AARCH64EL__) && !defined(__ILP32__)

    TRAMPOLINE_START
    .cfi_startproc
    TRAMPOLINE_ENTRY_HINT
    stp     x29, x30, [sp, -16]!
        .cfi_def_cfa_offset 16
        .cfi_offset x29, -16
        .cfi_offset x30, -8
    mov     x29, sp
    blr     x3
    ldp     x29, x30, [sp], 16
        .cfi_def_cfa_offset 0
        .cfi_restore x29
        .cfi_restore x30
    ret
    .cfi_endproc
    TRAMPOLINE_END

#endif
