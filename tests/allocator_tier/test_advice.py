"""What the advice depends on is read from PyTorch's real allocator, autograd and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.phantom import run_on_phantom

from torchmem.explain.oom_report import OomReport, decode
from torchmem.explain.remedies import remedies
from torchmem.sample.run_directory import REPORT_SUFFIX

pytestmark = pytest.mark.allocator

PRELUDE = """
import torch
from torchmem import sdk
session = sdk.instrument(interval=0.02, history=True)
def take(mib): return torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")
def failing(call):
    try: call()
    except torch.OutOfMemoryError: return
    raise SystemExit("it fitted")
take(1)
"""
FOREACH = """
parameters = [torch.nn.Parameter(torch.empty(25 << 20, device="cuda")) for _ in range(8)]
optimizer = torch.optim.AdamW(parameters, foreach=True)
for parameter in parameters: parameter.grad = torch.ones_like(parameter)
failing(optimizer.step)
"""
LOADING = """
torch.save({number: take(100) for number in range(20)}, "checkpoint.pt")
failing(lambda: [take(2500), torch.load("checkpoint.pt")])
"""
KEPT = """
torch.save({number: take(100) for number in range(20)}, "checkpoint.pt")
state = torch.load("checkpoint.pt")
failing(lambda: take(2500))
"""
Failed = Callable[[str], OomReport]


@pytest.fixture
def failed(tmp_path: Path) -> Failed:
    """Runs a script on a GPU of 4 GiB; returns its report."""

    def run(body: str) -> OomReport:
        own = {
            "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
            "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
        }
        script = f"import os; os.chdir({str(tmp_path)!r})\n{PRELUDE}{body}"
        done = run_on_phantom("-c", script, memory="4GiB", environment=own)
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / "run").rglob(f"*{REPORT_SUFFIX}")
        return decode(path.read_bytes())

    return run


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_known(failed: Failed, enabled: bool) -> None:
    """The report has whether autograd recorded where the memory was requested."""
    report = failed(f"with torch.set_grad_enabled({enabled}): failing(lambda: take(5000))")

    assert report.gradients_enabled is enabled


def test_an_optimizer_that_copies_all_parameters(failed: Failed) -> None:
    """AdamW's temporary copies do not fit; without `foreach` they would."""
    assert "foreach=False" in remedies(failed(FOREACH))[0].lines[0]


def test_a_checkpoint_that_is_read_to_the_gpu(failed: Failed) -> None:
    """torch.load asks for memory where the tensors were when they were saved."""
    assert 'map_location="cpu"' in remedies(failed(LOADING))[0].lines[0]


def test_a_checkpoint_that_is_kept(failed: Failed) -> None:
    """The line that holds it is known to be one that has read a checkpoint."""
    report = failed(KEPT)

    assert report.lines
    assert report.lines.held[0].loads
    assert report.lines.held[0].bytes == 2000 << 20
