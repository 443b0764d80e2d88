"""What other estimators say of examples/gpt.py, beside what PyTorch's allocator does on the phantom GPU.

    pip install accelerate
    python -m torchmem.phantom -- python -m benchmarks.estimators     # about a minute

MemTracker is torch's own (torch.distributed._tools): it adds up the tensors of a run under FakeTensorMode. accelerate's
`estimate-memory` has a formula over the parameters. Seconds are CPU seconds, without the imports.
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
    """The loop of examples/gpt.py."""
    for length in gpt.sequence_lengths(steps, SEED):
        tokens = torch.randint(gpt.VOCABULARY, (BATCH, length + 1), device="cuda")
        gpt.loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def made() -> tuple[Any, Any]:
    """The model of examples/gpt.py on the card, and its optimizer."""
    with torch.device("cuda"):
        model = gpt.GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def tracked(steps: int) -> float:
    """Peak in bytes, by MemTracker."""
    with FakeTensorMode():
        model, optimizer = made()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            iterate(model, optimizer, steps, tracker.reset_mod_stats)
        peak: float = tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)]["Total"]
    return peak


def formula() -> float:
    """Peak in bytes for bf16 training with Adam, by accelerate."""
    from accelerate.commands.estimate import estimate_training_usage

    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in gpt.GPT().parameters())
    peak: float = max(estimate_training_usage(4 * parameters, "bfloat16").values())
    return peak


def allocator(steps: int) -> tuple[float, float]:
    """Peak allocated and peak reserved in bytes, by PyTorch's allocator."""
    iterate(*made(), steps, lambda: None)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def main() -> None:
    """Ask all and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="optimizer steps (default: %(default)s)"
    )
    steps = parser.parse_args().steps
    print("| estimator | of tensors | of the card | CPU s |\n|---|---|---|---|")
    rows: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("PyTorch's allocator on the phantom GPU", lambda: allocator(steps)),
        ("torch's MemTracker", lambda: (tracked(steps),)),
        ("accelerate estimate-memory", lambda: (formula(),)),
    )
    for name, ask in rows:
        began = time.process_time()
        sizes = [f"{size / GIB:.2f} GiB" for size in ask()] + ["says nothing"]
        print(
            f"| {name} | {sizes[0]} | {sizes[1]} | {time.process_time() - began:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
