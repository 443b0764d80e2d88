"""What RAPIDS' memory manager (RMM) holds, if the script uses it.

Its Python interface tells a pool's size, and what is in use if the script has wrapped the resource
in an adaptor that counts, as `rmm.statistics.enable_statistics()` does. It tells no free blocks, so
nothing is known of fragmentation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torchmem.sample.libraries import RmmMemory
from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.errors import Stage

MAX_RESOURCES = 16
"""More than any chain of resources and adaptors has."""


class RmmReader(Part):
    """Reads with the statistics, from counters that no other thread holds for long.

    modules: the imported modules by name; RMM is never imported here.
    """

    stage: Stage = "stats"

    def __init__(self, recorder: Recorder, modules: Mapping[str, ModuleType] | None = None) -> None:
        self._recorder = recorder
        self._modules = sys.modules if modules is None else modules
        self._known: dict[int, RmmMemory] = {}

    def after_read(self, step: int | None) -> None:  # noqa: ARG002
        """Read each device on which this process has a context."""
        resources = getattr(self._modules.get("rmm"), "mr", None)
        if resources is None:
            return
        is_pluggable = self._recorder.settings.get("backend") == "pluggable"
        serves = is_pluggable and "rmm.allocators.torch" in self._modules
        known = {
            index: rmm_memory(resources.get_per_device_resource(index), serves_pytorch=serves)
            for index in self._recorder.records()
        }
        self._known = {index: memory for index, memory in known.items() if memory is not None}

    def complete(self, sample: Draft) -> None:
        """Add what is known of each device."""
        for device in sample.devices:
            if device.index in self._known:
                device.add(rmm=self._known[device.index])


def rmm_memory(resource: Any, *, serves_pytorch: bool) -> RmmMemory | None:
    """Return what a resource and those below it tell; None if they tell nothing."""
    pool = used = peak = None
    for each in _chain(resource):
        if pool is None and hasattr(each, "pool_size"):
            pool = int(each.pool_size())
        if used is None and hasattr(each, "allocation_counts"):
            used, peak = each.allocation_counts.current_bytes, each.allocation_counts.peak_bytes
        elif used is None and hasattr(each, "get_allocated_bytes"):
            used = int(each.get_allocated_bytes())
    if pool is None and used is None:
        return None
    return RmmMemory(pool, used, peak, serves_pytorch)


def _chain(resource: Any) -> Iterator[Any]:
    """Yield a resource and those that it takes memory from."""
    for _ in range(MAX_RESOURCES):
        yield resource
        if not hasattr(resource, "get_upstream"):
            return
        resource = resource.get_upstream()
