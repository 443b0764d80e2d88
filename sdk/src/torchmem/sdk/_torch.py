"""The only file that imports torch: PyTorch's CUDA caching allocator as a `Backend`.

Every call is gated by the session on `is_initialized`; none creates a context. For torch 2.1 and newer: functions
that some version lacks are looked up, and their values are absent there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.cuda._utils import _get_device_index
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchmem.core.backend import Device, OomObserver
from torchmem.core.snapshot import NestedStats, SegmentInfo
from torchmem.sdk._peaks import MemoryModule, UserPeaks
from torchmem.sdk._pending_calls import PendingCalls, raise_soon
from torchmem.sdk._torch_compile import untraced
from torchmem.sdk._torch_devices import describe
from torchmem.sdk._torch_memory import AllocatorReader

_step_callbacks: list[Callable[[int], None]] = []


def _stepped(optimizer: object, *_: object) -> None:
    for callback in tuple(_step_callbacks):
        callback(id(optimizer))


# Once and for good: a step that goes through PyTorch's hooks fails when one of them is removed meanwhile.
register_optimizer_step_post_hook(_stepped)


class TorchBackend:
    """PyTorch's own allocator on every device where this process has a context."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._user_peaks: UserPeaks | None = None
        self._reader = AllocatorReader(torch, os.environ)
        self._pending = PendingCalls(partial(untraced, torch))

    def is_initialized(self) -> bool:
        """`torch.cuda.is_initialized()`: a Python flag, False in forked children."""
        return bool(torch.cuda.is_initialized())

    def call_soon(self, call: Callable[[], None]) -> None:
        """In the main thread, between two bytecodes: then it is not in the driver with the allocator's mutex."""
        self._pending.add(call)

    def devices(self) -> Sequence[Device]:
        """Devices with a primary context of this process (`torch._C._cuda_hasPrimaryContext`)."""
        present = [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]  # noqa: SLF001
        for index in present:
            if index not in self._devices:
                self._devices[index] = describe(torch, index, os.environ)
        return [self._devices[index] for index in present]

    def memory_stats(self, device: int) -> NestedStats | None:
        """The nested form, an eighth of the price of the flattened one; only what this backend keeps."""
        if self._reader.backend() == "pluggable":
            return None
        read = self._user_peaks.stats if self._user_peaks else torch.cuda.memory_stats_as_nested_dict
        return self._reader.kept_stats(read(device))

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Without traces; None where they cannot be left out and history is being recorded, or not native."""
        return self._reader.segments()

    def free_bytes(self, device: int) -> int | None:
        """First value of `torch.cuda.mem_get_info` (cudaMemGetInfo)."""
        return int(torch.cuda.mem_get_info(device)[0])

    def limit_bytes(self, device: int) -> int | None:
        """The memory fraction (known since 2.6) of the device's total."""
        fraction, total = self._reader.fraction(device), self._devices[device].total_bytes
        return None if fraction is None or total is None else int(min(fraction, 1.0) * total)

    def history_enabled(self) -> bool | None:
        """Only the native allocator can record."""
        return self._reader.history_enabled() if self._reader.backend() == "native" else None

    def start_history(self, max_entries: int) -> None:
        """Stacks of allocations only, Python frames only: C++ frames would take minutes to resolve."""
        torch.cuda.memory._record_memory_history(  # noqa: SLF001
            enabled="all", context="alloc", stacks="python", max_entries=max_entries
        )

    def stop_history(self) -> None:
        """Also clears PyTorch's buffer."""
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:
        """`torch.cuda.memory._snapshot`; leaving traces out works as in `memory_snapshot`."""
        if not traces:
            return self._reader.snapshot()
        if self._reader.backend() != "native":
            return None
        return cast("Mapping[str, Any]", torch.cuda.memory._snapshot())  # noqa: SLF001

    def empty_cache(self) -> None:
        """On all devices; a cudaFree during the capture of a CUDA graph would spoil it."""
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()

    def reset_peaks(self, device: int) -> None:
        """`reset_peak_memory_stats`, with the user's `max_memory_*` kept as they were; see `UserPeaks`."""
        if self._user_peaks is None:
            modules = cast("tuple[MemoryModule, ...]", (torch.cuda.memory, torch.cuda))
            self._user_peaks = UserPeaks(modules, lambda given: int(_get_device_index(given, optional=True)))
        self._user_peaks.reset(device)

    def current_stream(self, device: int) -> int | None:
        """Handle of the current stream; no CUDA call."""
        return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001

    def allocator_settings(self) -> Mapping[str, str]:
        """`allocator_settings` of the newest snapshot (since 2.3): what the allocator parsed, not what was set."""
        return self._reader.settings()

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
        _step_callbacks.append(callback)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                _step_callbacks.remove(callback)

        return remove

    def on_oom(self, observer: OomObserver) -> None:
        """Attach for ever; only once CUDA is up (before, it would initialise the driver)."""

        def observe(device: int, requested: int, limit: int, driver_free: int) -> None:
            # Anything raised here would replace the user's OutOfMemoryError; Ctrl-C is still the script's.
            try:
                observer(device, requested, limit, driver_free)
            except Exception:  # noqa: BLE001, S110 - the observer counts its own
                pass
            except BaseException as error:  # noqa: BLE001
                with contextlib.suppress(BaseException):
                    raise_soon(error)

        if self._reader.backend() == "native":
            torch._C._cuda_attach_out_of_memory_observer(untraced(torch, observe))  # noqa: SLF001
