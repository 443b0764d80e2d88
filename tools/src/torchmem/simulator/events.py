"""Blocks that were used on other streams and wait, after they were freed, until those streams have passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmem.simulator.blocks import Block, PrivatePool
from torchmem.simulator.card import SimulatedCard


@dataclass(slots=True, eq=False)
class OutstandingEvents:
    """The events of freed blocks, in order for each stream (PyTorch's `cuda_events`).

    The simulated driver's events are done at once, or, after `SimulatedCard.hold_events(True)`, not before they are
    let go. A block whose last event is done is handed to `free_block`.

    Streams are looked at in the order of their numbers. PyTorch takes the order of a hash of the stream's id; it
    decides nothing but how `inactive_split` rises and falls while blocks of several streams become free in one call.
    """

    card: SimulatedCard
    free_block: Callable[[Block], None]
    cuda_events: dict[int, deque[Block]] = field(default_factory=dict)

    def insert_events(self, block: Block) -> None:
        """Record an event on each stream that used the block."""
        streams, block.stream_uses = block.stream_uses or set(), None
        for stream in streams:
            block.event_count += 1
            self.cuda_events.setdefault(stream, deque()).append(block)

    def process_events(self) -> None:
        """Free the blocks whose events are done."""
        if not self.card.events_held:
            self._complete()

    def synchronize_and_free_events(self, pool: PrivatePool | None = None) -> None:
        """Wait for all events, or for those of one private pool's blocks, and free the blocks."""
        self._complete(pool)

    def complete(self, block: Block) -> None:
        """Free one block, whatever it waits for; nothing if it waits no longer."""
        if block.event_count:
            for stream in [
                stream for stream, waiting in self.cuda_events.items() if block in waiting
            ]:
                self.cuda_events[stream].remove(block)
                if not self.cuda_events[stream]:
                    del self.cuda_events[stream]
            block.event_count = 0
            self.free_block(block)

    def _complete(self, pool: PrivatePool | None = None) -> None:
        for stream in sorted(self.cuda_events):
            waiting = self.cuda_events.pop(stream)
            others = deque[Block]()
            for block in waiting:
                if pool is None or block.pool.owner is pool:
                    self._event_done(block)
                else:
                    others.append(block)
            if others:
                self.cuda_events[stream] = others

    def _event_done(self, block: Block) -> None:
        block.event_count -= 1
        if not block.event_count:
            self.free_block(block)
