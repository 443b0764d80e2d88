"""The process's host memory, read rarely: the kernel's files, and PyTorch's pinned memory."""

from __future__ import annotations

import time
from dataclasses import replace

from torchmem.allocator.backend import Backend
from torchmem.host.host_memory import host_memory
from torchmem.sample.sample import HostMemory, PinnedMemory
from torchmem.sdk.safety.cost import HOST_READ_SECONDS


class HostReader:
    """Keeps the newest values. Each method reads at most every HOST_READ_SECONDS."""

    def __init__(self, backend: Backend) -> None:
        self.memory: HostMemory | None = None
        self.pinned: PinnedMemory | None = None
        self._backend = backend
        self._next_memory = self._next_pinned = float("-inf")

    def read_memory(self) -> None:
        """Read the kernel's files; for the background thread, as reading them releases the GIL."""
        now = time.monotonic()
        if now >= self._next_memory:
            self._next_memory = now + HOST_READ_SECONDS
            self.memory = host_memory()

    def read_pinned(self) -> None:
        """Read PyTorch's statistics; for the training thread, like all statistics."""
        now = time.monotonic()
        if now >= self._next_pinned:
            self._next_pinned = now + HOST_READ_SECONDS
            read = self._backend.pinned_memory()
            self.pinned = None if read is None else replace(read, timestamp=time.time())
