"""Free blocks in the order of their size, then of the age of their segment, then of their address.

Source: `BlockComparatorSizeCounterAddress`, PyTorch 2.13 (pytorch/pytorch#183591).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmem.simulator.blocks import Block

ADDRESS_BITS = 48
"""A CUDA address fits: size, age and address together sort as one integer, which is cheaper than a tuple."""
SIZE_SHIFT = ADDRESS_BITS + 32
"""2^32 segments may come before the age of a segment reaches into its blocks' size."""
LONGEST_RUN = 2048
"""A longer run of sorted keys is cut in two: no insertion moves more keys than this."""


@dataclass(slots=True, eq=False)
class FreeBlocks:
    """Free blocks of one pool and one stream: `runs` of sorted keys, with the `last` key of each run."""

    runs: list[list[int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)

    def insert(self, block: Block) -> None:
        """Add a free block."""
        key = block.size << SIZE_SHIFT | block.registration_counter << ADDRESS_BITS | block.address
        self.blocks[key] = block
        index = bisect_left(self.last, key)
        if index == len(self.last):
            self._append(key)
            return
        run = self.runs[index]
        insort(run, key)
        if len(run) > LONGEST_RUN:
            self._cut(index)

    def erase(self, block: Block) -> None:
        """Remove a block that is in here, with the size and address under which it came in."""
        key = block.size << SIZE_SHIFT | block.registration_counter << ADDRESS_BITS | block.address
        index = bisect_left(self.last, key)
        self._pop(index, bisect_left(self.runs[index], key))

    def pop_best_fit(self, size: int) -> Block | None:
        """Remove and return the smallest block that holds `size` bytes, that of the oldest segment among equals."""
        key = size << SIZE_SHIFT
        index = bisect_left(self.last, key)
        if index == len(self.last):
            return None
        return self._pop(index, bisect_left(self.runs[index], key))

    def at_least(self, size: int) -> Iterator[Block]:
        """The blocks that hold `size` bytes, the best fit first; they must not change meanwhile."""
        key = size << SIZE_SHIFT
        index = bisect_left(self.last, key)
        if index < len(self.last):
            run = self.runs[index]
            yield from map(self.blocks.__getitem__, run[bisect_left(run, key) :])
        for run in self.runs[index + 1 :]:
            yield from map(self.blocks.__getitem__, run)

    def __iter__(self) -> Iterator[Block]:
        return self.at_least(0)

    def _pop(self, index: int, position: int) -> Block:
        run = self.runs[index]
        key = run.pop(position)
        if not run:
            del self.runs[index], self.last[index]
        elif position == len(run):
            self.last[index] = run[-1]
        return self.blocks.pop(key)

    def _append(self, key: int) -> None:
        """Add the largest key of all."""
        if not self.last or len(self.runs[-1]) == LONGEST_RUN:
            self.runs.append([key])
            self.last.append(key)
        else:
            self.runs[-1].append(key)
            self.last[-1] = key

    def _cut(self, index: int) -> None:
        run, half = self.runs[index], LONGEST_RUN // 2
        self.runs[index : index + 1] = [run[:half], run[half:]]
        self.last.insert(index, run[half - 1])
