"""Flat buffers that gradients are views of, such as the buckets of DistributedDataParallel.

With `gradient_as_bucket_view=True` they outlive the gradients: `zero_grad` drops the views, and the
next backward pass makes new ones of the same buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchmem.allocator.backend import Storages, TensorCounter, WeakStorage
from torchmem.sdk.components.tracked import Clock
from torchmem.sdk.safety.cost import CHANGE_BUDGET


class GradientBuckets:
    """The buffers that held gradients at the end of a step, as long as they exist.

    `is_current`: whether the latest step's are known. `clock`: the CPU time of this thread.
    """

    def __init__(self, counter: TensorCounter, clock: Clock = time.thread_time) -> None:
        self.is_current = True
        self._counter = counter
        self._clock = clock
        self._known: Sequence[WeakStorage] = ()
        self._due = 0.0

    def look(
        self, now: float, sampled: Sequence[Any], parameters: Callable[[], Iterable[Any]]
    ) -> None:
        """Look for buffers at a step's end, if the buffers of a few `sampled` parameters changed.

        DistributedDataParallel makes new ones in the second step; the old ones may still exist.
        """
        found, needed = self._found(self._known), self._found(self._viewed(sampled))
        if found.keys() >= needed.keys():
            self.is_current = True
            return
        self._known, self.is_current = (), now >= self._due
        if self.is_current:
            started = self._clock()
            self._known = self._viewed(parameters())
            self._due = now + (self._clock() - started) / CHANGE_BUDGET

    def _viewed(self, parameters: Iterable[Any]) -> Sequence[WeakStorage]:
        return self._counter.viewed_storages(parameters)

    @staticmethod
    def _found(storages: Iterable[WeakStorage]) -> dict[int, int]:
        """Return bytes by address."""
        found: Storages = {}
        for storage in storages:
            storage.add(found)
        return {address: size for sizes in found.values() for address, size in sizes.items()}

    def add(self, found: Storages) -> None:
        """Add the buffers that still exist."""
        for known in self._known:
            known.add(found)
