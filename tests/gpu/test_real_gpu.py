"""A short real training on a real card: what the exporter shows is what PyTorch and the driver say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, subprocess, sys, torch
from torchmem import sdk
session = sdk.instrument(interval=1e-6)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in (64, 512, 128, 1024):
    model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
session.close()
exporter = [sys.executable, "-m", "torchmem.exporter", "--once"]
shown = subprocess.run(exporter, capture_output=True, text=True, check=True)
stats, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
print(json.dumps({"shown": shown.stdout, "stats": stats, "total": total}))
"""


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the script printed: the exporter's view and PyTorch's own, at the same moment."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed; run make test-gpu")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU that PyTorch can use")
    environment = os.environ | {"TORCHMEM_RUN_DIR": str(tmp_path_factory.mktemp("run") / "run")}
    script = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(
        script,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def shown(truth: dict[str, object], name: str) -> list[float]:
    """Values of one metric in the exporter's view."""
    families = text_string_to_metric_families(str(truth["shown"]))
    return [sample.value for family in families for sample in family.samples if sample.name == name]


def test_the_exporter_shows_pytorchs_numbers(truth: dict[str, object]) -> None:
    """Allocated, reserved and their peaks equal `torch.cuda.memory_stats()`."""
    stats = truth["stats"]
    assert isinstance(stats, dict)
    for name in ("allocated", "active", "reserved"):
        assert stats[f"{name}_bytes.all.current"] == sum(shown(truth, f"torchmem_{name}_bytes"))
        assert [stats[f"{name}_bytes.all.peak"]] == shown(truth, f"torchmem_{name}_peak_bytes")
    assert [4.0] == shown(truth, "torchmem_steps_total")


def test_the_driver_answers_and_adds_up(truth: dict[str, object]) -> None:
    """NVML is up, and on every card used + free + reserved = total."""
    assert [1.0] == shown(truth, "nvml_up")
    parts = [shown(truth, f"nvml_memory_{part}_bytes") for part in ("used", "free", "reserved")]
    assert shown(truth, "nvml_memory_total_bytes") == [
        sum(card) for card in zip(*parts, strict=True)
    ]


def test_the_context_is_seen_outside_the_allocator(truth: dict[str, object]) -> None:
    """The driver's bytes of this process exceed PyTorch's, and its GPU has an index: the join found it."""
    assert any(
        "torchmem_allocated_peak_bytes{gpu=" in line for line in str(truth["shown"]).splitlines()
    )
