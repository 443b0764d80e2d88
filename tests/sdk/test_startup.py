"""What a script waits for at its start: the modules that `instrument()` imports."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

MODULES = 73
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
        "statistics",
        "torch",
        "torchmem.allocator.memory_map",
        "torchmem.explain.oom_report",
        "torchmem.explain.run_summary",
        "torchmem.explain.thresholds",
        "torchmem.explain.verdict",
        "torchmem.metrics.families",
        "torchmem.sdk.capture",
        "torchmem.sdk.oom.report_writer",
        "torchmem.sdk.parts",
        "torchmem.sdk.publish.endpoint",
        "torchmem.sdk.publish.sample_file",
        "torchmem.sdk.release.part",
        "urllib.request",
        "yaml",
    ],
)
def test_a_module_is_not_imported_at_the_start(module: str) -> None:
    """`instrument()` imports nothing that only an option, CUDA's start or an OOM needs."""
    assert module not in imported()


def test_the_start_imports_few_modules() -> None:
    """The number of torchmem's own modules does not grow by more than a tenth."""
    own = [module for module in imported() if module.startswith("torchmem")]

    assert "torchmem.sdk.session" in own
    assert len(own) <= 1.1 * MODULES, sorted(own)
