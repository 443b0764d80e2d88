"""Ranks that hold memory on a GPU that is another rank's.

A script that uses CUDA before torch.cuda.set_device, or loads a checkpoint without map_location,
creates a context on the first GPU in every rank: about 0.5 GiB each, and what it allocates there.
Without set_device at all, everything of every rank is there.

A rank's own GPU is the one on which PyTorch has reserved most. Memory elsewhere is misplaced if
that GPU is the own one of another rank of the same launch: several GPUs for one rank, or several
programs on one GPU, are not. Where all ranks of a launch use the first GPU alone, although each
sees as many as it needs to have its own, it is that of the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmem.allocator.sizes import MIB
from torchmem.node.published import NodeRanks, Published
from torchmem.sample.sample import LIVE_STATES, DeviceSample

MIN_BYTES = 64 * MIB
"""A CUDA context takes more. A program that only queries a GPU takes a few MiB."""

_Launch = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A rank, the UUID of a GPU that is not its own, what it holds there, and whose GPU it is.

    `is_all`: the rank has nothing on another GPU.
    """

    item: Published
    uuid: str
    bytes: int
    owner: Published
    is_all: bool = False


def misplaced(found: NodeRanks) -> Sequence[Misplaced]:
    """Return the misplaced memory of a node, by GPU and rank."""
    own = {item.pid: uuid for item in found.published if (uuid := own_gpu(item))}
    items = {item.pid: item for item in found.published if item.pid in own}
    launches: dict[_Launch, dict[int, Published]] = {}
    for item in sorted(items.values(), key=lambda item: item.sample.process.rank):
        launches.setdefault(_launch(item), {})[item.pid] = item
    rows = [row for ranks in launches.values() for row in _of_launch(ranks, own, found)]
    return sorted(rows, key=lambda row: (row.uuid, row.item.sample.process.rank))


def _of_launch(
    ranks: Mapping[int, Published], own: Mapping[int, str], found: NodeRanks
) -> Iterator[Misplaced]:
    """Yield the misplaced memory of the ranks of one launch, which are in order, by their pids."""
    owners: dict[str, Published] = {}
    for pid in ranks:
        owners.setdefault(own[pid], ranks[pid])
    all_on_first = len(owners) == 1 < len(ranks) and all(map(_could_have_its_own, ranks.values()))
    for (uuid, pid), size in found.holders.held.items():
        item, owner = ranks.get(pid), owners.get(uuid)
        if item is None or owner in (None, item) or size < MIN_BYTES:
            continue
        if all_on_first or own[pid] != uuid:
            yield Misplaced(item, uuid, size, owner, is_all=all_on_first)


def own_gpu(item: Published) -> str | None:
    """Return the UUID of a living rank's own GPU; None if it has reserved nothing yet."""
    largest = max(_used(item), key=_reserved, default=None)
    is_certain = item.attributed and item.state in LIVE_STATES
    return largest.uuid if largest and is_certain else None


def _could_have_its_own(item: Published) -> bool:
    """Return whether a rank uses the first GPU that it sees, alone, and sees one for its number."""
    number, used = item.sample.process.local_rank, _used(item)
    is_on_first = len(used) == 1 and used[0].index == 0
    return is_on_first and number is not None and number < (used[0].visible_devices or 0)


def _used(item: Published) -> Sequence[DeviceSample]:
    """Return the known devices on which PyTorch has reserved memory."""
    return [device for device in item.sample.devices if device.uuid and _reserved(device)]


def _reserved(device: DeviceSample) -> int:
    return device.allocator.reserved_bytes.total if device.allocator else 0


def _launch(item: Published) -> _Launch:
    return item.sample.process.run, item.sample.process.launch
