"""What is compared: nothing, torchmem, Stormlog's tracker, a Lightning-style callback; all at their defaults."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any, Protocol

from benchmarks.overhead.workload import has_cuda

from torchmem import sdk
from torchmem.allocator.backend import Backend


class Tool(Protocol):
    """One way to watch memory: `begin` and `end` are called around every training step."""

    def start(self) -> None:
        """Begin to watch."""

    def begin(self) -> None:
        """A step begins."""

    def end(self) -> None:
        """A step has ended."""

    def stop(self) -> None:
        """Watch no longer."""


class Nothing:
    """The process without any tool."""

    def start(self) -> None:
        """Nothing."""

    def begin(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Torchmem(Nothing):
    """`sdk.instrument()`; the step is marked by hand where no optimizer runs."""

    def __init__(self, backend: Backend | None = None, *, by_hand: bool = False) -> None:
        self._backend = backend
        self._by_hand = by_hand
        self.run_dir = tempfile.mkdtemp(prefix="torchmem-benchmark-")

    def start(self) -> None:
        """Instrument."""
        self._session = sdk.instrument(backend=self._backend, run_dir=self.run_dir)

    def end(self) -> None:
        """A step by hand, which costs what the optimizer's hook costs."""
        if self._by_hand:
            self._session.step()

    def stop(self) -> None:
        """Close the session."""
        self._session.close()


class Stormlog(Nothing):
    """PyPI's `stormlog`: `MemoryTracker()` samples in a thread, every 0.1 s."""

    def start(self) -> None:
        """Start its thread."""
        tracker: Any = importlib.import_module("stormlog").MemoryTracker
        self._tracker = tracker()
        self._tracker.start_tracking()

    def stop(self) -> None:
        """Stop its thread."""
        self._tracker.stop_tracking()


class LightningStyle(Nothing):
    """As Lightning's `DeviceStatsMonitor` does: the flattened `torch.cuda.memory_stats()` at batch start and end."""

    def begin(self) -> None:
        """Read about 120 values."""
        import torch

        torch.cuda.memory_stats()

    def end(self) -> None:
        """Read them again."""
        self.begin()


TOOLS = ("nothing", "torchmem", "stormlog", "lightning")


def missing(name: str) -> str | None:
    """Why a tool cannot run here, or None."""
    if name in {"stormlog", "lightning"} and not has_cuda():
        return "needs PyTorch with a GPU"
    if name == "stormlog" and importlib.util.find_spec("stormlog") is None:
        return "not installed"
    return None


def make(name: str, backend: Backend | None = None, *, by_hand: bool = False) -> Tool:
    """The tool of that name."""
    if name == "torchmem":
        return Torchmem(backend, by_hand=by_hand)
    tools = {"nothing": Nothing, "stormlog": Stormlog, "lightning": LightningStyle}
    return tools[name]()
