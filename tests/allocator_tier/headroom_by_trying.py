"""Compare `headroom` with real allocations, in many random states of PyTorch's allocator.

python headroom_by_trying.py STATES SEED [bound]

Prints the number of states and every disagreement. With `bound`, headroom may be too small, but
never too large. The environment variable FRACTION sets the memory fraction; with PENDING, freed
blocks may wait for an event of another stream, which completes only when the allocator waits.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time

import torch

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.settings import AllocatorConfig
from torchmem.sdk.pytorch.allocator_reader import AllocatorReader

MIB = 1 << 20
FRACTION = float(os.environ.get("FRACTION", "1"))
READER = AllocatorReader(torch, {})
PENDING = "PENDING" in os.environ
Headroom = tuple[int, int]


def hold_events(hold: int) -> None:
    """Hold all events of the phantom GPU as pending, or release them."""
    if PENDING:
        ctypes.CDLL(None).phantom_hold_events(hold)


class Memory:
    """Live memory: pointers, and tensors that another stream has used."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.pointers: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.side = torch.cuda.Stream() if PENDING else None

    def take(self, size: int) -> None:
        """Allocate `size` bytes."""
        if self.side is None or self.chance.random() < 0.5:
            self.pointers.append(torch.cuda.caching_allocator_alloc(size))
            return
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        tensor.record_stream(self.side)
        self.tensors.append(tensor)

    def free_one(self) -> None:
        """Free any."""
        number = self.chance.randrange(len(self))
        if number < len(self.pointers):
            torch.cuda.caching_allocator_delete(self.pointers.pop(number))
        else:
            del self.tensors[number - len(self.pointers)]

    def __len__(self) -> int:
        return len(self.pointers) + len(self.tensors)

    def clear(self) -> None:
        """Free everything."""
        hold_events(0)
        for pointer in self.pointers:
            torch.cuda.caching_allocator_delete(pointer)
        self.pointers, self.tensors = [], []
        torch.cuda.empty_cache()


def build(seed: int) -> Memory:
    """Bring the empty allocator into a random state."""
    chance = random.Random(seed)
    live = Memory(chance)
    hold_events(1)
    sizes = [(1, MIB), (MIB + 1, 10 * MIB), (10 * MIB, 120 * MIB)]
    for _ in range(chance.randrange(5, 80)):
        if len(live) and chance.random() < 0.45:
            live.free_one()
            continue
        try:
            live.take(chance.randint(*chance.choice(sizes)))
        except torch.OutOfMemoryError:
            break
    return live


def headroom() -> Headroom:
    """Return the headroom without and with a flush."""
    free, total = torch.cuda.mem_get_info()
    room = (
        AvailableMemory(free)
        if FRACTION == 1
        else AvailableMemory(free, torch.cuda.memory_reserved(), int(FRACTION * total))
    )
    config = AllocatorConfig.of(READER.settings())
    layout = measure(READER.segments() or [], 0, time.time(), room, config)
    assert layout.headroom_bytes is not None
    assert layout.headroom_flush_bytes is not None
    return layout.headroom_bytes, layout.headroom_flush_bytes


def outcome(seed: int, size: int) -> str:
    """Return the outcome of an allocation in a state: served, flushed (then served), or failed."""
    live = build(seed)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    try:
        live.pointers.append(torch.cuda.caching_allocator_alloc(size))
    except torch.OutOfMemoryError:
        return "failed"
    else:
        flushed = torch.cuda.memory_stats()["num_alloc_retries"] > retries
        return "flushed" if flushed else "served"
    finally:
        live.clear()


def disagreements(seed: int, *, exact: bool) -> list[str]:
    """Return where allocations disagree with `headroom` in a state."""
    live = build(seed)
    direct, flushed = headroom()
    live.clear()
    expected = {direct: {"served"}}
    if exact:
        expected |= {direct + 1: {"flushed", "failed"}, flushed + 1: {"failed"}}
    if flushed > direct:
        expected[flushed] = {"flushed"} if exact else {"served", "flushed"}
    outcomes = {size: outcome(seed, size) for size in expected if size > 0}
    return [
        f"seed {seed}: {size} bytes {outcomes[size]}, headroom {direct} / {flushed}"
        for size in outcomes
        if outcomes[size] not in expected[size]
    ]


def main() -> None:
    """Compare in the given number of states."""
    states, first = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.init()
    if FRACTION < 1:
        torch.cuda.set_per_process_memory_fraction(FRACTION)
    exact = "bound" not in sys.argv
    wrong = [
        line for seed in range(first, first + states) for line in disagreements(seed, exact=exact)
    ]
    print(f"{states} states, {len(wrong)} disagreements", *wrong, sep="\n")


if __name__ == "__main__":
    main()
