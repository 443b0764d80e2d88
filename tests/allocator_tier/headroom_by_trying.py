"""Compare `headroom` with real allocations, in many random states of PyTorch's allocator.

python headroom_by_trying.py STATES SEED [bound]

Prints the number of states and every disagreement. With `bound`, headroom may be too small, but
never too large. The environment variable FRACTION sets the memory fraction.
"""

from __future__ import annotations

import os
import random
import sys
import time

import torch

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.settings import AllocatorConfig
from torchmem.sdk.torch_backend import AllocatorReader

MIB = 1 << 20
FRACTION = float(os.environ.get("FRACTION", "1"))
READER = AllocatorReader(torch, {})
Headroom = tuple[int, int]


def build(seed: int) -> list[int]:
    """Bring the empty allocator into a random state; return the live pointers."""
    chance = random.Random(seed)
    live: list[int] = []
    sizes = [(1, MIB), (MIB + 1, 10 * MIB), (10 * MIB, 120 * MIB)]
    for _ in range(chance.randrange(5, 80)):
        if live and chance.random() < 0.45:
            torch.cuda.caching_allocator_delete(live.pop(chance.randrange(len(live))))
            continue
        try:
            live.append(torch.cuda.caching_allocator_alloc(chance.randint(*chance.choice(sizes))))
        except torch.OutOfMemoryError:
            break
    return live


def clear(live: list[int]) -> None:
    """Free everything."""
    for pointer in live:
        torch.cuda.caching_allocator_delete(pointer)
    torch.cuda.empty_cache()


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
        live.append(torch.cuda.caching_allocator_alloc(size))
    except torch.OutOfMemoryError:
        return "failed"
    else:
        flushed = torch.cuda.memory_stats()["num_alloc_retries"] > retries
        return "flushed" if flushed else "served"
    finally:
        clear(live)


def disagreements(seed: int, *, exact: bool) -> list[str]:
    """Return where allocations disagree with `headroom` in a state."""
    live = build(seed)
    direct, flushed = headroom()
    clear(live)
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
