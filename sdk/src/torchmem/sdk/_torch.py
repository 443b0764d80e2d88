"""The only file that imports torch: PyTorch's CUDA caching allocator as a `Backend`.

Every call is gated by the session on `is_initialized`; none creates a context. Checked against PyTorch 2.13;
functions that other versions lack are looked up, and their values are absent there.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.cuda._utils import _get_device_index
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchmem.core.backend import Device, OomObserver
from torchmem.core.snapshot import NestedStats, SegmentInfo
from torchmem.sdk._peaks import MemoryModule, UserPeaks


class TorchBackend:
    """PyTorch's own allocator on every device where this process has a context."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._user_peaks: UserPeaks | None = None
        parameters = inspect.signature(torch.cuda.memory.memory_snapshot).parameters
        # Since 2.11; before, a snapshot always copies the user's whole recorded history.
        self._can_skip_traces = "include_traces" in parameters

    def is_initialized(self) -> bool:
        """`torch.cuda.is_initialized()`: a Python flag, False in forked children."""
        return bool(torch.cuda.is_initialized())

    def devices(self) -> Sequence[Device]:
        """Devices with a primary context of this process (`torch._C._cuda_hasPrimaryContext`)."""
        present = [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]  # noqa: SLF001
        for index in present:
            if index not in self._devices:
                self._devices[index] = _describe(index)
        return [self._devices[index] for index in present]

    def memory_stats(self, device: int) -> NestedStats | None:
        """The nested form, an eighth of the price of the flattened one; None for pluggable allocators."""
        if self._allocator_backend() == "pluggable":
            return None
        read = self._user_peaks.stats if self._user_peaks else torch.cuda.memory_stats_as_nested_dict
        return cast("NestedStats", read(device)) or None

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Without traces; None where they cannot be left out and history is being recorded, or not native."""
        if self._allocator_backend() != "native":
            return None
        if self._can_skip_traces:
            return cast("list[SegmentInfo]", torch.cuda.memory.memory_snapshot(include_traces=False))
        if torch._C._cuda_isHistoryEnabled():  # noqa: SLF001
            return None
        return cast("list[SegmentInfo]", torch.cuda.memory.memory_snapshot())

    def free_bytes(self, device: int) -> int | None:
        """First value of `torch.cuda.mem_get_info` (cudaMemGetInfo)."""
        return int(torch.cuda.mem_get_info(device)[0])

    def limit_bytes(self, device: int) -> int | None:
        """`get_per_process_memory_fraction` (since 2.6) of the device's total, None at the default of 1."""
        read = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
        fraction = 1.0 if read is None else float(read(device))
        total = self._devices[device].total_bytes
        return None if fraction >= 1 or total is None else int(fraction * total)

    def reset_peaks(self, device: int) -> None:
        """`reset_peak_memory_stats`, with the user's `max_memory_*` kept as they were; see `UserPeaks`."""
        if self._user_peaks is None:
            modules = cast("tuple[MemoryModule, ...]", (torch.cuda.memory, torch.cuda))
            self._user_peaks = UserPeaks(modules, lambda given: int(_get_device_index(given, optional=True)))
        self._user_peaks.reset(device)

    def allocator_settings(self) -> Mapping[str, str]:
        """`allocator_settings` of the snapshot (since 2.3): what the allocator parsed, not what was set."""
        backend = self._allocator_backend()
        if backend != "native" or not self._can_skip_traces:
            return {"backend": backend}
        raw = torch._C._cuda_memorySnapshot((0, 0, False))  # noqa: SLF001
        return {"backend": backend, **_settings_text(raw.get("allocator_settings", {}))}

    def versions(self) -> Mapping[str, str]:
        """Versions of torch and of the CUDA or ROCm it was built for."""
        known = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
        return {name: str(version) for name, version in known.items() if version}

    def on_init(self, callback: Callable[[], None]) -> None:
        """At once when CUDA is up, else at the end of its initialisation (`torch.cuda._lazy_call`)."""
        if hasattr(torch._C, "_cuda_init"):  # noqa: SLF001
            torch.cuda._lazy_call(callback)  # noqa: SLF001

    def on_step(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """A global post hook of every torch.optim optimizer, older ones included."""
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: callback(id(optimizer)))
        return cast("Callable[[], None]", handle.remove)

    def on_oom(self, observer: OomObserver) -> None:
        """Attach for ever; only once CUDA is up (before, it would initialise the driver)."""

        def observe(device: int, requested: int, limit: int, driver_free: int) -> None:
            # Anything raised here would replace the user's OutOfMemoryError.
            with contextlib.suppress(BaseException):
                observer(device, requested, limit, driver_free)

        if self._allocator_backend() == "native":
            torch._C._cuda_attach_out_of_memory_observer(observe)  # noqa: SLF001

    @staticmethod
    def _allocator_backend() -> str:
        return str(torch.cuda.get_allocator_backend())


def _describe(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(index, _uuid(properties), str(properties.name), int(properties.total_memory))


def _uuid(properties: Any) -> str | None:
    """`GPU-…` as NVML writes it (property since 2.5); a MIG slice is named by CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG-"):
        return visible.split(",")[0]
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    text = str(uuid)
    return text if text.startswith("GPU-") else f"GPU-{text}"


def _settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Flat text by lower-case name; −1 stands for "unlimited" in PyTorch and is left out."""
    flat = {name.lower(): str(value) for name, value in settings.items() if not isinstance(value, dict) and value != -1}
    divisions = settings.get("roundup_power2_divisions", {})
    used = {size: count for size, count in divisions.items() if count}
    if used:
        flat["roundup_power2_divisions"] = ",".join(f"{size}:{count}" for size, count in used.items())
    return {name: text for name, text in flat.items() if text}
