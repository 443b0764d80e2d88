"""PyTorch's peak statistics, which the SDK resets and the user does not see reset."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol


class MemoryModule(Protocol):
    """The part of `torch.cuda.memory` that its other functions read peaks through (2.13)."""

    memory_stats_as_nested_dict: Callable[..., dict[str, Any]]
    reset_peak_memory_stats: Callable[..., None]


class FlatMemoryModule(Protocol):
    """The same of `torch.accelerator.memory`, whose statistics are flattened (2.9 and newer)."""

    memory_stats: Callable[..., dict[str, Any]]
    reset_peak_memory_stats: Callable[..., None]


class UserPeaks:
    """Resets PyTorch's peaks while `max_memory_*` keep their values for the user.

    Replaces two functions in each of `modules` (torch.cuda.memory and torch.cuda) and of
    `flat_modules` (torch.accelerator.memory and torch.accelerator), which read the same peaks.
    `device_index` resolves what users pass as a device.
    """

    def __init__(
        self,
        modules: tuple[MemoryModule, ...],
        device_index: Callable[[Any], int],
        flat_modules: tuple[FlatMemoryModule, ...] = (),
    ) -> None:
        self._stats = modules[0].memory_stats_as_nested_dict
        self._reset = modules[0].reset_peak_memory_stats
        self._device_index = device_index
        self._before: dict[int, dict[tuple[str, str], int]] = {}
        for module in modules:
            module.memory_stats_as_nested_dict = self._stats_for_user
            module.reset_peak_memory_stats = self._reset_by_user
        for flat in flat_modules:
            flat.memory_stats = self._flat_stats_for_user(flat.memory_stats)
            flat.reset_peak_memory_stats = self._reset_by_user

    def stats(self, device: int) -> dict[str, Any]:
        """Return PyTorch's own statistics, with the peaks since the SDK's last reset."""
        return self._stats(device)

    def reset(self, device: int) -> None:
        """Reset PyTorch's peaks and remember them for the user."""
        before = self._before.setdefault(device, {})
        for key, values in _with_peaks(self._stats(device)):
            before[key] = max(before.get(key, 0), values["peak"])
        self._reset(device)

    def discard(self, device: int) -> None:
        """Reset PyTorch's peaks and forget them: the SDK's own allocations caused them."""
        self._reset(device)

    def _stats_for_user(self, device: Any = None) -> dict[str, Any]:
        stats = self._stats(device)
        before = self._before.get(self._device_index(device), {}) if self._before else {}
        for key, values in _with_peaks(stats) if before else ():
            values["peak"] = max(values["peak"], before.get(key, 0))
        return stats

    def _flat_stats_for_user(
        self, read: Callable[..., dict[str, Any]]
    ) -> Callable[..., dict[str, Any]]:
        """Return what stands in for `torch.accelerator.memory_stats`."""

        @wraps(read)
        def stats_for_user(device: Any = None) -> dict[str, Any]:
            stats = read(device)
            before = self._before.get(self._device_index(device), {}) if self._before else {}
            for (name, pool), peak in before.items():
                key = f"{name}.{pool}.peak" if pool else f"{name}.peak"
                if key in stats:
                    stats[key] = max(stats[key], peak)
            return stats

        return stats_for_user

    def _reset_by_user(self, device: Any = None) -> None:
        if self._before:
            self._before.pop(self._device_index(device), None)
        self._reset(device)


def _with_peaks(stats: dict[str, Any]) -> list[tuple[tuple[str, str], dict[str, int]]]:
    """Return the innermost dicts of nested statistics that hold a peak, by statistic and pool."""
    found = []
    for name, value in stats.items():
        if isinstance(value, dict):
            if "peak" in value:
                found.append(((name, ""), value))
            for pool, values in value.items():
                if isinstance(values, dict) and "peak" in values:
                    found.append(((name, pool), values))
    return found
