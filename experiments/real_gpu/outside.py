"""Memory outside the allocator in parts, as it appears, beside what NVML counts for the process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from experiments.phantom_truth.operations import outside as outside_by_nvml
from experiments.real_gpu.figures import Figures
from experiments.real_gpu.processes_on_gpu import MIB, scraped_once

from torchmem import sdk

TOLERANCE = 32 * MIB
"""Between a read of the SDK and one of NVML."""

PUBLISHED_SECONDS = 1.0
"""After which the SDK has published the last step."""


def outside(figures: Figures) -> None:
    """Add one user of memory after the other, and note what each adds."""
    torch.zeros(1, device="cuda")
    context = outside_by_nvml()
    if context is None:
        figures.missing("context", "NVML does not count the memory of this process")
        return
    figures.add("context, with the first tensor", context, "bytes")
    session = sdk.instrument(interval=1e-6)
    training = Training()
    _note_parts(figures, training, context)
    for _ in range(3):
        training.step()
        session.lifetime.monitor.reader.next_read = 0.0
    time.sleep(PUBLISHED_SECONDS)
    _compare(figures)
    dist.destroy_process_group()


class Training:
    """A model of one layer with its optimizer."""

    def __init__(self) -> None:
        self._model = torch.nn.Linear(4096, 4096).cuda()
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)

    def step(self) -> None:
        """Train for one step."""
        self._model(torch.ones(64, 4096, device="cuda")).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _note_parts(figures: Figures, training: Training, before: int) -> None:
    bf16 = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    parts: dict[str, Callable[[], object]] = {
        "cuBLAS, with a first step": training.step,
        "cuBLASLt in bf16": lambda: bf16 @ bf16,
        "cuDNN, with a convolution": lambda: torch.nn.Conv2d(64, 64, 3).cuda()(
            torch.ones(8, 64, 56, 56, device="cuda")
        ),
        "cuSOLVER": lambda: torch.linalg.inv(torch.eye(256, device="cuda")),
        "cuFFT": lambda: torch.fft.fft(torch.ones(1024, 1021, device="cuda")),
        "a CUDA graph of 1,000 kernels": Graphs().capture,
        "NCCL, its first group": _first_group,
        "NCCL, a second group": lambda: _collective(dist.new_group([0], group_desc="second")),
    }
    for name, act in parts.items():
        act()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        now = outside_by_nvml()
        if now is None:
            figures.missing(name, "NVML does not count the memory of this process")
        else:
            figures.add(name, now - before, "bytes")
            before = now


def _compare(figures: Figures) -> None:
    """Compare what the SDK has published with NVML, and note what each group holds."""
    page = scraped_once()
    figures.close(
        "torchmem_outside_allocator_bytes",
        page.value("torchmem_outside_allocator_bytes"),
        outside_by_nvml(),
        absolute=TOLERANCE,
    )
    held = page.matching("torchmem_communicator_bytes")
    for labels, size in held.items():
        found = dict(labels)
        figures.add(f"group {found.get('group')}, {found.get('state')}", size, "bytes")
    if not held:
        figures.missing("torchmem_communicator_bytes", "this PyTorch tells nothing of its groups")


class Graphs:
    """CUDA graphs, which live as long as this object."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> None:
        """Capture many small kernels, and launch them."""
        number = torch.zeros(1, device="cuda")
        with torch.cuda.graph(self._graph):
            for _ in range(1000):
                number.add_(1)
        self._graph.replay()


def _first_group() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    _collective(None)


def _collective(group: object) -> None:
    dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=group)
