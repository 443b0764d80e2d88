"""Steps, phases, and peaks of a real PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.allocator

MIB = 1 << 20


def test_reset_peaks_is_invisible_to_the_user(
    run: Callable[..., Any], series: Callable[..., Any]
) -> None:
    """Phases are exact, and PyTorch's functions return peaks as if they were not reset."""
    done = run("""
session = sdk.instrument(interval=1e-6, reset_peaks=True)
def use(mib): torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
use(500); session.step()
with session.phase("forward"): use(200)
with session.phase("backward"): use(300)
peaks = torch.cuda.max_memory_allocated(), torch.accelerator.max_memory_allocated()
torch.cuda.reset_peak_memory_stats(); use(50)
print([peak >> 20 for peak in (*peaks, torch.cuda.max_memory_allocated(0))])
""")

    assert (done.returncode, done.stdout) == (0, "[500, 500, 50]\n"), done.stderr
    phases = {
        labels["phase"]: value for labels, value in series("torchmem_phase_allocated_peak_bytes")
    }
    assert phases == {"forward": 200.0 * MIB, "backward": 300.0 * MIB}
    assert [value for _, value in series("torchmem_allocated_peak_bytes")] == [500.0 * MIB]


def test_steps_of_ordinary_loops_count_themselves(
    run: Callable[..., Any], series: Callable[..., Any]
) -> None:
    """Two optimizers in turn, and LBFGS with its closures, count one step per iteration."""
    done = run("""
sdk.instrument(interval=1e-6)
def model(): return torch.nn.Linear(8, 8).cuda()
a, b, c = model(), model(), model()
first, second = torch.optim.AdamW(a.parameters()), torch.optim.SGD(b.parameters(), lr=0.1)
def loss(m): return m(torch.zeros(4, 8, device="cuda")).sum()
for _ in range(4):
    loss(a).backward(); first.step(); loss(b).backward(); second.step()
lbfgs = torch.optim.LBFGS(c.parameters(), max_iter=3)
def closure():
    lbfgs.zero_grad(); value = loss(c); value.backward(); return value
for _ in range(3): lbfgs.step(closure)
""")

    assert (done.returncode, done.stderr) == (0, "")
    assert [value for _, value in series("torchmem_steps_total")] == [7.0]
