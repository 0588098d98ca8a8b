/* The perf trampoline for riscv64.

       PyObject *
       trampoline(PyThreadState *ts, _PyInterpreterFrame *frame,
                  int throwflag, evaluator_t evaluator)
       {
           return evaluator(ts, frame, throwflag);
       }

   RISC-V ELF psABI: "Integer Register Convention", "Frame Pointer
   Convention", "Integer Calling Convention".

   On entry:
       a0      ts                  passed on as it is
       a1      frame               passed on as it is
       a2      throwflag           passed on as it is
       a3      evaluator
       ra      return address (x1, DWARF 1)
       sp      CFA = sp+0, 16-byte aligned

   The frame, offsets from the CFA:
         0                                 <- s0 during the call
        -8     saved ra
       -16     saved s0 (x8, DWARF 8)      <- sp during the call

   Frame-pointer contract: s0 = CFA; return address at s0-8, saved s0 at
   s0-16.  (On aarch64 the frame pointer points at the pair, here above it.)
   The CFA stays on sp, for the reason in asm_trampoline_x86_64.S.

   Compression and relaxation are off so that code and CFI rows are the same
   whatever -march says. */

#include "pycore_asm_trampoline.h"

#if defined(__riscv) && __riscv_xlen == 64

    .option norvc
    .option norelax
    TRAMPOLINE_START
    .cfi_startproc
    addi    sp, sp, -16
        .cfi_def_cfa_offset 16
    sd      ra, 8(sp)
        .cfi_offset ra, -8
    sd      s0, 0(sp)
        .cfi_offset s0, -16
    addi    s0, sp, 16
    jalr    a3
    ld      ra, 8(sp)
        .cfi_restore ra
    ld      s0, 0(sp)
        .cfi_restore s0
    addi    sp, sp, 16
        .cfi_def_cfa_offset 0
    ret
    .cfi_endproc
    TRAMPOLINE_END

#endif
