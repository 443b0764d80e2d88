"""Managed memory (cudaMallocManaged) of this process, as paged optimizers of bitsandbytes use it.

PyTorch's allocator does not know it, and NVML counts it as used by no process.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.safety.cost import HOST_READ_SECONDS
from torchmem.sdk.safety.errors import Stage

_BITSANDBYTES = "bitsandbytes.functional"


def managed_bytes(modules: Mapping[str, Any]) -> Mapping[int, int]:
    """Return the bytes of all paged tensors by torch's index of their device.

    Source: `GlobalPageManager` and `get_paged` of bitsandbytes/functional.py, 0.38 to 0.48. The
    bytes are on the device or on the host, as the driver moves them.
    """
    manager = getattr(modules.get(_BITSANDBYTES), "GlobalPageManager", None)
    found: Counter[int] = Counter()
    for tensor in tuple(getattr(getattr(manager, "_instance", None), "paged_tensors", ())):
        found[tensor.page_deviceid or 0] += tensor.numel() * tensor.element_size()
    return found


class ManagedMemory(Part):
    """Adds managed memory to the devices. It is read at most every HOST_READ_SECONDS."""

    stage: Stage = "stats"

    def __init__(self, modules: Mapping[str, Any] = sys.modules) -> None:
        self._modules = modules
        self._bytes: Mapping[int, int] = {}
        self._next = float("-inf")

    def after_read(self, step: int | None) -> None:  # noqa: ARG002
        """Count the tensors."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + HOST_READ_SECONDS
            self._bytes = managed_bytes(self._modules)

    def complete(self, sample: Draft) -> None:
        """Add the bytes of each device that has some."""
        for device in sample.devices:
            size = self._bytes.get(device.index)
            if size:
                device.add(managed_bytes=size)
