"""The compared tools, at their defaults: torchmem, Stormlog, a Lightning-style callback."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any, Protocol

from benchmarks.overhead.workload import has_cuda

from torchmem import sdk
from torchmem.allocator.backend import Backend


class Tool(Protocol):
    """A memory monitor; `begin` and `end` are called around every training step."""

    def start(self) -> None:
        """Start monitoring."""

    def begin(self) -> None:
        """A step begins."""

    def end(self) -> None:
        """A step has ended."""

    def stop(self) -> None:
        """Stop monitoring."""


class Nothing:
    """No tool."""

    def start(self) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class Torchmem(Nothing):
    """`sdk.instrument()`; `by_hand` marks steps where no optimizer runs."""

    def __init__(self, backend: Backend | None = None, *, by_hand: bool = False) -> None:
        self._backend = backend
        self._by_hand = by_hand
        self.run_dir = tempfile.mkdtemp(prefix="torchmem-benchmark-")

    def start(self) -> None:
        """Call `instrument`."""
        self._session = sdk.instrument(backend=self._backend, run_dir=self.run_dir)

    def end(self) -> None:
        """Mark a step by hand, which costs what the optimizer's hook costs."""
        if self._by_hand:
            self._session.step()

    def stop(self) -> None:
        """Close the session."""
        self._session.close()


class Stormlog(Nothing):
    """PyPI's `stormlog`: `MemoryTracker()` samples in a thread every 0.1 s."""

    def start(self) -> None:
        """Start its thread."""
        tracker: Any = importlib.import_module("stormlog").MemoryTracker
        self._tracker = tracker()
        self._tracker.start_tracking()

    def stop(self) -> None:
        """Stop its thread."""
        self._tracker.stop_tracking()


class LightningStyle(Nothing):
    """As Lightning's `DeviceStatsMonitor`: flattened `memory_stats()` at batch start and end."""

    def begin(self) -> None:
        """Read about 120 values."""
        import torch

        torch.cuda.memory_stats()

    def end(self) -> None:
        """Read them again."""
        self.begin()


TOOLS = ("nothing", "torchmem", "stormlog", "lightning")


def missing(name: str) -> str | None:
    """Return why a tool cannot run here, or None."""
    if name in {"stormlog", "lightning"} and not has_cuda():
        return "needs PyTorch with a GPU"
    if name == "stormlog" and importlib.util.find_spec("stormlog") is None:
        return "not installed"
    return None


def make(name: str, backend: Backend | None = None, *, by_hand: bool = False) -> Tool:
    """Return the tool of that name."""
    if name == "torchmem":
        return Torchmem(backend, by_hand=by_hand)
    tools = {"nothing": Nothing, "stormlog": Stormlog, "lightning": LightningStyle}
    return tools[name]()
