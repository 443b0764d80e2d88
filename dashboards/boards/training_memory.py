"""Rows of the dashboard "Training memory": headroom, where the memory is, fragmentation, growth."""

from __future__ import annotations

from dashboards import colors as levels
from dashboards import recorded
from dashboards.panels import (
    RANK,
    Panel,
    Query,
    Unit,
    bucket_heatmap,
    component_stack,
    heat_strips,
    lines,
    rank_lines,
    small,
    stack,
    with_limit,
    with_trend,
)
from dashboards.queries import (
    HEADROOM,
    HEADROOM_FALL,
    RUN_RANK,
    among,
    append_matcher,
    live,
    of_ranks,
    select,
    sum_without_pool,
)

from torchmem.manifests import prediction
from torchmem.metrics import catalog
from torchmem.metrics.colors import PARTS

NO_FREE_BYTES = "No cached bytes"
NO_SNAPSHOT = "No snapshot yet"

# How far the headroom of a rank is continued at its pace.
_AHEAD_MINUTES = 15
# The largest request that failed within the time range, as a line over all of it.
_REQUESTED = f"max(max_over_time({select(catalog.LAST_OOM_REQUESTED, over='$__range')} @ end()))"
_HEADROOM = (
    rank_lines("Headroom", of_ranks(HEADROOM, "min"), Unit.BYTES, lowest=True)
    .description(
        "How large a tensor would still fit in each rank? The lowest value of 5 minutes, which is "
        "close to the headroom at the peak of a step. At zero, or below the largest request that "
        "has failed so far, the rank runs out of memory. Of the ranks whose headroom has fallen "
        "steadily for 10 minutes, the legend says by how much the one falls that will have least, "
        f"and the dashed line is what it will have left {_AHEAD_MINUTES} minutes later at this "
        "pace. That is not a warning: many falls end."
    )
    .no_value(NO_SNAPSHOT)
)


def _ahead(at: str = "") -> str:
    """Return the headroom of each rank after _AHEAD_MINUTES, if it goes on falling at its pace."""
    left = f"{HEADROOM}{at} - {60 * _AHEAD_MINUTES} * {HEADROOM_FALL}{at}"
    return f"min by ({', '.join(RUN_RANK)}) (clamp_min({left}, 0))"


# Chosen once for all points: the rank that will have least.
_FIRST = f"bottomk(1, {_ahead(' @ end()')})"
_FALL_PER_MINUTE = of_ranks(f"60 * {HEADROOM_FALL} / 2^30")
HEADROOM_LINES = with_trend(
    with_limit(_HEADROOM, Query(_REQUESTED, "largest failed request")),
    Query(among(RUN_RANK, _ahead(), _FIRST), f"{RANK} in {_AHEAD_MINUTES} min at this pace"),
    Query(among(RUN_RANK, _FALL_PER_MINUTE, _FIRST), f"{RANK} falls by"),
    Unit.GIB_PER_MINUTE,
).height(12)

_ALLOCATED, _ACTIVE, _RESERVED = (
    sum_without_pool(spec) for spec in (catalog.ALLOCATED, catalog.ACTIVE, catalog.RESERVED)
)


def _shown(expression: str) -> str:
    """Return the sum over the devices of the rank for which a panel is repeated."""
    return f"sum({live(expression)})".replace('"$rank"', '"$shown"')


_UNBACKED = select(catalog.RESERVED_UNBACKED)
_ON_GPU = f"(clamp_min({_ALLOCATED} - {_UNBACKED}, 0) or {_ALLOCATED})"
_OUTSIDE, _START = select(catalog.OUTSIDE_ALLOCATOR), select(catalog.OUTSIDE_ALLOCATOR_START)
_RANK = stack(
    "Rank $shown",
    [
        Query(_shown(_ON_GPU), "allocated", PARTS["in_use"]),
        Query(f"{_shown(_ACTIVE)} - {_shown(_ALLOCATED)} > 0", "active", PARTS["private_pools"]),
        Query(f"{_shown(_RESERVED)} - {_shown(_ACTIVE)}", "reserved", PARTS["releasable"]),
        Query(
            _shown(f"({_START} < {_OUTSIDE} or {_OUTSIDE} and {_START})"),
            "outside, at the start",
            PARTS["driver"],
        ),
        Query(_shown(f"({_OUTSIDE} - {_START} > 0)"), "outside, since", PARTS["outside_allocator"]),
        Query(_shown(f"({_OUTSIDE} unless {_START})"), "outside", PARTS["outside_allocator"]),
    ],
    Query(_shown(select(catalog.DEVICE_TOTAL)), "GPU"),
    Unit.BYTES,
).description(
    "How far apart are the memory of tensors (allocated), the memory that waits for another stream "
    "too (active), what PyTorch holds (reserved), and the GPU? Outside PyTorch are the CUDA "
    "context, which existed at the start, and libraries such as NCCL, which came later. The rest "
    "below the dashed line is free or belongs to other processes. Memory that a sleeping allocator "
    "has returned does not count as allocated. The panel shows the ranks with the least headroom."
)
_COMPONENT = select(catalog.COMPONENT)
COMPONENTS = (
    component_stack(
        "What the tensors are",
        lambda matcher: f"sum({live(append_matcher(_COMPONENT, matcher))})",
        Query(f"sum({live(_COMPONENT)})", "Active"),
    )
    .description(
        "Is it the model, its gradients, the optimizer, or what a step allocates? What else lives "
        "between steps, such as caches and lists of outputs, is held. The areas add up to the "
        "active memory, the dashed line, of all ranks: tensors, and what waits for another stream."
    )
    .no_value("The SDK has not counted the tensors yet")
)
MEMORY: list[Panel] = [
    COMPONENTS,
    rank_lines("Reserved", of_ranks(_RESERVED), Unit.BYTES).description(
        "How much memory does PyTorch hold in each rank: tensors plus cache? A rank far "
        "above the others runs out first."
    ),
    rank_lines("Allocated", of_ranks(_ALLOCATED), Unit.BYTES).description(
        "How much memory do tensors occupy in each rank between steps? The value is "
        "torch.cuda.memory_allocated() at the end of steps."
    ),
    heat_strips("Reserved by rank", Query(of_ranks(_RESERVED), "{{rank}}"), Unit.BYTES).description(
        "Which ranks hold more than the others, and since when? One strip per rank, in the "
        "scale below."
    ),
    small(_RANK, repeat="shown"),
]

_INDEX = of_ranks(select(catalog.FRAGMENTATION))
_SIZES = f"sum by (le) ({live(select(catalog.FREE_BLOCK_SIZE, '_bucket'))})"
FRAGMENTATION: list[Panel] = [
    rank_lines(
        "Stranded", of_ranks(select(recorded.STRANDED_RATIO)), Unit.RATIO, mark=levels.STRANDED
    )
    .description(
        "How much of its GPU can each rank not use, because live blocks pin the free ones "
        "beside them? Only requests that fit between them succeed. The dashed lines are the "
        "thresholds of the alerts."
    )
    .no_value(NO_SNAPSHOT),
    rank_lines("Fragmentation index", _INDEX, Unit.NUMBER, mark=levels.FRAGMENTATION)
    .description(
        "Is the free memory in small pieces? 1 - largest free block / free bytes, at random "
        "moments of the steps. Above the dashed line, fragmentation is severe if many bytes "
        "are stranded. A high index alone is harmless, because whole free segments also give "
        "values near 1."
    )
    .no_value(NO_FREE_BYTES)
    .max(1),
    heat_strips("Fragmentation index by rank", Query(_INDEX, "{{rank}}"), Unit.NUMBER, highest=1)
    .description(
        "Which ranks are fragmented, and since when? One strip per rank, in the scale below."
    )
    .no_value(NO_FREE_BYTES),
    bucket_heatmap("Free blocks by size", Query(_SIZES), Unit.BYTES)
    .description(
        "How many free blocks of each size do the allocators hold? Many small blocks without "
        "a large one are typical of fragmentation."
    )
    .no_value(NO_SNAPSHOT),
    rank_lines("Slack at the peak", of_ranks(select(recorded.PEAK_SLACK)), Unit.RATIO).description(
        "What share of the reserved memory was never in use? 1 - peak active / peak reserved. "
        "5 to 20% is usual; more is memory that a larger batch could have used."
    ),
    lines(
        "Segments by pool",
        Query(f"sum by (pool) ({live(select(catalog.SEGMENTS))})", "{{pool}} pool"),
        Unit.COUNT,
    )
    .description(
        "How many segments has the allocator taken from the driver? Requests up to 1 MiB come "
        "from the small pool. A number that keeps rising while reserved memory does not means "
        "ever smaller pieces."
    )
    .no_value(NO_SNAPSHOT)
    .height(10),
]

_LEFT_AT_PEAK = (
    rank_lines(
        "Left at the peak", of_ranks(select(recorded.PEAK_MARGIN), "min"), Unit.RATIO, lowest=True
    )
    .description(
        "How much of its GPU does each rank leave at the peak of its steps? That is the free "
        "memory plus the cache that is not stranded, minus what the highest peak needs. It "
        "falls if the peak grows, if memory is stranded, or if other processes take some. A "
        f"fast, continuing fall fires TorchmemOutOfMemoryPredicted. {prediction.worth()} The "
        "dashed line is what the largest batch of session.plan() will leave."
    )
    .no_value(NO_SNAPSHOT)
)
_PLANNED_MARGIN = f"min({live(select(recorded.PLANNED_MARGIN))})"
_ACTIVE_PEAK = rank_lines(
    "Active peak", of_ranks(select(catalog.ACTIVE_PEAK)), Unit.BYTES
).description(
    "How much memory did each rank need at most since its start? The distance from the "
    "GPU's memory is what a larger batch could use. The dashed line is the peak to expect of "
    "the largest batch of session.plan()."
)
_PLANNED_PEAK = f"max({live(select(catalog.PLANNED_PEAK))})"
GROWTH: list[Panel] = [
    with_limit(_LEFT_AT_PEAK, Query(_PLANNED_MARGIN, "planned batch")),
    rank_lines("Growth of the peak per hour", of_ranks(select(recorded.PEAK_GROWTH)), Unit.BYTES)
    .description(
        "Does the job need more and more memory? Growth of the allocated peak over the last "
        "30 minutes. After the first steps it should be zero. Tensors that stay in a list, "
        "and inputs that get longer, show up here."
    )
    .no_value("Available after 30 minutes"),
    with_limit(_ACTIVE_PEAK, Query(_PLANNED_PEAK, "planned batch")),
    rank_lines(
        "Imbalance between ranks",
        of_ranks(select(recorded.IMBALANCE)),
        Unit.NUMBER,
        mark=levels.IMBALANCE,
    )
    .description(
        "Does one rank need more than the others? The active peak divided by the mean of the "
        "run's other ranks: 1 is even, 1.2 is 20% more. The rank with the highest value "
        "limits the batch size. The dashed line is the threshold of the alert."
    )
    .no_value("A run with one rank has no imbalance"),
    rank_lines("Outside the allocator", of_ranks(select(catalog.OUTSIDE_ALLOCATOR)), Unit.BYTES)
    .description(
        "How much memory do CUDA, NCCL, cuBLAS and other libraries hold in each process? It "
        "should not grow after the first minutes; empty_cache() does not free it."
    )
    .no_value("NVML does not see these processes"),
    lines(
        "NCCL by process group",
        Query(
            f"sum by (group, state) ({live(select(catalog.COMMUNICATOR))})", "{{group}}, {{state}}"
        ),
        Unit.BYTES,
    )
    .description(
        "What do NCCL's communicators hold outside the allocator, over all ranks? Suspended memory "
        "is not on the GPUs. NCCL counts since 2.29.7; estimated is what grew outside the "
        "allocator when a communicator was created. Fewer groups, NCCL_BUFFSIZE and "
        "NCCL_MAX_NCHANNELS lower it."
    )
    .no_value("No process groups of NCCL"),
    lines(
        "Deviation from the usual",
        [
            Query(f"max({select(spec)})", name)
            for name, spec in {
                "memory reserved": recorded.RUN_RESERVED_DEVIATION,
                "memory stranded": recorded.RUN_STRANDED_DEVIATION,
                "time of a step": recorded.RUN_STEP_DEVIATION,
            }.items()
        ],
        Unit.RATIO,
        signed=True,
    )
    .description(
        "Does this run behave like earlier runs of the same name? The panel shows the "
        "difference from the median of the last day: in percent for the memory of the fullest "
        "GPU and the step time, in percentage points for the stranded share."
    )
    .no_value("Available after 30 minutes")
    .height(10),
]

SPECIAL: list[Panel] = [
    rank_lines(
        "CUDA graphs and MemPools",
        of_ranks(f"{select(catalog.PRIVATE_POOL, state='free')} > 0"),
        Unit.BYTES,
    )
    .description(
        "How much memory in private pools is free in each rank? It looks like cache, but only "
        "the graph or pool that owns it can use it."
    )
    .no_value("No private pools")
    .span(8),
    rank_lines("Given back while asleep", of_ranks(_UNBACKED), Unit.BYTES)
    .description(
        "How much of what PyTorch counts as reserved is not on the GPU, because an allocator "
        "outside PyTorch has returned it, as in vLLM's sleep mode? It is free for other "
        "processes; the rank needs it again when it wakes up."
    )
    .no_value("All reserved memory is on the GPU")
    .span(8),
    lines(
        "Peak by phase",
        Query(f"max by (phase) ({live(select(catalog.PHASE_PEAK))})", "{{phase}}"),
        Unit.BYTES,
    )
    .description(
        "Which part of the program needs most: training, evaluation, generation? The highest "
        "allocated bytes of any rank within each phase that the script names with session.phase()."
    )
    .no_value("The script names no phases")
    .span(8)
    .height(10),
]

_LEFT = f"{select(catalog.HOST_AVAILABLE)} / {select(catalog.HOST_LIMIT)}"
HOST: list[Panel] = [
    rank_lines(
        "Host memory left",
        of_ranks(_LEFT, "min"),
        Unit.RATIO,
        lowest=True,
        mark=levels.HOST_AVAILABLE,
    )
    .description(
        "How close is the node, the container or the pod to its memory limit? At zero the "
        "kernel's OOM killer ends a rank without a traceback. Ranks below one limit have equal "
        "values. The dashed line is the threshold of the alert."
    )
    .no_value("The SDK of these ranks reports no host memory")
    .span(8),
    rank_lines("Resident memory", of_ranks(select(catalog.HOST_RSS)), Unit.BYTES)
    .description(
        "How much host memory does each rank use, without its data loader workers? Growth from "
        "epoch to epoch is a leak on the host."
    )
    .span(8),
    rank_lines(
        "Pinned memory",
        of_ranks(f"sum without (state) ({select(catalog.HOST_PINNED)})"),
        Unit.BYTES,
    )
    .description(
        "How much host memory is pinned, so that the kernel can neither swap nor move it? "
        "PyTorch keeps freed blocks, so used and cached count together."
    )
    .no_value("PyTorch before 2.6 does not count pinned memory")
    .span(8),
]
