"""Captures of CUDA graphs that are under way in any thread of the process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet


class Captures:
    """Follows `capture_begin` and `capture_end` of torch.cuda.CUDAGraph, which all captures call.

    CUDA reports only whether one stream is being captured. But a cudaFree in another thread also
    invalidates a capture in its default mode (`cudaThreadExchangeStreamCaptureMode`).
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[Any] = WeakSet()

    @property
    def are_under_way(self) -> bool:
        """Whether any thread captures a graph."""
        return len(self._graphs) > 0

    def follow(self, graph: Any) -> None:
        """Wrap the methods of this class, for the life of the process."""
        graph.capture_begin = self._beginning(graph.capture_begin)
        graph.capture_end = self._ending(graph.capture_end)

    def _beginning(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            self._graphs.add(graph)
            try:
                return begin(graph, *arguments, **keywords)
            except BaseException:
                self._graphs.discard(graph)
                raise

        return capture_begin

    def _ending(self, end: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(end)
        def capture_end(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return end(graph, *arguments, **keywords)
            finally:
                self._graphs.discard(graph)

        return capture_end
