"""A short training on a GPU: the exporter agrees with PyTorch and the driver."""

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
exporter = [sys.executable, "-m", "torchmem.cli", "exporter", "--once"]
exported = subprocess.run(exporter, capture_output=True, text=True, check=True)
stats, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
print(json.dumps({"exposition": exported.stdout, "stats": stats, "total": total, "free": free}))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Run the script and return its output: the exposition, and PyTorch's statistics."""
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
    printed: dict[str, object] = json.loads(done.stdout)
    return printed


def values(output: dict[str, object], name: str) -> list[float]:
    """Return the values of a metric in the exposition."""
    families = text_string_to_metric_families(str(output["exposition"]))
    return [sample.value for family in families for sample in family.samples if sample.name == name]


def test_the_exporter_agrees_with_pytorch(output: dict[str, object]) -> None:
    """Allocated, reserved and their peaks equal `torch.cuda.memory_stats()`."""
    stats = output["stats"]
    assert isinstance(stats, dict)
    for name in ("allocated", "active", "reserved"):
        assert stats[f"{name}_bytes.all.current"] == sum(values(output, f"torchmem_{name}_bytes"))
        assert [stats[f"{name}_bytes.all.peak"]] == values(output, f"torchmem_{name}_peak_bytes")
    assert values(output, "torchmem_steps_total") == [4.0]


def test_nvml_memory_adds_up(output: dict[str, object]) -> None:
    """NVML is up, and on every GPU used + free + reserved = total."""
    assert values(output, "nvml_up") == [1.0]
    parts = [values(output, f"nvml_memory_{part}_bytes") for part in ("used", "free", "reserved")]
    assert values(output, "nvml_memory_total_bytes") == [
        sum(gpu) for gpu in zip(*parts, strict=True)
    ]


def test_nvml_and_cuda_agree_on_free_memory(output: dict[str, object]) -> None:
    """One GPU has the free memory of cudaMemGetInfo in NVML, up to what the join tolerates."""
    free = output["free"]
    assert isinstance(free, int)
    assert min(abs(free - nvml) for nvml in values(output, "nvml_memory_free_bytes")) <= 32 << 20


def test_the_process_is_joined_with_its_gpu(output: dict[str, object]) -> None:
    """The series of the process have the index of its GPU, which only the join knows."""
    assert any(
        "torchmem_allocated_peak_bytes{gpu=" in line
        for line in str(output["exposition"]).splitlines()
    )
