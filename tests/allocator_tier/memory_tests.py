"""Tests that pytest runs on a phantom GPU, for test_memory_tests.py; torch is imported in each."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20
HAS_GPU = "libphantom" in os.environ.get("LD_PRELOAD", "")
"""As torch.cuda.is_available() at import: only where measured tests run."""


def layers(number: int = 4) -> Any:
    import torch

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(512, 2048)
            self.down = torch.nn.Linear(2048, 512)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.relu(self.up(x)))

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(number))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model()


def train(model: Any, steps: int = 2) -> None:
    import torch

    rows = int(os.environ.get("ROWS", "1024"))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.zeros(rows, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu_memory(peak="1 GiB")
def test_peak_is_pytorchs(gpu_memory: Any) -> None:
    import torch

    with gpu_memory(peak="1 GiB") as used:
        train(layers().cuda())
    assert used.peak == torch.cuda.max_memory_allocated()
    assert used.reserved == torch.cuda.max_memory_reserved()
    assert sum(used.components.values()) == used.peak
    assert used.components["optimizer_state"] >= 2 * used.components["parameters"]
    assert any(name.startswith("layers.*") for name in used.modules)
    assert gpu_memory.is_phantom


def test_a_block_has_a_peak_of_its_own(gpu_memory: Any) -> None:
    import torch

    torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    with gpu_memory() as used:
        kept = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert (used.peak, used.leaked, kept.numel()) == (100 * MIB, 100 * MIB, 100 * MIB)


def test_resets_of_the_test_hide_no_peak(gpu_memory: Any) -> None:
    import torch

    with gpu_memory() as used:
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.reset_peak_memory_stats()
    assert used.peak == 100 * MIB


@pytest.mark.gpu_memory(peak="30 MiB")
def test_fails_above_its_limit() -> None:
    train(layers().cuda())


@pytest.mark.gpu_memory(leak="1 MiB")
def test_fails_with_a_leak(request: Any) -> None:
    import torch

    request.config.kept = torch.empty(8 * MIB, device="cuda")


@pytest.mark.gpu_memory
def test_fails_because_of_values() -> None:
    import torch

    total = torch.randn(3, device="cuda").sum().item()
    assert total != 0


@pytest.mark.gpu_memory
def test_fails_killed() -> None:
    os.kill(os.getpid(), 9)


@pytest.mark.gpu_memory
def test_fails_by_an_early_exit() -> None:
    os._exit(3)


@pytest.mark.gpu_memory
def test_fails_without_its_descriptors() -> None:
    import torch

    os.closerange(3, 4096)
    files = [Path(os.devnull).open("rb") for _ in range(40)]  # noqa: SIM115 - they take the numbers
    assert torch.zeros(4, device="cuda").is_cuda
    assert len(files) == 40


@pytest.mark.gpu_memory
def test_forks() -> None:
    if not os.fork():
        os._exit(0)


@pytest.mark.gpu_memory
@pytest.mark.skipif("not __import__('torch').cuda.is_available()")
def test_conditions_see_the_phantom() -> None:
    import torch

    assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-40GB (phantom)"


@pytest.mark.gpu_memory
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_a_condition_at_import_is_that_of_the_phantom() -> None:
    pass


if not HAS_GPU:

    @pytest.mark.gpu_memory
    def test_fails_missing_on_the_phantom() -> None:
        pass


@pytest.mark.gpu_memory
def test_varies() -> None:
    import torch

    torch.empty(random.randrange(1, 2**10) * MIB, dtype=torch.uint8, device="cuda")


def test_others_run_without_a_gpu() -> None:
    assert "libphantom" not in os.environ.get("LD_PRELOAD", "")
    assert "PHANTOM_MEMORY" not in os.environ
    assert Path.cwd().is_dir()
