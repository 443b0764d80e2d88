"""The process's host memory, read rarely: the kernel's files, and PyTorch's pinned memory."""

from __future__ import annotations

import time
from dataclasses import replace

from torchmem.allocator.backend import Backend
from torchmem.host.host_memory import host_memory
from torchmem.sample.sample import HostMemory, PinnedMemory
from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.safety.cost import HOST_READ_SECONDS
from torchmem.sdk.safety.errors import Stage


class HostReader(Part):
    """Keeps the newest values. Each of the two is read at most every HOST_READ_SECONDS."""

    stage: Stage = "stats"

    def __init__(self, backend: Backend) -> None:
        self._memory: HostMemory | None = None
        self._pinned: PinnedMemory | None = None
        self._backend = backend
        self._next_memory = self._next_pinned = float("-inf")

    def at_tick(self) -> None:
        """Read the kernel's files, here because reading them releases the GIL."""
        now = time.monotonic()
        if now >= self._next_memory:
            self._next_memory = now + HOST_READ_SECONDS
            self._memory = host_memory()

    def after_read(self, step: int | None) -> None:  # noqa: ARG002
        """Read PyTorch's statistics, with all others."""
        now = time.monotonic()
        if now >= self._next_pinned:
            self._next_pinned = now + HOST_READ_SECONDS
            read = self._backend.pinned_memory()
            self._pinned = None if read is None else replace(read, timestamp=time.time())

    def complete(self, sample: Draft) -> None:
        """Add host memory and pinned memory."""
        sample.add(host=self._memory, pinned=self._pinned)
