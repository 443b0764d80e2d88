"""Ranks that hold memory on a GPU that is another rank's.

A script that uses CUDA before torch.cuda.set_device, or loads a checkpoint without map_location,
creates a context on the first GPU in every rank: about 0.5 GiB each, and what it allocates there.

A rank's own GPU is the one on which PyTorch has reserved most. Memory elsewhere is misplaced if
that GPU is the own one of another rank of the same launch: several GPUs for one rank, or several
programs on one GPU, are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchmem.allocator.sizes import MIB
from torchmem.node.published import NodeRanks, Published
from torchmem.sample.sample import LIVE_STATES

MIN_BYTES = 64 * MIB
"""A CUDA context takes more. A program that only queries a GPU takes a few MiB."""

_Launch = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A rank, the UUID of a GPU that is not its own, what it holds there, and whose GPU it is."""

    item: Published
    uuid: str
    bytes: int
    owner: Published


def misplaced(found: NodeRanks) -> Sequence[Misplaced]:
    """Return the misplaced memory of a node, by GPU and rank."""
    own = {item.pid: uuid for item in found.published if (uuid := own_gpu(item))}
    items = {item.pid: item for item in found.published if item.pid in own}
    owners: dict[tuple[_Launch, str], Published] = {}
    for pid, uuid in own.items():
        owners.setdefault((_launch(items[pid]), uuid), items[pid])
    rows = [
        Misplaced(items[pid], uuid, size, owner)
        for (uuid, pid), size in found.holders.held.items()
        if size >= MIN_BYTES and own.get(pid, uuid) != uuid
        if (owner := owners.get((_launch(items[pid]), uuid)))
    ]
    return sorted(rows, key=lambda row: (row.uuid, row.item.sample.process.rank))


def own_gpu(item: Published) -> str | None:
    """Return the UUID of a living rank's own GPU; None if it has reserved nothing yet."""
    reserved = {
        device.uuid: device.allocator.reserved_bytes.total
        for device in item.sample.devices
        if device.uuid and device.allocator
    }
    largest = max(reserved, key=reserved.__getitem__, default=None)
    is_certain = item.attributed and item.state in LIVE_STATES
    return largest if largest and reserved[largest] and is_certain else None


def _launch(item: Published) -> _Launch:
    return item.sample.process.run, item.sample.process.launch
