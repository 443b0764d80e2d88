"""Find the largest allocation by trying, in many random states of PyTorch's allocator, and compare it with `headroom`.

python headroom_by_trying.py STATES SEED      prints the number of states and every disagreement
"""

from __future__ import annotations

import random
import sys
import time

import torch

from torchmem.core.fragmentation import Room, measure

MIB = 1 << 20
Headroom = tuple[int, int]


def build(seed: int) -> list[int]:
    """Bring the empty allocator into the random state of this seed; returns the live pointers."""
    chance, live = random.Random(seed), []
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
    segments = torch.cuda.memory_snapshot()
    layout = measure(segments, 0, time.time(), Room(torch.cuda.mem_get_info()[0]))
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


def disagreements(seed: int) -> list[str]:
    """Where trying says something else than `headroom` in the state of this seed."""
    live = build(seed)
    direct, flushed = headroom()
    clear(live)
    wanted = {direct: {"served"}, direct + 1: {"flushed", "refused"}, flushed + 1: {"refused"}}
    if flushed > direct:
        wanted[flushed] = {"flushed"}
    seen = {size: outcome(seed, size) for size in wanted if size > 0}
    return [f"seed {seed}: {size} bytes {seen[size]}, headroom {direct} / {flushed}"
            for size in seen if seen[size] not in wanted[size]]  # fmt: skip


def main() -> None:
    """Compare in as many states as asked for."""
    states, first = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.init()
    wrong = [line for seed in range(first, first + states) for line in disagreements(seed)]
    print(f"{states} states, {len(wrong)} disagreements", *wrong, sep="\n")


if __name__ == "__main__":
    main()
