"""Estimates of the memory of examples/gpt.py, compared with PyTorch's allocator on the phantom GPU.

    pip install accelerate
    python -m torchmem.phantom -- python -m experiments.estimators     # about a minute

PyTorch's MemTracker (torch.distributed._tools) adds up the tensors of a run in FakeTensorMode.
accelerate's `estimate-memory` is a formula of the parameters. Seconds are CPU seconds without
imports.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import gpt

GIB = 2**30
BATCH, SEED = 8, 0


def iterate(model: Any, optimizer: Any, steps: int, after_step: Callable[[], object]) -> None:
    """Run the training loop of examples/gpt.py."""
    for length in gpt.sequence_lengths(steps, SEED):
        tokens = torch.randint(gpt.VOCABULARY, (BATCH, length + 1), device="cuda")
        gpt.loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def new_model() -> tuple[Any, Any]:
    """Return the model of examples/gpt.py on the GPU, and its optimizer."""
    with torch.device("cuda"):
        model = gpt.GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def mem_tracker(steps: int) -> float:
    """Return the peak in bytes according to MemTracker."""
    with FakeTensorMode():
        model, optimizer = new_model()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            iterate(model, optimizer, steps, tracker.reset_mod_stats)
        peak: float = tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)]["Total"]
    return peak


def accelerate_formula() -> float:
    """Return the peak in bytes for bf16 training with Adam according to accelerate."""
    from accelerate.commands.estimate import estimate_training_usage

    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in gpt.GPT().parameters())
    peak: float = max(estimate_training_usage(4 * parameters, "bfloat16").values())
    return peak


def allocator(steps: int) -> tuple[float, float]:
    """Return peak allocated and peak reserved bytes of PyTorch's allocator."""
    iterate(*new_model(), steps, lambda: None)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def main() -> None:
    """Run all estimators and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="optimizer steps (default: %(default)s)"
    )
    steps = parser.parse_args().steps
    print("| estimator | of tensors | of the GPU | CPU s |\n|---|---|---|---|")
    rows: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("PyTorch's allocator on the phantom GPU", lambda: allocator(steps)),
        ("torch's MemTracker", lambda: (mem_tracker(steps),)),
        ("accelerate estimate-memory", lambda: (accelerate_formula(),)),
    )
    for name, estimate in rows:
        began = time.process_time()
        sizes = [f"{size / GIB:.2f} GiB" for size in estimate()] + ["unknown"]
        print(
            f"| {name} | {sizes[0]} | {sizes[1]} | {time.process_time() - began:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
