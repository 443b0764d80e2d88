"""The memory of a device: the card's own, the host's, or what software lets the process use.

Takes the torch module as an argument.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torchmem.host.host_memory import machine_limits
from torchmem.host.procfs import PROC
from torchmem.sdk.safety.errors import log


def shares_host_memory(properties: Any) -> bool:
    """Return `cudaDeviceProp.integrated`: GB10, Jetson, N1X, and APUs of AMD.

    A GH200 has memory of its own, and is none of these.
    """
    return bool(getattr(properties, "is_integrated", False))


def total_bytes(torch: Any, index: int, properties: Any) -> int:
    """Return what the process can have of a device.

    Software that divides GPUs, such as HAMi, answers cudaMemGetInfo with its limit, and not always
    cudaGetDeviceProperties.
    """
    return min(int(properties.total_memory), int(torch.cuda.mem_get_info(index)[1]))


class FreeMemory:
    """The free memory of devices, from cudaMemGetInfo and the host; `proc` is /proc."""

    def __init__(self, torch: Any, proc: Path = PROC) -> None:
        self._torch = torch
        self._proc = proc
        self._has_hinted = False

    def read(self, index: int, total: int, *, is_shared: bool) -> int:
        """Return the bytes that can still be allocated on a device of `total` bytes."""
        return self.possible(
            int(self._torch.cuda.mem_get_info(index)[0]), total, is_shared=is_shared
        )

    def possible(self, free: int, total: int, *, is_shared: bool) -> int:
        """Return how much can be free if the driver says `free`.

        On a GPU that shares the host's memory, CUDA says MemFree, which lacks what the page cache
        can give back: MemAvailable counts. HIP says what its own limit (GTT) leaves, which the host
        may not have.
        """
        if free > total:
            self._hint(free, total)
        if is_shared:
            free = self._shared(free)
        return min(free, total)

    def _shared(self, free: int) -> int:
        known = next((limit.available for limit in machine_limits(self._proc)), None)
        if known is None:
            return free
        is_rocm = bool(getattr(self._torch.version, "hip", None))
        return min(free, known) if is_rocm else max(free, known)

    def _hint(self, free: int, total: int) -> None:
        if not self._has_hinted:
            self._has_hinted = True
            log(
                logging.WARNING,
                "The driver says that %d bytes of a GPU of %d bytes are free: no more than all of "
                "it counts as free.",
                free,
                total,
            )
