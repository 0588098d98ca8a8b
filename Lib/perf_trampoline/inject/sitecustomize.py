"""In PYTHONPATH: starts perf_trampoline in an interpreter that has none, then the sitecustomize that this one hides."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start():
    import importlib.util

    package = os.path.dirname(_HERE)
    spec = importlib.util.spec_from_file_location(
        "perf_trampoline", os.path.join(package, "__init__.py"), submodule_search_locations=[package])
    sys.modules["perf_trampoline"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        import perf_trampoline.startup
    except Exception as error:      # a child may be another Python, which our extension does not fit
        del sys.modules["perf_trampoline"]
        print(f"perf trampoline: not in {sys.executable}: {error}", file=sys.stderr)


if "perf_trampoline" not in sys.modules and any(
        map(os.environ.get, ("PYTHON_PERF_ELF_SUPPORT", "PYTHON_PERF_JIT_SUPPORT", "PYTHONPERFSUPPORT"))):
    _start()

_path = sys.path[:]
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
_ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ModuleNotFoundError as _error:
    if _error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _ours
finally:
    sys.path[:] = _path
