"""XID errors and other events, from an event set."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torchmem.exporter.gpu import GpuDownError, NvmlCallError
from torchmem.exporter.nvml.binding import FUNCTION_NOT_FOUND, TIMEOUT, Door, text
from torchmem.exporter.tally import XID
from torchmem.exporter.values import GpuEvent

# nvmlEventType of nvml.h. Left out: single bit errors, performance states and clocks, which come by the thousand.
_KINDS = {
    0x0002: "double_bit_ecc_error",
    0x0008: XID,
    0x0080: "power_source_change",
    0x0100: "mig_config_change",
    0x0200: "single_bit_ecc_error_storm",
    0x0400: "dram_retirement_event",
    0x0800: "dram_retirement_failure",
    0x1000: "non_fatal_poison_error",
    0x2000: "fatal_poison_error",
    0x4000: "gpu_unavailable_error",
    0x8000: "gpu_recovery_action",
}


def subscribe(door: Door, handles: Mapping[str, Any]) -> NvmlEvents | None:
    """Watch the GPUs of these handles by UUID; None when no GPU tells of anything."""
    events = door.ask("nvmlEventSetCreate")
    if events is None:
        return None
    door.demand("nvmlInit")
    watched = NvmlEvents(door, events)
    with ExitStack() as unless_watched:
        unless_watched.callback(watched.close)
        if door.code_of("nvmlEventSetWait_v2", events, 0) == FUNCTION_NOT_FOUND:
            return None
        for uuid, handle in handles.items():
            watched.add(uuid, handle)
        if watched.kinds:
            unless_watched.pop_all()
            return watched
    return None


class NvmlEvents:
    """An event set, with an nvmlInit of its own, which keeps it valid until it is closed."""

    def __init__(self, door: Door, events: Any) -> None:
        self._door = door
        self._events = events
        self.kinds: dict[str, frozenset[str]] = {}

    def add(self, uuid: str, handle: Any) -> None:
        """Register for whatever of our kinds this GPU supports; a GPU that does not answer is left out."""
        try:
            mask = (self._door.ask("nvmlDeviceGetSupportedEventTypes", handle) or 0) & sum(_KINDS)
            code = (
                self._door.answer(("nvmlDeviceRegisterEvents",), handle, mask, self._events)[1]
                if mask
                else -1
            )
        except (GpuDownError, NvmlCallError):
            return
        if code == 0:
            self.kinds[uuid] = frozenset(name for bit, name in _KINDS.items() if mask & bit)

    def wait(self, seconds: float) -> GpuEvent | None:
        """nvmlEventSetWait_v2; None also for an event that cannot be told apart."""
        try:
            data = self._door.module.nvmlEventSetWait_v2(self._events, int(seconds * 1000))
        except self._door.module.NVMLError as error:
            if error.value == TIMEOUT:
                return None
            raise GpuDownError(int(error.value)) from error
        uuid, name = (
            text(self._door.ask("nvmlDeviceGetUUID", data.device)),
            _KINDS.get(data.eventType),
        )
        if uuid is None or name is None:
            return None
        return GpuEvent(uuid, name, int(data.eventData) if name == XID else None)

    def close(self) -> None:
        """Free the set and let NVML go."""
        self._door.code_of("nvmlEventSetFree", self._events)
        self._door.code_of("nvmlShutdown")
