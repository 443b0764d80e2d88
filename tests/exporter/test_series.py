"""Bounds for the number of series: each one costs memory in every Prometheus."""

from __future__ import annotations

from support.h100_node import h100_node, series
from support.samples import full_sample

GPUS = 4
UUIDS = [f"GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a9{index}" for index in range(GPUS)]
MAX_PER_RANK, MAX_PER_GPU, MAX_PER_ENGINE = 101, 150, 25
ENGINES = ("torchmem_engine_", "torchmem_reserved_unbacked_bytes")
LIBRARIES = ("torchmem_communicator_bytes", "torchmem_rmm_")


def count_series(uuids: list[str], ranks: int, *, only: tuple[str, ...] = ()) -> int:
    """Count the series of a node with these GPUs and ranks, with all values known.

    Those of inference engines and of NCCL, which not all ranks have, are counted apart; those of
    errors by stage, which only ranks with an error have, are left out.
    """
    with h100_node(uuids, ranks) as node:
        page = node.page(1.0).splitlines(keepends=True)
    lines = [line for line in page if not line.startswith("torchmem_sdk_stage_errors_total{")]
    others = () if only else (*ENGINES, *LIBRARIES)
    kept = (ln for ln in lines if ln.startswith(only or "") and not ln.startswith(others))
    return series("".join(kept))


def test_a_rank_adds_a_bounded_number_of_series() -> None:
    """A rank costs at most 101 series, including those of its process on the GPU."""
    assert (count_series(UUIDS, GPUS) - count_series(UUIDS, 0)) / GPUS <= MAX_PER_RANK


def test_an_engine_adds_a_bounded_number_of_series() -> None:
    """An inference engine costs at most 25 series more."""
    assert 0 < count_series(UUIDS, GPUS, only=ENGINES) / GPUS <= MAX_PER_ENGINE
    assert count_series(UUIDS, 0, only=ENGINES) == 0


def test_a_process_group_adds_few_series() -> None:
    """NCCL's communicators cost at most 2 series for each process group."""
    groups = len(full_sample().devices[0].communicators)

    assert 0 < count_series(UUIDS, GPUS, only=LIBRARIES[:1]) / GPUS <= 2 * groups


def test_rmm_adds_few_series() -> None:
    """RAPIDS' memory manager costs 3 series for each rank that uses it."""
    assert count_series(UUIDS, GPUS, only=LIBRARIES[1:]) == 3 * GPUS


def test_an_h100_adds_a_bounded_number_of_series() -> None:
    """A GPU with NVLink costs at most 150 series."""
    assert (count_series(UUIDS, 0) - count_series([], 0)) / GPUS <= MAX_PER_GPU
