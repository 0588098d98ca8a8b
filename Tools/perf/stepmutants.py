"""Check the step check: mutants of every source, of its rows and of its FDE, none of which may pass.

A mutant of the rows is judged by the trace of the real trampoline.  One of the code is assembled, gets a header of its
own, is compiled, stepped and called.  It is dead when the generator refuses it, or when the step check or the ABI check
has something to say.  One whose rows and code are the same in the end is counted apart.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile

import archs
import gen_eh_frame as gen
from stepcheck import WORD, Lost, Stub, abi_problem, judge, step

CALLS = 1000        # of the ABI check, for each


def source_mutants(arch, text):
    """(what, source, whether code is touched): each directive dropped, moved, altered; each instruction dropped."""
    lines = text.splitlines()
    body = range(lines.index("    TRAMPOLINE_START") + 1, lines.index("    TRAMPOLINE_END"))
    code = [i for i in body if lines[i].strip() and not lines[i].strip().startswith(".")]
    directives = {i: re.split(r",? +", lines[i].strip()) for i in body if lines[i].strip().startswith(".cfi_")}
    named = {word for _, *operands in directives.values() for word in operands if not re.fullmatch(r"-?\d+", word)}
    names = named | {name for name in arch.callee_saved if f"%{name}" not in named}

    def source(*lines):
        return "\n".join([*lines, ""])

    for i in code:
        yield f"{lines[i].strip()} (line {i + 1}) dropped", source(*lines[:i], *lines[i + 1:]), True
    for i, (directive, *operands) in directives.items():
        what = f"{lines[i].strip()} (line {i + 1})"
        yield f"{what} dropped", source(*lines[:i], *lines[i + 1:]), False
        if before := [j for j in code if j < i]:
            j = before[-1]
            yield f"{what} moved up", source(*lines[:j], lines[i], *lines[j:i], *lines[i + 1:]), False
        if behind := [j + 1 for j in code if j > i]:
            j = behind[0]
            yield f"{what} moved down", source(*lines[:i], *lines[i + 1:j], lines[i], *lines[j:]), False
        for at, word in enumerate(operands):
            others = names - {word} if word in named else {f"{int(word) - WORD}", f"{int(word) + WORD}"}
            for other in sorted(others):
                changed = ", ".join([*operands[:at], other, *operands[at + 1:]])
                yield f"{what}: {changed}", source(*lines[:i], f"{directive} {changed}", *lines[i + 1:]), False


def frame_mutants(arch, trace):
    """(what, Frame): each row dropped, moved, altered; column, address and range off."""
    frame, replace = trace.frame, dataclasses.replace
    offsets = sorted(moment.pc - trace.start for moment in trace.steps)
    registers = {frame.ra_column, *arch.callee_saved.values(),
                 *(register.dwarf for register in (arch.sp, arch.fp, arch.ra) if register)}
    for i, row in enumerate(frame.rows):
        at = offsets.index(row.offset)
        base, offset = row.cfa
        changes = [{"offset": to} for to in [*offsets[max(at - 1, 0):at], *offsets[at + 1:at + 2], row.offset + 1]]
        changes += [{"cfa": (other, offset)} for other in registers - {base}]
        changes += [{"cfa": (base, offset + by)} for by in (-WORD, -1, 1, WORD)]
        changes += [{"registers": row.registers | {other: -WORD}} for other in registers - set(row.registers)]
        for register, slot in row.registers.items():
            rest = {other: row.registers[other] for other in row.registers if other != register}
            changes += [{"registers": rest}]
            changes += [{"registers": rest | {other: slot}} for other in registers - set(row.registers)]
            changes += [{"registers": rest | {register: slot + by}} for by in (-WORD, -1, 1, WORD)]
        yield f"{row} dropped", replace(frame, rows=frame.rows[:i] + frame.rows[i + 1:])
        for change in changes:
            rows = [*frame.rows[:i], replace(row, **change), *frame.rows[i + 1:]]
            yield f"{row} with {change}", replace(frame, rows=rows)
    for column in registers - {frame.ra_column}:
        yield f"return-address column {column}", replace(frame, ra_column=column)
    slot_size = -(-trace.size // 16) * 16
    for by in 1, 4, WORD, slot_size, -1, -4, -WORD, -slot_size:
        yield f"initial_location {by:+}", replace(frame, start=frame.start + by)
        yield f"address_range {by:+}", replace(frame, size=frame.size + by)


def same(trace, frame):
    """Whether an unwinder reads at every address, near ones too, what it reads in the frame as it is."""
    def view(frame):
        rows = [frame.row(trace.start + offset) for offset in range(-16, trace.size + 16)]
        return frame.ra_column, [row and (row.cfa, row.registers) for row in rows]
    return view(frame) == view(trace.frame)


def source_tree(build, source):
    """A source tree, as far as generator and compiler read it, with another text for the .S."""
    tree = pathlib.Path(tempfile.mkdtemp(dir=build.scratch))
    (tree / "Include/internal").mkdir(parents=True)
    (tree / "Python").mkdir()
    for path in gen.ROOT.glob("Include/internal/*.h"):
        (tree / "Include/internal" / path.name).symlink_to(path)
    (tree / build.arch.source).write_text(source)
    return tree


def with_header(mutant, arch, tree):
    """The tree, with the header that the generator makes of the mutant."""
    path = tree / arch.header
    path.unlink()
    path.write_text(gen.header(mutant, arch))
    return tree


def fate(build, trace, trampoline, source, touches_code):
    """'refused', 'judged' or 'called', whoever found the mutant out; 'same'; or 'survived'."""
    tree = source_tree(build, source)
    try:
        mutant = gen.build(build.arch, tree)
    except archs.Refusal:
        return "refused"
    if mutant.listing() == trampoline.listing():
        return "same"
    if not touches_code:
        frame = dataclasses.replace(trace.frame, ra_column=mutant.eh_frame.ra_column, rows=mutant.eh_frame.rows)
        return "judged" if any(judge(build.arch, trace, frame)) else "survived"
    if not mutant.code.startswith(build.entry_hint()):
        return "judged"
    program = build.program(with_header(mutant, build.arch, tree))
    try:
        if any(step(Stub, build, program, mutant)[1]):
            return "judged"
    except Lost:
        return "judged"
    return "called" if abi_problem(build, program, CALLS) else "survived"


def mutate(build, trace, trampoline):
    """A Counter of fates, and who survived."""
    fates = {}
    for what, frame in frame_mutants(build.arch, trace):
        fates[what] = ("same" if same(trace, frame) else
                       "judged" if any(judge(build.arch, trace, frame)) else "survived")
    for what, source, touches_code in source_mutants(build.arch, (gen.ROOT / build.arch.source).read_text()):
        fates[what] = fate(build, trace, trampoline, source, touches_code)
    return collections.Counter(fates.values()), [what for what in fates if fates[what] == "survived"]
