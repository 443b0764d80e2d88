"""The dashboard "Training memory": will a rank run out of memory, which one, and where did the memory go?"""

from __future__ import annotations

from dashboards import panels, queries
from dashboards.panels import BYTES, COUNT, NUMBER, PER_MINUTE, RATIO, SECONDS, Choice, Column, Json, Panel, Query, Text

UID = "torchmem-training-memory"

RANK = "{{run}} rank {{rank}}"
STATES = {"running": "green", "stalled": "yellow", "exited": "text", "oom": "red", "killed": "orange"}

PARTS = [
    Query(queries.device_part("in_use"), "In use by tensors", "blue"),
    Query(queries.device_part("stranded"), "Stranded", "orange"),
    Query(queries.device_part("releasable"), "Cached, releasable", "light-blue"),
    Query(queries.device_part("private_pools"), "Free in private pools", "purple"),
    Query(queries.device_part("cached"), "Cached, no snapshot yet", "super-light-blue"),
    Query(queries.device_part("outside_allocator"), "Outside the allocator", "yellow"),
    Query(queries.device_part("other_processes"), "Other processes", "semi-dark-yellow"),
    Query(queries.device_part("driver"), "Driver", "dark-purple"),
    Query(queries.device_part("not_pytorch"), "Not PyTorch (no NVML)", "#8e8e8e"),
    Query(queries.device_part("free"), "Free", "super-light-green"),
]


def training_memory() -> Json:
    """The dashboard as JSON."""
    return panels.dashboard(
        UID,
        "Training memory",
        "GPU memory of PyTorch training, per rank and per GPU: what the allocator holds, what it cannot use, and how "
        "much room is left.",
        _choices(),
        {
            "Will it run out of memory?": _overview(),
            "Where is the memory?": _memory(),
            "Fragmentation": _fragmentation(),
            "Pressure": _pressure(),
            "Ranks": [_ranks()],
        },
    )


def _choices() -> list[Choice]:
    return [
        Choice("run", "Run", queries.variable_values("run")),
        Choice("node", "Node", queries.variable_values("instance", "run")),
        Choice("gpu", "GPU", queries.variable_gpus(), '/uuid="(?<value>[^"]+)".*where="(?<text>[^"]+)"/'),
        Choice("rank", "Rank", queries.variable_values("rank", "run", "instance")),
    ]


def _overview() -> list[Panel]:
    return [
        panels.stat_panel(
            Text(
                "Ranks by state",
                "Training processes by what they do now. stalled: alive, but no step for a while. oom and killed: "
                "ended that way, or the newest step failed for lack of memory; shown for 15 minutes.",
                "No ranks",
            ),
            Query(queries.ranks_by_state(), "{{state}}"),
            COUNT,
            colors=STATES,
        ),
        panels.stat_panel(
            Text(
                "Out of memory",
                "OutOfMemoryErrors raised by the processes seen in the chosen time range, caught by the script or not.",
            ),
            Query(queries.ooms_in_range()),
            COUNT,
            warn_above=1,
        ),
        panels.stat_panel(
            Text(
                "Least headroom",
                "The largest single tensor that the tightest rank could still allocate, after the allocator has given "
                "back its cache. A request above it ends in an OutOfMemoryError.",
            ),
            Query(queries.least_headroom(), RANK),
            BYTES,
        ),
        panels.stat_panel(
            Text(
                "Most stranded",
                "Share of the device that is free but pinned between live blocks, in the rank with the most of it. "
                "From 5 % on it is worth acting, if there are retries too.",
            ),
            Query(queries.most_stranded(), RANK),
            RATIO,
            warn_above=0.05,
        ),
        panels.stat_panel(
            Text(
                "Highest fragmentation index",
                "1 - largest free block / free bytes. Near 1 means that only small pieces are free. Alone it is "
                "harmless: it matters with many stranded bytes and retries.",
                "Nothing cached",
            ),
            Query(queries.worst_fragmentation(), RANK),
            NUMBER,
        ),
        panels.stat_panel(
            Text(
                "Retries in 10 minutes",
                "How often the allocators had to give back their whole cache to serve a request. Each one stops all "
                "streams; a healthy job has none after its first steps.",
            ),
            Query(queries.recent_retries()),
            COUNT,
            warn_above=1,
        ),
    ]


def _memory() -> list[Panel]:
    return [
        panels.stack(
            Text(
                "Memory of $gpu",
                "All memory of one GPU, by who holds it; the areas add up to the dashed line. In use: tensors of the "
                "ranks, at the busier of the newest step's end and the newest snapshot. Stranded: cached by PyTorch, "
                "but pinned between live blocks. Cached, releasable: whole free segments, given back when needed. "
                "Outside the allocator: CUDA context, NCCL, cuBLAS. Only processes that are alive count.",
                "No data: no GPU matches the choice above",
            ),
            PARTS,
            BYTES,
            total=Query(queries.device_total(), "Device total", "text"),
            repeat="gpu",
        ),
        panels.lines(
            Text("Allocated", "Bytes that tensors occupy, per rank, as torch.cuda.memory_allocated() counts them."),
            [Query(queries.allocated(), RANK)],
            BYTES,
        ),
        panels.lines(
            Text(
                "Reserved",
                "Bytes that PyTorch holds from the driver, per rank: tensors plus cache. A rank far above the others "
                "will be the first to run out.",
            ),
            [Query(queries.reserved(), RANK)],
            BYTES,
        ),
    ]


def _fragmentation() -> list[Panel]:
    return [
        panels.lines(
            Text(
                "Fragmentation index",
                "1 - largest free block / free bytes, per rank, at random moments of the steps. Above the dashed line "
                "at 0.7 it is severe where many bytes are stranded; whole free segments also give values near 1.",
                "Nothing cached",
            ),
            [Query(queries.fragmentation(), RANK)],
            NUMBER,
            mark=0.7,
        ),
        panels.lines(
            Text(
                "Stranded",
                "Free bytes that the allocator cannot return to the driver, because live blocks share their segments. "
                "Only allocations that fit between them can use them.",
                "No snapshot yet",
            ),
            [Query(queries.stranded(), RANK)],
            BYTES,
        ),
        panels.bucket_heatmap(
            Text(
                "Free blocks by size",
                "How many free blocks of each size the allocators hold; darker is more. Many small blocks and no large "
                "one is what fragmentation looks like.",
                "No snapshot yet",
            ),
            Query(queries.free_block_sizes()),
            BYTES,
        ),
        panels.lines(
            Text(
                "Slack at the peak",
                "1 - peak active / peak reserved: the share of the reserved memory that was never in use. 5 to 20 % is "
                "usual; more is memory that another batch could have used. Good for comparing runs.",
            ),
            [Query(queries.peak_slack(), RANK)],
            RATIO,
        ),
    ]


def _pressure() -> list[Panel]:
    return [
        panels.lines(
            Text(
                "Headroom",
                "The largest single tensor that would fit now, per rank: at once, and after the allocator has given "
                "back its cache. Where both meet zero, the next allocation fails.",
                "No snapshot yet",
            ),
            [
                Query(queries.headroom(flush=False), f"{RANK}, at once"),
                Query(queries.headroom(flush=True), f"{RANK}, after a flush"),
            ],
            BYTES,
        ),
        panels.lines(
            Text(
                "Allocator retries",
                "Flushes of the whole cache per minute, per rank. They slow every step down and often come before an "
                "OutOfMemoryError.",
            ),
            [Query(queries.retries_per_minute(), RANK)],
            PER_MINUTE,
        ),
        panels.lines(
            Text(
                "Step duration",
                "Time between the ends of two optimizer steps: mean of each rank, and what one step in twenty exceeds "
                "over the whole run. It rises together with retries.",
                "No optimizer step seen",
            ),
            [
                Query(queries.mean_step_seconds(), RANK),
                Query(queries.slow_step_seconds(), "{{run}} slowest 5 %", "text"),
            ],
            SECONDS,
        ),
        panels.lines(
            Text(
                "OutOfMemoryErrors",
                "OutOfMemoryErrors since the process started, by rank and cause. capacity: the job is too large. "
                "fragmentation: enough was free, but in pieces. limit: the memory fraction. external: other programs.",
                "No OutOfMemoryError",
            ),
            [Query(queries.ooms(), f"{RANK}: {{{{cause}}}}")],
            COUNT,
        ),
    ]


def _ranks() -> Panel:
    return panels.joined_table(
        Text(
            "Ranks",
            "Every process on every GPU, dead ones for 15 minutes with their last values. Active peak is what the job "
            "needed, reserved peak what PyTorch took for it.",
        ),
        [
            Column("Run", label="run"),
            Column("Rank", label="rank"),
            Column("Node", label="instance"),
            Column("GPU", label="gpu"),
            Column("Pid", label="pid"),
            Column("State", queries.table_state(), label="state", colors=STATES),
            Column("Active peak", queries.table_active_peak(), unit=BYTES),
            Column("Reserved peak", queries.table_reserved_peak(), unit=BYTES),
            Column("Slack at peak", queries.table_slack(), unit=RATIO),
            Column("Stranded", queries.table_stranded(), unit=BYTES),
            Column("Newest OOM", queries.table_oom_time(), unit=panels.AGO),
            Column("OOM asked for", queries.table_oom_request(), unit=BYTES),
            Column("OOM cause", queries.table_oom_cause(), label="cause"),
        ],
    )
