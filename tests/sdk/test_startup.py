"""The modules that `instrument()` imports, and that nothing is imported while the script trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

MODULES = 150
"""torchmem's modules at the start, on the day they were counted."""

SCRIPT = """
import sys, tempfile
from torchmem import sdk
from torchmem.allocator.backend import Backend

class Idle(Backend):
    def is_initialized(self): return False
    def devices(self): return []
    def memory_stats(self, device): return None
    def memory_snapshot(self): return None
    def call_soon(self, call): pass

sdk.instrument(backend=Idle(), run_dir=tempfile.mkdtemp())
print(*sys.modules)
"""


@cache
def imported() -> frozenset[str]:
    """Return the modules in a process that called `instrument()` before CUDA started."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    return frozenset(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "asyncio",
        "email",
        "http",
        "importlib.metadata",
        "msgspec",
        "multiprocessing",
        "opentelemetry",
        "prometheus_client",
        "psutil",
        "pynvml",
        "ssl",
        "torch",
        "torchmem.explain.thresholds",
        "torchmem.metrics.families",
        "torchmem.sdk.publish.endpoint",
        "urllib.request",
        "yaml",
    ],
)
def test_a_module_is_not_imported_at_the_start(module: str) -> None:
    """`instrument()` imports nothing that only an option needs."""
    assert module not in imported()


def test_the_start_imports_few_modules() -> None:
    """The number of torchmem's own modules does not grow by more than a tenth."""
    own = [module for module in imported() if module.startswith("torchmem")]

    assert "torchmem.sdk.session" in own
    assert len(own) <= 1.1 * MODULES, sorted(own)


def test_nothing_is_imported_or_compiled_once_cuda_starts(
    run_script: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    """Nothing that happens after `instrument()` imports a module, and no step compiles a pattern.

    A profiler with stacks would record each Python call of that work: 53,000 until the second step,
    for which `torch.profiler` of PyTorch 2.13 takes 18 s.
    """
    done = run_script("""
import atexit
SLOW = {"<frozen importlib._bootstrap>", "_parser.py", "sre_parse.py"}  # of import and re.compile
files = set()
backend = SimulatedBackend([allocator], initialized=False)
atexit.register(lambda: print(sorted(sys.modules.keys() - modules)))
sdk.instrument(backend=backend)
modules = set(sys.modules)
sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
backend.init()
allocator.malloc(1 << 20)
for _ in range(3):
    backend.step()
    time.sleep(0.1)
try:
    allocator.malloc(2 << 30)
except OutOfMemoryError:
    sys.setprofile(None)
    print({os.path.basename(file) for file in files} & SLOW)
    raise RuntimeError("CUDA error: out of memory") from None  # of a library, too
""")

    assert (done.returncode, done.stdout) == (1, "set()\n[]\n"), done.stderr
    assert "torchmem why" in done.stderr  # below the traceback
