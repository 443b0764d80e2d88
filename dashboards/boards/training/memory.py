"""Where the memory is: by part of each GPU, by rank, now and at the peak."""

from __future__ import annotations

from dashboards import common
from dashboards.panels import Panel, Query, Text, grid, lines, stack
from dashboards.panels.units import BYTES, NUMBER
from dashboards.queries import ranks


def panels() -> list[Panel]:
    """The stack of each GPU, then the ranks beside each other."""
    between_ranks = [_allocated(), _reserved(), _reserved_grid(), _peaks(), _growth(), _imbalance()]
    return [_stack(), *between_ranks, _phases(), _pools()]


def _stack() -> Panel:
    text = Text(
        "Memory of $gpu",
        f"Who holds the memory of this GPU? The areas add up to the dashed line. {common.PARTS_EXPLAINED}",
        "No data: no GPU matches the choice above",
    )
    total = Query(ranks.total(), "Device total")
    return stack(text, common.parts(ranks.part), BYTES, total, repeat="gpu")


def _allocated() -> Panel:
    text = Text(
        "Allocated",
        "How much do tensors occupy, per rank, as torch.cuda.memory_allocated() counts it at steps' ends?",
    )
    return lines(text, [Query(ranks.allocated(), common.RANK)], BYTES)


def _reserved() -> Panel:
    text = Text(
        "Reserved",
        "How much does PyTorch hold from the driver, per rank: tensors plus cache? A rank far above the others will be "
        "the first to run out.",
    )
    return lines(text, [Query(ranks.reserved(), common.RANK)], BYTES)


def _reserved_grid() -> Panel:
    text = Text(
        "Reserved, rank by rank",
        "Which ranks hold more than the others, and since when? One row per rank, the darker the more.",
    )
    return grid(text, Query(ranks.reserved(), common.RANK), BYTES)


def _peaks() -> Panel:
    text = Text(
        "Peaks since the start",
        "How much did the job ever need (active), and what did PyTorch take for it (reserved)? The distance between "
        "the two lines of a rank is memory that fragmentation and caching cost.",
    )
    queries = [
        Query(ranks.active_peak(), f"{common.RANK}, active"),
        Query(ranks.reserved_peak(), f"{common.RANK}, reserved"),
    ]
    return lines(text, queries, BYTES).height(9)


def _growth() -> Panel:
    text = Text(
        "Growth of the peak per hour",
        "Does the job need more and more? Growth of the allocated peak over the last 30 minutes, per rank. After the "
        "first steps it should be zero: tensors that stay in a list, or longer and longer inputs, show here.",
        "Known after 30 minutes",
    )
    return lines(text, [Query(ranks.peak_growth(), common.RANK)], BYTES)


def _imbalance() -> Panel:
    text = Text(
        "Imbalance between ranks",
        "Does one rank need more than the others? Active peak, divided by the mean of the run's other ranks: 1 is "
        "even, 1.2 is 20 % more. The run's batch size is bound by the rank with the highest value.",
        "A run with one rank has none",
    )
    return lines(text, [Query(ranks.imbalance(), common.RANK)], NUMBER)


def _phases() -> Panel:
    text = Text(
        "Peak by phase",
        "Which part of the program needs most: training, evaluation, generation? Highest allocated bytes within each "
        "phase that the script names with session.phase().",
        "The script names no phases",
    )
    return lines(text, [Query(ranks.phase_peak(), f"{common.RANK}, {{{{phase}}}}")], BYTES)


def _pools() -> Panel:
    text = Text(
        "CUDA graphs and MemPools",
        "How much do private pools hold, and how much of it is free for nobody else? It looks like cache, but only the "
        "graph or pool that it belongs to can use it.",
        "No snapshot yet",
    )
    return lines(text, [Query(ranks.private_pools(), f"{common.RANK}, {{{{state}}}}")], BYTES)
