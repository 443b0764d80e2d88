"""Which blocks were in use when a trace began: the final snapshot, undone event by event from the end."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.simulator.recording.trace import Recording


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block in use, or one that was freed and waits for other streams; sizes in bytes."""

    size: int
    requested_size: int
    pending: bool = False


def live_before(recording: Recording, config: AllocatorConfig) -> dict[int, LiveBlock]:
    """The blocks in use before the first event, by address.

    Of a block that was freed within the trace only the requested size is known, and `config` rounds it. What it has
    on top of that because it was not split comes to light in `segments_before`.
    """
    live = {
        block.address: LiveBlock(block.size, block.requested_size or block.size, block.state != "active_allocated")
        for segment in recording.segments
        for block in segment.blocks
        if block.state != "inactive"
    }
    for event in reversed(recording.events):
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action == "free_completed":
            live[event.address] = LiveBlock(config.round_size(event.size), event.size, pending=True)
        elif event.action == "free_requested":
            block = live.get(event.address) or LiveBlock(config.round_size(event.size), event.size)
            live[event.address] = replace(block, pending=False)
    return live
