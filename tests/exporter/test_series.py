"""How many series the exporter gives at defaults: every Prometheus that scrapes it pays for each."""

from __future__ import annotations

from support.h100_node import h100_node, series

GPUS = 4
UUIDS = [f"GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a9{index}" for index in range(GPUS)]
MOST_OF_A_RANK, MOST_OF_A_GPU = 120, 150


def counted(uuids: list[str], ranks: int) -> int:
    """Series of a node with these cards and ranks, of which everything is known."""
    with h100_node(uuids, ranks) as node:
        return series(node.page(1.0))


def test_a_rank_adds_a_bounded_number_of_series() -> None:
    """A rank of which everything is known costs at most 120 series, with those of its process."""
    assert (counted(UUIDS, GPUS) - counted(UUIDS, 0)) / GPUS <= MOST_OF_A_RANK


def test_an_h100_adds_a_bounded_number_of_series() -> None:
    """A card with NVLink of which everything is known costs at most 150 series."""
    assert (counted(UUIDS, 0) - counted([], 0)) / GPUS <= MOST_OF_A_GPU
