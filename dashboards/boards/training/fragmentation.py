"""Whether the free memory is in pieces."""

from __future__ import annotations

from dashboards import common
from dashboards.panels import Panel, Query, Text, bucket_heatmap, grid, lines
from dashboards.panels.units import BYTES, NUMBER, RATIO
from dashboards.queries import ranks

NO_SNAPSHOT = "No snapshot yet"


def panels() -> list[Panel]:
    """Index, bytes, sizes, and what it costs in the end."""
    return [_index(), _stranded(), _index_grid(), _sizes(), _slack()]


def _index() -> Panel:
    text = Text(
        "Fragmentation index",
        "In how small pieces is the free memory? 1 - largest free block / free bytes, per rank, at random moments of "
        "the steps. Above the dashed line at 0.7 it is severe where many bytes are stranded; alone it is harmless, for "
        "whole free segments also give values near 1.",
        "Nothing cached",
    )
    return lines(text, [Query(ranks.fragmentation(), common.RANK)], NUMBER, mark=0.7).max(1)


def _stranded() -> Panel:
    text = Text(
        "Stranded",
        "How many free bytes can the allocator not return to the driver, because live blocks share their segments? "
        "Only allocations that fit between them can use them.",
        NO_SNAPSHOT,
    )
    return lines(text, [Query(ranks.stranded(), common.RANK)], BYTES)


def _index_grid() -> Panel:
    text = Text(
        "Fragmentation index, rank by rank",
        "Which ranks fragment, and since when? One row per rank, from 0 (light) to 1 (dark).",
        "Nothing cached",
    )
    return grid(text, Query(ranks.fragmentation(), common.RANK), NUMBER, highest=1)


def _sizes() -> Panel:
    text = Text(
        "Free blocks by size",
        "How many free blocks of each size do the allocators hold? Darker is more. Many small blocks and no large one "
        "is what fragmentation looks like.",
        NO_SNAPSHOT,
    )
    return bucket_heatmap(text, Query(ranks.free_block_sizes()), BYTES).height(9)


def _slack() -> Panel:
    text = Text(
        "Slack at the peak",
        "What share of the reserved memory was never in use? 1 - peak active / peak reserved. 5 to 20 % is usual; more "
        "is memory that another batch could have used. Good for comparing runs.",
    )
    return lines(text, [Query(ranks.peak_slack(), common.RANK)], RATIO).span(24)
