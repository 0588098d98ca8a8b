/* What every Python/asm_trampoline_<arch>.S shares.  For the preprocessor
   only: no C, no instruction that depends on a compiler flag.

   The notes are emitted here, outside the guard of the including file, so
   that an object which turns out empty still does not ask for an executable
   stack and does not clear a property of the library it is linked into.

   x86-64 psABI, "Program Property"; aarch64 sysvabi64, "Program Property". */

#ifndef Py_INTERNAL_ASM_TRAMPOLINE_H
#define Py_INTERNAL_ASM_TRAMPOLINE_H

/* Mach-O puts an underscore before C names and, on aarch64, takes ';' for the
   start of a comment. */
#ifdef __APPLE__
#  define _Py_trampoline_func_start __Py_trampoline_func_start
#  define _Py_trampoline_func_end __Py_trampoline_func_end
#  define TRAMPOLINE_HIDDEN(name) .private_extern name
#  define TRAMPOLINE_TYPE(name)
#  define TRAMPOLINE_SIZE(name)
#else
#  define TRAMPOLINE_HIDDEN(name) .hidden name
#  define TRAMPOLINE_TYPE(name) .type name, STT_FUNC
#  define TRAMPOLINE_SIZE(name) .size name, . - name
#endif
#if defined(__APPLE__) && defined(__aarch64__)
#  define TRAMPOLINE_NEXT %%
#else
#  define TRAMPOLINE_NEXT ;
#endif

#define TRAMPOLINE_LABEL(name) \
    .globl name TRAMPOLINE_NEXT \
    TRAMPOLINE_HIDDEN(name) TRAMPOLINE_NEXT \
    name:

#define TRAMPOLINE_START \
    .text TRAMPOLINE_NEXT \
    .p2align 4 TRAMPOLINE_NEXT \
    TRAMPOLINE_TYPE(_Py_trampoline_func_start) TRAMPOLINE_NEXT \
    TRAMPOLINE_LABEL(_Py_trampoline_func_start)

#define TRAMPOLINE_END \
    TRAMPOLINE_SIZE(_Py_trampoline_func_start) TRAMPOLINE_NEXT \
    TRAMPOLINE_LABEL(_Py_trampoline_func_end)

/* The target of an indirect call begins with a hint where the processor can
   insist on one.  Older processors take it for a no-op, so it is always
   there: without it every following CFI row would sit elsewhere. */
#if defined(__x86_64__)
#  define TRAMPOLINE_ENTRY_HINT endbr64
#elif defined(__aarch64__)
#  define TRAMPOLINE_ENTRY_HINT hint 34     /* bti c */
#endif

#ifndef __APPLE__
    .section .note.GNU-stack, "", @progbits

#if defined(__x86_64__) && defined(__CET__) && __CET__
#  define TRAMPOLINE_PROPERTY 0xc0000002    /* GNU_PROPERTY_X86_FEATURE_1_AND */
#  define TRAMPOLINE_PROPERTY_BITS __CET__  /* IBT 1, SHSTK 2 */
#elif defined(__aarch64__)
#  ifdef __ARM_FEATURE_BTI_DEFAULT
#    define TRAMPOLINE_BTI 1
#  else
#    define TRAMPOLINE_BTI 0
#  endif
/* Set although the trampoline does not sign its return address: the bit
   speaks of the linked library, and the frame is legal either way. */
#  ifdef __ARM_FEATURE_PAC_DEFAULT
#    define TRAMPOLINE_PAC 2
#  else
#    define TRAMPOLINE_PAC 0
#  endif
#  ifdef __ARM_FEATURE_GCS_DEFAULT
#    define TRAMPOLINE_GCS 4
#  else
#    define TRAMPOLINE_GCS 0
#  endif
#  if TRAMPOLINE_BTI || TRAMPOLINE_PAC || TRAMPOLINE_GCS
#    define TRAMPOLINE_PROPERTY 0xc0000000  /* GNU_PROPERTY_AARCH64_FEATURE_1_AND */
#    define TRAMPOLINE_PROPERTY_BITS \
         (TRAMPOLINE_BTI | TRAMPOLINE_PAC | TRAMPOLINE_GCS)
#  endif
#endif

#ifdef TRAMPOLINE_PROPERTY
    .section .note.gnu.property, "a", @note
    .p2align 3
    .long 4                                 /* size of the name */
    .long 16                                /* size of the descriptor */
    .long 5                                 /* NT_GNU_PROPERTY_TYPE_0 */
    .asciz "GNU"
    .long TRAMPOLINE_PROPERTY
    .long 4                                 /* size of the bits */
    .long TRAMPOLINE_PROPERTY_BITS
    .long 0                                 /* pads the property to 8 */
#endif
#endif /* !__APPLE__ */

#endif /* Py_INTERNAL_ASM_TRAMPOLINE_H */
