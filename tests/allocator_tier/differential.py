"""Run random programs on PyTorch's allocator and on the simulated one, and compare them after every operation.

PYTORCH_CUDA_ALLOC_CONF=CONF python -m torchmem.phantom --memory BYTES -- python differential.py SETTING OPERATIONS SEED
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.allocator_programs import SETTINGS, Operation, Outcome, Programmer, Simulated
from support.real_allocator import Real

LAYOUT_EVERY = 20
COUNTED = (
    "num_ooms",
    "num_alloc_retries",
    "num_oom_rejections",
    "num_device_alloc",
    "num_device_free",
)


def differing(path: str, real: Any, simulated: Any) -> list[str]:
    """Where two structures differ: path, PyTorch's value, ours."""
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
    """Whether both gave the same address, or refused with the same numbers in the text."""
    if isinstance(real, str) and isinstance(simulated, str):
        return real.startswith(simulated)
    return real == simulated


class Comparison:
    """Both allocators side by side."""

    def __init__(self, name: str, seed: int) -> None:
        setting = SETTINGS[name]
        self.programmer = Programmer(setting, random.Random(f"{name} {seed}"))
        self.real, self.simulated = Real(setting), Simulated(setting)
        self.events: Counter[str] = Counter()
        self._before: dict[str, Any] = self.real.stats()

    def step(self, number: int) -> list[str]:
        """One operation on both; what differs after it."""
        operation = self.programmer.next()
        outcome = self.real.run(operation)
        self.programmer.learn(operation, outcome)
        self.simulated.card.newest_range = self.real.newest_range()
        ours = self.simulated.run(operation)
        if not same_outcome(outcome, ours):
            return [f"{operation}: PyTorch {outcome}, simulator {ours}"]
        return self._state(operation, layout=number % LAYOUT_EVERY == 0 or isinstance(outcome, str))

    def _state(self, operation: Operation, *, layout: bool) -> list[str]:
        before, self._before = self._before, self.real.stats()
        self.events.update({name: max(0, self._before[name] - before[name]) for name in COUNTED})
        differences = differing("stats", self._before, self.simulated.stats())
        if layout:
            differences += differing("driver", self.real.driver(), self.simulated.driver())
            theirs = {segment["address"]: segment for segment in self.real.snapshot()}
            ours = {segment["address"]: segment for segment in self.simulated.snapshot()}
            differences += differing("segments", theirs, ours)
        return [f"after {operation}: {difference}" for difference in differences]


def main() -> None:
    """Compare until something differs; print what was done and what differs as JSON."""
    name, operations, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    comparison = Comparison(name, seed)
    done, differences = 0, list[str]()
    while done < operations and not differences:
        differences = comparison.step(done)
        done += 1
    print(
        json.dumps({"operations": done, "differences": differences[:10], **comparison.events}),
        flush=True,
    )
    # PyTorch 2.13 aborts when it takes down private pools of expandable segments.
    os._exit(0)


if __name__ == "__main__":
    main()
