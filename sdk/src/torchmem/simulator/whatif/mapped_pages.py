"""Expandable segments when a trace began: the final ones, without what was mapped since and with what was unmapped.

Everything is counted in steps of 1 MiB, of which each page is a multiple.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.core.errors import UsageError
from torchmem.core.sizes import MIB, SMALL_BUFFER
from torchmem.simulator.recording.trace import Event, Recording
from torchmem.simulator.restore import RangeKey

Steps = dict[int, RangeKey]
"""Which address range each step belongs to."""
MOST_STEPS = 1 << 24
"""16 TiB of addresses: PyTorch reserves an eighth more than the card for each stream and pool."""
MOST_MOVED = 1 << 28
"""256 TiB mapped and unmapped; a trace of ten million events that says more is no trace."""


def mapped_before(recording: Recording, config: AllocatorConfig) -> dict[RangeKey, list[tuple[int, int]]]:
    """Address and size of each contiguous range that had memory before the first event, by address."""
    owners = _owners(recording, config)
    mapped = {step for segment in recording.segments if segment.is_expandable
              for step in _steps(segment.address, segment.total_size)}  # fmt: skip
    for event in reversed(recording.events):
        if event.action == "segment_map":
            mapped.difference_update(_steps(event.address, event.size))
        elif event.action == "segment_unmap":
            mapped.update(_steps(event.address, event.size))
    steps = defaultdict[RangeKey, list[int]](list)
    for step in sorted(mapped):
        steps[owners[step]].append(step)
    return {key: list(_contiguous(steps[key])) for key in steps}


def first_addresses(recording: Recording, config: AllocatorConfig) -> dict[RangeKey, int]:
    """The lowest address that each range was mapped at, as long as it had memory without a break."""
    owners = _owners(recording, config)
    before = mapped_before(recording, config)
    lowest = {key: runs[0][0] for key, runs in before.items()}
    held = {key: sum(size for _, size in runs) for key, runs in before.items()}
    for event in recording.events:
        if event.action not in {"segment_map", "segment_unmap"}:
            continue
        key = owners[event.address // MIB]
        if held.get(key, 0) <= 0:
            continue
        held[key] += event.size if event.action == "segment_map" else -event.size
        lowest[key] = min(lowest[key], event.address)
    return lowest


def _owners(recording: Recording, config: AllocatorConfig) -> Steps:
    _check(recording)
    owners: Steps = {}
    for segment in recording.segments:
        if segment.is_expandable:
            key = segment.pool, segment.stream, _kind(is_small=segment.is_small)
            owners.update(dict.fromkeys(_steps(segment.address, segment.total_size), key))
    for action in ("segment_map", "segment_unmap"):
        for event in recording.events:
            if event.action == action:
                _claim(owners, event, config)
    return owners


def _check(recording: Recording) -> None:
    """Raises UsageError for pages that no PyTorch maps, before anything is counted in steps."""
    moved = [event.size for event in recording.events if event.action in {"segment_map", "segment_unmap"}]
    sizes = [*moved, *(segment.total_size for segment in recording.segments if segment.is_expandable)]
    whole = all(0 < size <= MOST_STEPS * MIB and size % MIB == 0 for size in sizes)
    if not whole or sum(sizes) > MOST_MOVED * MIB:
        raise UsageError(
            f"{recording.name} maps memory in pieces that PyTorch never does, so it is damaged: record it again."
        )


def _claim(owners: Steps, event: Event, config: AllocatorConfig) -> None:
    """A page of the small pool is mapped alone; what is unmapped without being seen mapped must be guessed."""
    steps = _steps(event.address, event.size)
    known = next((owners[step] for step in steps if step in owners), None)
    is_small = event.size == SMALL_BUFFER if event.action == "segment_map" else event.size % config.large_segment_size
    key = known or (event.pool, event.stream, _kind(is_small=bool(is_small)))
    for step in steps:
        owners.setdefault(step, key)
    if len(owners) > MOST_STEPS:
        raise UsageError("The trace maps more addresses than any GPU has memory, so it is damaged: record it again.")


def _kind(*, is_small: bool) -> Literal["small", "large"]:
    return "small" if is_small else "large"


def _steps(address: int, size: int) -> range:
    first = address // MIB
    return range(first, first + size // MIB)


def _contiguous(steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        found = [step for _, step in run]
        yield found[0] * MIB, len(found) * MIB
