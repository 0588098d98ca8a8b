/* The program that stepcheck.py steps, and the ABI check: calls through a trampoline that was copied as the real ones
   are, with an evaluator in another shared object.

       stepcheck CALLS     prints what a call did not keep and exits with 1

   Built twice: with EVALUATOR defined it is that shared object. REGISTERS is R(name) for each callee-saved register of
   the table except the stack pointer and the frame pointer; only the compiler writes to these. FRAME is what the
   latter holds, or NULL. */

#include <stdint.h>
#include <stdio.h>

/* What a call should bring to the evaluator and back, and what it did. */
struct call {
    uint64_t ts, frame, throwflag, result, cfa;
};
extern struct call received;
extern evaluator_t *const evaluator_address;    /* as seen from its own object: no detour through a PLT */

#ifdef EVALUATOR

struct call received;

__attribute__((noinline)) static void
leaf(void)
{
    __asm__ volatile("");
}

__attribute__((visibility("hidden"))) void *
evaluator(void *ts, void *frame, int throwflag)
{
    leaf();         /* so this is none, and takes more registers for itself */
    received = (struct call){(uintptr_t)ts, (uintptr_t)frame, throwflag, received.result,
                             (uintptr_t)__builtin_dwarf_cfa()};
#define R(name) register uint64_t name __asm__(#name) = ~received.result; __asm__ volatile("" : : "r"(name));
    REGISTERS
    return (void *)received.result;
}

evaluator_t *const evaluator_address = evaluator;

#else

/* For stepcheck.py. */
evaluator_t *evaluator;
uint8_t *slot, *eh_frame;
void ready(void) {}
void (*volatile tell_ready)(void) = ready;

/* xorshift64: one million calls draw a few dozen million numbers. */
static uint64_t
random_bits(void)
{
    static uint64_t state = 0x9e3779b97f4a7c15;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

#define R(name) +1
enum { num_registers = 0 REGISTERS };
#undef R
static const char *const names[] = {
#define R(name) #name,
    REGISTERS
#undef R
};
static uint64_t before[num_registers], after[num_registers];
static void *volatile frame_before, *volatile frame_after;
static struct call sent;

/* The assembled routine itself: a call within one object, where the caller leaves it to the callee to keep r2 (TOC). */
extern trampoline_t linked __asm__("_Py_trampoline_func_start") __attribute__((visibility("hidden")));

/* The compiler may expect after the call whatever it had in these registers. An operand tied to one ("0") is a move in
   which no compiler takes the frame pointer for the stack pointer, as a plain move of ppc64le's r31 is taken. */
__attribute__((always_inline)) static inline uint64_t
call(trampoline_t *routine)
{
    const uint64_t *in = before;
#define R(name) register uint64_t name __asm__(#name); __asm__ volatile("" : "=r"(name) : "0"(*in++));
    REGISTERS
#undef R
    frame_before = FRAME;
    void *result = routine((void *)sent.ts, (void *)sent.frame, (int)sent.throwflag, evaluator);
    frame_after = FRAME;
    uint64_t *out = after;
#define R(name) __asm__ volatile("" : "=r"(*out++) : "0"(name));
    REGISTERS
#undef R
    return (uint64_t)result;
}

__attribute__((noinline)) static uint64_t
call_linked(void)
{
    return call(linked);
}

__attribute__((noinline)) static uint64_t
call_pointer(trampoline_t *routine)
{
    return call(routine);
}

static int
differs(const char *what, uint64_t expected, uint64_t found)
{
    if (expected != found) {
        printf("%s is %#llx, not %#llx\n", what, (long long)found, (long long)expected);
    }
    return expected != found;
}

static int
check_call(bool through_copy)
{
    for (int i = 0; i < num_registers; i++) {
        before[i] = random_bits();
    }
    sent = (struct call){random_bits(), random_bits(), (int)random_bits(), random_bits(), 0};
    received = (struct call){.result = sent.result};
    int failed = differs("result", sent.result, through_copy ? call_pointer((trampoline_t *)slot) : call_linked());
    failed |= differs("the frame pointer", (uintptr_t)frame_before, (uintptr_t)frame_after);
    for (int i = 0; i < num_registers; i++) {
        failed |= differs(names[i], before[i], after[i]);
    }
    failed |= differs("argument 1", sent.ts, received.ts);
    failed |= differs("argument 2", sent.frame, received.frame);
    failed |= differs("argument 3", sent.throwflag, received.throwflag);
    return failed | differs("the stack's misalignment", 0, received.cfa % __BIGGEST_ALIGNMENT__);
}

/* No old copy of a register stands where the trampoline is to save it. */
__attribute__((noinline)) static void
clean_stack(void)
{
    volatile uint64_t stack[128];
    for (int i = 0; i < 128; i++) {
        stack[i] = random_bits();
    }
}

int
main(int argc, char **argv)
{
    make_slots(1, &slot, &eh_frame);
    evaluator = evaluator_address;
    tell_ready();
    clean_stack();
    for (long calls = argc > 1 ? atol(argv[1]) : 1; calls > 0; calls--) {
        if (check_call(true) || check_call(false)) {
            return 1;
        }
    }
    return 0;
}

#endif
