"""The rows "Where is the memory?" and "Fragmentation" of the dashboard "Training memory"."""

from __future__ import annotations

from dashboards import recorded
from dashboards.colors import FRAGMENTATION as FRAGMENTATION_LEVELS
from dashboards.panels import (
    PARTS_EXPLAINED,
    RANK,
    Panel,
    Query,
    Text,
    Unit,
    bucket_heatmap,
    heat_strips,
    lines,
    memory_stack,
)
from dashboards.queries import (
    live,
    select,
    sum_without_pool,
)

from torchmem.sample import catalog

NO_FREE_BYTES = "No cached bytes"
NO_SNAPSHOT = "No snapshot yet"

_MEMORY_OF_GPU = memory_stack(
    Text(
        "Memory of $gpu",
        "What is the memory of this GPU used for? The areas add up to the dashed line. "
        f"{PARTS_EXPLAINED}",
        "No data: no GPU matches the selection",
    ),
    lambda part: f"sum({select(recorded.PART, part=part)})",
    Query(f"sum({select(recorded.TOTAL)})", "Device total"),
    repeat="gpu",
)
_RESERVED = live(sum_without_pool(catalog.RESERVED))
MEMORY: list[Panel] = [
    _MEMORY_OF_GPU,
    lines(
        Text(
            "Allocated",
            "How much memory do tensors occupy in each rank? The value is "
            "torch.cuda.memory_allocated() at the end of steps.",
        ),
        [Query(live(sum_without_pool(catalog.ALLOCATED)), RANK)],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Reserved",
            "How much memory does PyTorch hold in each rank: tensors plus cache? A rank far "
            "above the others will run out first.",
        ),
        [Query(_RESERVED, RANK)],
        Unit.BYTES,
    ),
    heat_strips(
        Text(
            "Reserved by rank",
            "Which ranks hold more than the others, and since when? There is one row per rank; "
            "darker is more.",
        ),
        Query(_RESERVED, RANK),
        Unit.BYTES,
    ),
    lines(
        Text(
            "Peaks since the start",
            "How much memory did the job need at most (active), and how much did PyTorch take "
            "for it (reserved)? The difference between the two lines of a rank is memory lost "
            "to fragmentation and caching.",
        ),
        [
            Query(live(select(catalog.ACTIVE_PEAK)), f"{RANK}, active"),
            Query(live(select(catalog.RESERVED_PEAK)), f"{RANK}, reserved"),
        ],
        Unit.BYTES,
    ).height(9),
    lines(
        Text(
            "Growth of the peak per hour",
            "Does the job need more and more memory? Growth of the allocated peak over the "
            "last 30 minutes, per rank. After the first steps it should be zero. Tensors that "
            "stay in a list, and inputs that get longer, show up here.",
            "Available after 30 minutes",
        ),
        [Query(select(recorded.PEAK_GROWTH), RANK)],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Imbalance between ranks",
            "Does one rank need more than the others? The active peak divided by the mean of "
            "the run's other ranks: 1 is even, 1.2 is 20 % more. The rank with the highest "
            "value limits the run's batch size.",
            "A run with one rank has no imbalance",
        ),
        [Query(select(recorded.IMBALANCE), RANK)],
        Unit.NUMBER,
    ),
    lines(
        Text(
            "Peak by phase",
            "Which part of the program needs most: training, evaluation, generation? The "
            "highest allocated bytes within each phase that the script names with "
            "session.phase().",
            "The script names no phases",
        ),
        [Query(live(select(catalog.PHASE_PEAK)), f"{RANK}, {{{{phase}}}}")],
        Unit.BYTES,
    ),
    lines(
        Text(
            "CUDA graphs and MemPools",
            "How much memory do private pools hold, and how much of it is free? Free memory "
            "looks like cache, but only the graph or pool that owns it can use it.",
            NO_SNAPSHOT,
        ),
        [Query(live(select(catalog.PRIVATE_POOL)), f"{RANK}, {{{{state}}}}")],
        Unit.BYTES,
    ),
]

_INDEX = Query(live(select(catalog.FRAGMENTATION)), RANK)
_SIZES = f"sum by (le) ({live(select(catalog.FREE_BLOCK_SIZE, '_bucket'))})"
FRAGMENTATION: list[Panel] = [
    lines(
        Text(
            "Fragmentation index",
            "Is the free memory in small pieces? 1 - largest free block / free bytes, per "
            "rank, at random points of the steps. Above the dashed line at 0.7, fragmentation "
            "is severe if many bytes are stranded. A high index alone is harmless, because "
            "whole free segments also give values near 1.",
            NO_FREE_BYTES,
        ),
        [_INDEX],
        Unit.NUMBER,
        mark=FRAGMENTATION_LEVELS,
    ).max(1),
    lines(
        Text(
            "Stranded",
            "How many free bytes can the allocator not return to the driver, because live "
            "blocks share their segments? Only allocations that fit between them can use them.",
            NO_SNAPSHOT,
        ),
        [Query(live(select(catalog.FREE, state="stranded")), RANK)],
        Unit.BYTES,
    ),
    heat_strips(
        Text(
            "Fragmentation index by rank",
            "Which ranks are fragmented, and since when? There is one row per rank, from 0 "
            "(light) to 1 (dark).",
            NO_FREE_BYTES,
        ),
        _INDEX,
        Unit.NUMBER,
        highest=1,
    ),
    bucket_heatmap(
        Text(
            "Free blocks by size",
            "How many free blocks of each size do the allocators hold? Darker is more. Many "
            "small blocks without a large one are typical of fragmentation.",
            NO_SNAPSHOT,
        ),
        Query(_SIZES),
        Unit.BYTES,
    ).height(9),
    lines(
        Text(
            "Slack at the peak",
            "What share of the reserved memory was never in use? 1 - peak active / peak "
            "reserved. 5 to 20 % is usual; more is memory that a larger batch could have used. "
            "Use it to compare runs.",
        ),
        [Query(select(recorded.PEAK_SLACK), RANK)],
        Unit.RATIO,
    ).span(24),
]
