"""Find the largest allocation by trying, in many random states of PyTorch's allocator, and compare it with `headroom`.

python headroom_by_trying.py STATES SEED [bound]      prints the number of states and every disagreement

With `bound` headroom may be too small, but never too large. FRACTION in the environment sets the memory fraction.
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
    """Bring the empty allocator into the random state of this seed; returns the live pointers."""
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
    """Give everything back."""
    for pointer in live:
        torch.cuda.caching_allocator_delete(pointer)
    torch.cuda.empty_cache()


def headroom() -> Headroom:
    """What torchmem says now: without, and with, the retry flush."""
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
    """What an allocation of `size` bytes does in that state: served, served after a flush, or refused."""
    live = build(seed)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    try:
        live.append(torch.cuda.caching_allocator_alloc(size))
    except torch.OutOfMemoryError:
        return "refused"
    else:
        flushed = torch.cuda.memory_stats()["num_alloc_retries"] > retries
        return "flushed" if flushed else "served"
    finally:
        clear(live)


def disagreements(seed: int, *, exact: bool) -> list[str]:
    """Where trying says something else than `headroom` in the state of this seed."""
    live = build(seed)
    direct, flushed = headroom()
    clear(live)
    wanted = {direct: {"served"}, direct + 1: {"flushed", "refused"}, flushed + 1: {"refused"}}
    if flushed > direct:
        wanted[flushed] = {"flushed"}
    if not exact:
        wanted = (
            {direct: {"served"}}
            if flushed == direct
            else {direct: {"served"}, flushed: {"served", "flushed"}}
        )
    seen = {size: outcome(seed, size) for size in wanted if size > 0}
    return [f"seed {seed}: {size} bytes {seen[size]}, headroom {direct} / {flushed}"
            for size in seen if seen[size] not in wanted[size]]  # fmt: skip


def main() -> None:
    """Compare in as many states as asked for."""
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
