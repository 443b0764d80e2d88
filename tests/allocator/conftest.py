"""Training on PyTorch's real CUDA allocator, on a phantom card, watched by the real exporter and Prometheus."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.stack import answers, free_port, prometheus, running
from support.training import Training
from support.waiting import until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PHANTOM = [sys.executable, str(ROOT / "phantom" / "run.py")]


def _missing() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed; run make test-allocator"
    import torch

    return None if torch.version.cuda else "this is not the CUDA build of PyTorch; run make test-allocator"


@pytest.fixture(autouse=True, scope="session")
def _cuda_build() -> None:
    """Skip the tier where PyTorch has no CUDA allocator."""
    reason = _missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts exporter, Prometheus and a script on a card of the given memory; all end with the test."""
    with ExitStack() as stack:

        def start(memory: str, every: int, *script: str, alloc_conf: str = "") -> Training:
            settings = {
                "TORCHMEM_RUN_DIR": str(tmp_path / "run"), "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
                "TORCHMEM_INTERVAL": "0.005", "TORCHMEM_SNAPSHOT_INTERVAL": "0.01", "TORCHMEM_SNAPSHOT_BUDGET": "1",
            }  # fmt: skip
            environment = os.environ | settings
            phantom = [*PHANTOM, "--memory", memory, "--"]
            address = f"127.0.0.1:{free_port()}"
            exporter = [sys.executable, "-m", "torchmem.exporter", "--listen", address]
            stack.enter_context(running([*phantom, *exporter], tmp_path / "exporter.log", environment))
            until(lambda: answers(f"http://{address}/-/healthy"), 60)
            watching = stack.enter_context(prometheus(tmp_path, address))
            checked = [sys.executable, str(HERE / "checkpoint.py"), str(tmp_path), str(every), *script]
            environment = environment | ({"PYTORCH_CUDA_ALLOC_CONF": alloc_conf} if alloc_conf else {})
            process = running([*phantom, *checked], tmp_path / "training.log", environment)
            return Training(stack.enter_context(process), watching, tmp_path)

        yield start
