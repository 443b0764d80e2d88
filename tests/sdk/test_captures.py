"""Captures of CUDA graphs are known in every thread, whatever happens in them."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from torchmem.sdk.pytorch.graph_captures import Captures


@pytest.fixture
def watched() -> tuple[Captures, type[Any]]:
    """Captures, and a class as torch.cuda.CUDAGraph is."""

    class Graph:
        def capture_begin(self, pool: int = 0, *, fails: bool = False) -> int:
            if fails:
                raise RuntimeError("cudaErrorStreamCaptureUnsupported")
            return pool

        def capture_end(self, *, fails: bool = False) -> None:
            if fails:
                raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    captures = Captures()
    captures.follow(Graph)
    return captures, Graph


def test_captures_may_overlap(watched: tuple[Captures, type[Any]]) -> None:
    """Until the last one ends, captures are under way; arguments and results pass through."""
    captures, graph = watched
    first, second = graph(), graph()
    assert (first.capture_begin(7), second.capture_begin(pool=8)) == (7, 8)
    first.capture_end()
    assert captures.are_under_way
    second.capture_end()

    assert not captures.are_under_way


def test_a_failed_capture_is_over(watched: tuple[Captures, type[Any]]) -> None:
    """One that cannot begin, whose end fails, or whose graph is gone, does not count any more."""
    captures, graph = watched
    with pytest.raises(RuntimeError, match="Unsupported"):
        graph().capture_begin(fails=True)
    assert not captures.are_under_way

    failing = graph()
    failing.capture_begin()
    with pytest.raises(RuntimeError, match="Invalidated"):
        failing.capture_end(fails=True)
    assert not captures.are_under_way

    graph().capture_begin()
    gc.collect()
    assert not captures.are_under_way
