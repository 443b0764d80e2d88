"""A recorded program under settings of our choice, on a card of our choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.core.snapshot import DEFAULT_POOL
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.card import SimulatedCard
from torchmem.simulator.whatif.driver import ENDLESS_BYTES
from torchmem.simulator.whatif.player import EndedError, Player
from torchmem.simulator.whatif.program import Act, Program
from torchmem.simulator.whatif.rebuild import Before
from torchmem.simulator.whatif.result import Outcome, Start


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays one program from the blocks that were alive `before` it.

    `card_bytes`: what the allocator can get; None for a card without end. `total_bytes`: all memory of the card, of
    which a memory fraction is a part; None if it is not known, and then it is `card_bytes`.
    """

    program: Program
    before: Before
    events: int
    card_bytes: int | None
    total_bytes: int | None
    oldest_segment_first: bool
    on_sample: Callable[[int], None]

    def replay(self, name: str, conf: str, config: AllocatorConfig) -> Outcome:
        """What this setting would have done."""
        player = Player(self._allocator(config), self.card_bytes, self.events, on_sample=self.on_sample)
        player.use_pools(sorted(self.program.pools | {segment["segment_pool_id"] for segment in self.before.segments}
                                - {DEFAULT_POOL}))  # fmt: skip
        start: Start = "packed" if self.before.segments else "empty"
        try:
            self._pack(player)
        except EndedError:
            return outcome(name, conf, start, player, 0)
        player.start_counting()
        return outcome(name, conf, start, player, player.play(self.program))

    def _allocator(self, config: AllocatorConfig) -> DeviceCachingAllocator:
        obtainable = self.card_bytes or ENDLESS_BYTES
        total = max(obtainable, self.total_bytes or 0) if self.card_bytes else obtainable
        card = SimulatedCard(total, context_bytes=total - obtainable)
        allocator = DeviceCachingAllocator(card, config=config, oldest_segment_first=self.oldest_segment_first)
        fraction = config.per_process_memory_fraction
        if fraction < 1:
            allocator.set_memory_limit(int(fraction * total))
        elif config.garbage_collection_threshold:
            # The garbage collection needs a limit: here the whole of what the allocator can get.
            allocator.set_memory_limit(self.card_bytes)
        return allocator

    def _pack(self, player: Player) -> None:
        """Request what was alive, in the order of addresses; raises EndedError when the card is too small for it."""
        for segment in self.before.segments:
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    continue
                pool, stream = segment["segment_pool_id"], segment["stream"]
                address, size = block["address"], block["requested_size"]
                player.do((Act.MALLOC, 0, address, size, stream, pool))
                if block["state"] != "active_allocated":
                    player.do((Act.FREE_LATER, 0, address, size, stream, pool))


def outcome(name: str, conf: str, start: Start, player: Player, replayed: int) -> Outcome:
    """What a player saw."""
    stats = player.allocator.stats
    worst = max(player.timeline, key=lambda moment: moment.stranded, default=None)
    return Outcome(
        name=name,
        conf=conf,
        start=start,
        peak_reserved=player.peak_reserved,
        peak_allocated=player.peak_allocated,
        worst_stranded=worst.stranded if worst else 0,
        worst_event=worst.event if worst else None,
        retries=stats.num_alloc_retries,
        ooms=stats.num_ooms,
        oom=player.oom,
        replayed_events=replayed,
        device_allocs=stats.num_device_alloc,
        device_frees=stats.num_device_free,
        syncs=stats.num_sync_all_streams,
        timeline=tuple(player.timeline),
    )
