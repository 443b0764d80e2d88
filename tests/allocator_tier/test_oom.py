"""Each cause of an OutOfMemoryError on PyTorch's real allocator, and the report of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.phantom import run_on_phantom, torch_server

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import OomReport, decode
from torchmem.sample.run_directory import REPORT_SUFFIX

pytestmark = pytest.mark.allocator

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import ctypes, subprocess, sys, torch
from torchmem import sdk
session = sdk.instrument(interval=0.02, snapshot_interval=0.02, snapshot_budget=1.0)
def take(mib): return torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")
def fail(mib):
    try: take(mib)
    except torch.OutOfMemoryError as error: print(error)
    else: sys.exit("it fitted")
take(1)
"""
INTERLEAVED = """
held = [take(mib) for _ in range(160) for mib in (8, 12)]
del held[::2]
fail(900)
"""
EXPANDABLE = """
held = [take(mib) for _ in range(160) for mib in (19, 2)]
del held[::2]
fail(2000)
"""
SIDE_STREAM = """
with torch.cuda.stream(torch.cuda.Stream()):
    large = take(800); del large
    pin = take(2); large = take(700); del large
rest = take(2700)
fail(100)
"""
PRIVATE_POOL = """
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    kept = take(1000); del kept
rest = take(2400)
fail(600)
"""
PENDING = """
large = take(3000); del large
pin, tensor = take(2), take(2500)
tensor.record_stream(torch.cuda.Stream())
ctypes.CDLL(None).phantom_hold_events(1)
del tensor
fail(2400)
"""
SMALL_SEGMENT = """
held = [take(mib) for _ in range(179) for mib in (8, 2, 8, 2)]
del held[1::2]
fail(3)
"""
LIMITED = """
torch.cuda.set_per_process_memory_fraction(0.25)
held = take(800)
fail(600)
"""
NEIGHBOR = """
code = (
    "import torch; x = torch.empty(2500 << 20, dtype=torch.uint8, device='cuda');"
    "print(flush=True); input()"
)
with subprocess.Popen([*sys.argv[1:], "-c", code], stdin=-1, stdout=-1) as other:
    other.stdout.read(1)
    fail(1000)
    other.communicate(b"\\n")
"""
CASES: dict[str, tuple[str, str, str | None]] = {
    "capacity": ("held = [take(1000) for _ in range(3)]; fail(1000)", "capacity", None),
    "larger than the GPU": ("fail(5000)", "capacity", None),
    "stranded": (INTERLEAVED, "fragmentation", "stranded"),
    "expandable": (EXPANDABLE, "fragmentation", "stranded"),
    "stream": (SIDE_STREAM, "fragmentation", "stream"),
    "private pool": (PRIVATE_POOL, "fragmentation", "pool"),
    "pending": (PENDING, "pending", None),
    "small segment": (SMALL_SEGMENT, "fragmentation", "small_segment"),
    "limit": (LIMITED, "limit", None),
    "external": (NEIGHBOR, "external", None),
}
Failing = Callable[[str, str], tuple[str, OomReport]]


@pytest.fixture
def failing(tmp_path: Path) -> Failing:
    """Runs a script on a GPU of 4 GiB; returns PyTorch's error, as printed, and the report."""

    def run(body: str, conf: str) -> tuple[str, OomReport]:
        own = {
            "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
            "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
        }
        environment = own | {"PYTORCH_CUDA_ALLOC_CONF": conf}
        program = "-c", PRELUDE + body, *torch_server().python()  # the last ones for NEIGHBOR
        done = run_on_phantom(*program, memory="4GiB", environment=environment)
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / "run").rglob(f"*{REPORT_SUFFIX}")
        return done.stdout, decode(path.read_bytes())

    return run


@pytest.mark.parametrize("case", CASES)
def test_every_cause_agrees_with_pytorchs_own_text(failing: Failing, case: str) -> None:
    """The report has the right cause and kind, and each number of PyTorch's error text."""
    body, cause, detail = CASES[case]
    error, report = failing(body, "expandable_segments:True" if case == "expandable" else "")
    allocator = report.device.allocator

    assert (cause, detail) == (report.oom.cause, report.oom.detail)
    assert allocator is not None
    assert report.oom.requested_bytes is not None
    assert [format_size(report.oom.requested_bytes)] == _sizes(error, "Tried to allocate {}")
    assert [format_size(report.device.total_bytes or 0)] == _sizes(error, "total capacity of {}")
    assert [format_size(report.driver_free_bytes)] == _sizes(error, "of which {} is free")
    assert ([] if report.limit_bytes is None else [format_size(report.limit_bytes)]) == _sizes(
        error, "{} allowed;"
    )
    private = report.layout.private_free_bytes if report.layout else 0
    allocated = allocator.allocated_bytes.total + private
    assert [format_size(allocated)] == _sizes(error, "{} is allocated by PyTorch")
    assert [format_size(allocator.reserved_bytes.total - allocated)] == _sizes(
        error, "{} is reserved by PyTorch but"
    )


def _sizes(text: str, phrase: str) -> list[str]:
    """Return the sizes in all occurrences of the phrase; PyTorch calls 1 GiB 1024.00 MiB."""
    text = text.replace("1024.00 MiB", "1.00 GiB")
    return re.findall(phrase.format(r"([\d.]+ (?:bytes|KiB|MiB|GiB))"), text)
