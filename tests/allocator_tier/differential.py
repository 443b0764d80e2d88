"""Run random programs on PyTorch's allocator and on the simulator, and compare both.

PYTORCH_CUDA_ALLOC_CONF=CONF python -m torchmem.phantom --memory BYTES -- \\
    python differential.py SETTING OPERATIONS SEED
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.allocator_programs import SETTINGS, Operation, Outcome, Programmer, Simulated
from support.real_allocator import Real

from torchmem.simulator.blocks import block_order

LAYOUT_EVERY = 20
COUNTED = (
    "num_ooms",
    "num_alloc_retries",
    "num_oom_rejections",
    "num_device_alloc",
    "num_device_free",
)


def differing(path: str, real: Any, simulated: Any) -> list[str]:
    """Return where two structures differ: path, PyTorch's value, the simulator's value."""
    if real == simulated:
        return []
    if isinstance(real, dict) and isinstance(simulated, dict):
        keys = real.keys() | simulated.keys()
        return [
            line
            for key in keys
            for line in differing(f"{path}.{key}", real.get(key), simulated.get(key))
        ]
    return [f"{path}: PyTorch {real}, simulator {simulated}"]


def same_outcome(real: Outcome, simulated: Outcome) -> bool:
    """Return whether both returned the same address, or failed with the same numbers."""
    if isinstance(real, str) and isinstance(simulated, str):
        return real.startswith(simulated)
    return real == simulated


class Comparison:
    """Both allocators, running the same program."""

    def __init__(self, name: str, seed: int) -> None:
        setting, order = SETTINGS[name], block_order(torch.__version__)
        assert order is not None
        self.programmer = Programmer(setting, random.Random(f"{name} {seed}"))
        self.real, self.simulated = Real(setting), Simulated(setting, order)
        self.is_older = order != "segment"  # than 2.13, so some statistics are missing
        self.events: Counter[str] = Counter()
        self._before: dict[str, Any] = self.real.stats()

    def step(self, number: int) -> list[str]:
        """Run one operation on both; return the differences."""
        operation = self.programmer.next()
        outcome = self.real.run(operation)
        self.programmer.learn(operation, outcome)
        self.simulated.gpu.newest_range = self.real.newest_range()
        simulated = self.simulated.run(operation)
        if not same_outcome(outcome, simulated):
            return [f"{operation}: PyTorch {outcome}, simulator {simulated}"]
        return self._state(operation, layout=number % LAYOUT_EVERY == 0 or isinstance(outcome, str))

    def _state(self, operation: Operation, *, layout: bool) -> list[str]:
        before, self._before = self._before, self.real.stats()
        counted = [name for name in COUNTED if name in before]
        self.events.update({name: max(0, self._before[name] - before[name]) for name in counted})
        simulated = self.simulated.stats()
        for name in simulated.keys() - before.keys() if self.is_older else ():
            del simulated[name]
        differences = differing("stats", self._before, simulated)
        if layout:
            differences += differing("driver", self.real.driver(), self.simulated.driver())
            real = {segment["address"]: segment for segment in self.real.snapshot()}
            shown = {segment["address"]: segment for segment in self.simulated.snapshot()}
            differences += differing("segments", real, shown)
        return [f"after {operation}: {difference}" for difference in differences]


def main() -> None:
    """Compare up to the first difference; print counts and differences as JSON."""
    name, operations, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    comparison = Comparison(name, seed)
    done, differences = 0, list[str]()
    while done < operations and not differences:
        differences = comparison.step(done)
        done += 1
    result = {"operations": done, "differences": differences[:10], **comparison.events}
    print(json.dumps(result), flush=True)
    os._exit(0)  # PyTorch 2.13 aborts on releasing private pools of expandable segments


if __name__ == "__main__":
    main()
