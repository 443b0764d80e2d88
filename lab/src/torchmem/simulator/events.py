"""Freed blocks that wait for the other streams that used them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmem.simulator.blocks import Block, PrivatePool
from torchmem.simulator.gpu import SimulatedGpu


@dataclass(slots=True, eq=False)
class OutstandingEvents:
    """The events of freed blocks, in order for each stream (PyTorch's `cuda_events`).

    The simulated driver completes events at once, or, after `SimulatedGpu.hold_events(True)`, not
    before they are released. A block whose last event is complete is passed to `free_block`.

    Streams are processed in the order of their numbers. PyTorch uses the order of a hash of the
    stream's id; that affects only how `inactive_split` rises and falls while blocks of several
    streams become free in one call.
    """

    gpu: SimulatedGpu
    free_block: Callable[[Block], None]
    cuda_events: dict[int, deque[Block]] = field(default_factory=dict)

    def insert_events(self, block: Block) -> None:
        """Record an event on each stream that used the block."""
        streams, block.stream_uses = block.stream_uses or set(), None
        for stream in streams:
            block.event_count += 1
            self.cuda_events.setdefault(stream, deque()).append(block)

    def process_events(self) -> None:
        """Free the blocks whose events are complete."""
        if not self.gpu.events_held:
            self._complete_all()

    def synchronize_and_free_events(self, pool: PrivatePool | None = None) -> None:
        """Wait for all events, or for those of one private pool, and free their blocks."""
        self._complete_all(pool)

    def complete(self, block: Block) -> None:
        """Complete all events of one block and free it; do nothing if it does not wait."""
        if not block.event_count:
            return
        waits_on = [stream for stream, waiting in self.cuda_events.items() if block in waiting]
        for stream in waits_on:
            self.cuda_events[stream].remove(block)
            if not self.cuda_events[stream]:
                del self.cuda_events[stream]
        block.event_count = 0
        self.free_block(block)

    def _complete_all(self, pool: PrivatePool | None = None) -> None:
        for stream in sorted(self.cuda_events):
            waiting = self.cuda_events.pop(stream)
            others = deque[Block]()
            for block in waiting:
                if pool is None or block.pool.owner is pool:
                    self._complete_event(block)
                else:
                    others.append(block)
            if others:
                self.cuda_events[stream] = others

    def _complete_event(self, block: Block) -> None:
        block.event_count -= 1
        if not block.event_count:
            self.free_block(block)
