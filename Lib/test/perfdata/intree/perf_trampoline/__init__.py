"""In place of the package where the core is the interpreter's own: what tests ask of it, and nothing switched."""

import sys
from pathlib import Path

import _perf_trampoline as _core

__path__.append(str(Path(__file__).resolve().parents[4] / "perf_trampoline"))       # for perf_trampoline.images
sys.modules[__name__ + "._perf_trampoline"] = _core
BACKENDS = ("perf", "perf_jit", "perf_elf")
activate = sys.activate_stack_trampoline
deactivate = sys.deactivate_stack_trampoline
is_active = sys.is_stack_trampoline_active


def status():
    return _core.status() | {"unavailable": _core.unavailable(), "filter": _core.get_filter()}
