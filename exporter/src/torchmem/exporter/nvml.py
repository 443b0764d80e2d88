"""NVML through nvidia-ml-py, the only file that imports `pynvml`: unsupported values become None, failures typed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torchmem.exporter.gpu import (
    GpuDownError,
    GpuFault,
    GpuIdentity,
    MemoryInfo,
    NvmlDownError,
    ProcessMemory,
    Utilization,
)
from torchmem.exporter.processes import INITIAL_PID_NAMESPACE

_log = logging.getLogger(__name__)

# Return codes of nvml.h (nvmlReturn_t, driver 580), by what they mean for a reader.
_FUNCTION_NOT_FOUND = 13
_OTHER_VERSION = {2, _FUNCTION_NOT_FOUND, 25}  # an older driver's answer to a newer struct or call
_ABSENT = {2, 3, 4, 6, 7, 13, 21, 25, 26, 27}  # not supported, not permitted, no data: the value is left out
_DOWN = {1: "uninitialized", 9: "driver_not_loaded", 12: "library_not_found", 18: "driver_library_version_mismatch"}
_OPEN_FAILED = {
    4: "no_permission",
    13: "function_not_found",
    15: "gpu_is_lost",
    17: "operating_system",
    999: "unknown_error",
}

_PROCESS_KINDS = ("Compute", "Graphics", "MPSCompute")


class PyNvml:
    """The `Nvml` of a real driver. `binding` is the module pynvml, or an object that behaves like it."""

    def __init__(self, binding: Any = None) -> None:
        self._binding = binding
        self._handles: dict[str, Any] = {}
        self._logged: set[tuple[str, int]] = set()

    def open(self) -> None:
        """nvmlInit; raises NvmlDownError with the reason when there is no module, library or matching driver."""
        self._binding = self._binding or _import_binding()
        try:
            self._binding.nvmlInit()
        except self._binding.NVMLError as error:
            raise NvmlDownError(_reason(error.value)) from error

    def close(self) -> None:
        """Shut NVML down, best effort."""
        if self._binding is not None:
            with contextlib.suppress(self._binding.NVMLError):
                self._binding.nvmlShutdown()

    def pid_namespace(self) -> int | None:
        """The driver counts in the initial pid namespace, also when it is asked from a container."""
        return INITIAL_PID_NAMESPACE

    def gpus(self) -> Sequence[GpuIdentity | GpuFault]:
        """Index, UUID, name, PCI bus id and driver version of every GPU; a fault where one does not answer."""
        try:
            count = self._binding.nvmlDeviceGetCount()
        except self._binding.NVMLError as error:
            raise NvmlDownError(_reason(error.value)) from error
        self._handles = {}
        driver = self._ask("nvmlSystemGetDriverVersion")
        return [self._identify(index, driver) for index in range(count)]

    def fault(self, uuid: str) -> int | None:
        """The return code of nvmlDeviceGetHandleByUUID."""
        try:
            self._binding.nvmlDeviceGetHandleByUUID(uuid)
        except self._binding.NVMLError as error:
            return int(error.value)
        return None

    def memory(self, uuid: str) -> MemoryInfo | None:
        """nvmlDeviceGetMemoryInfo_v2, else v1, whose `used` includes what the driver reserves."""
        handle = self._handles[uuid]
        try:
            info = self._binding.nvmlDeviceGetMemoryInfo(handle, version=self._binding.nvmlMemory_v2)
            return MemoryInfo(info.total, info.used, info.free, info.reserved)
        except self._binding.NVMLError as error:
            if error.value not in _OTHER_VERSION:
                self._judge("nvmlDeviceGetMemoryInfo", error.value)
                return None
        info = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return None if info is None else MemoryInfo(info.total, info.used, info.free, None)

    def utilization(self, uuid: str) -> Utilization | None:
        """nvmlDeviceGetUtilizationRates, percent."""
        rates = self._ask("nvmlDeviceGetUtilizationRates", self._handles[uuid])
        return None if rates is None else Utilization(_ratio(rates.gpu), _ratio(rates.memory))

    def power_watts(self, uuid: str) -> float | None:
        """nvmlDeviceGetPowerUsage, milliwatts."""
        milliwatts = _real(self._ask("nvmlDeviceGetPowerUsage", self._handles[uuid]))
        return None if milliwatts is None else milliwatts / 1000

    def temperatures(self, uuid: str) -> Mapping[str, float]:
        """nvmlDeviceGetTemperatureV, or the older call; the memory's from field NVML_FI_DEV_MEMORY_TEMP."""
        handle, sensor = self._handles[uuid], self._binding.NVML_TEMPERATURE_GPU
        core = self._ask_first(("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), handle, sensor)
        sensors = {"gpu": _real(core), "memory": self._field(handle, self._binding.NVML_FI_DEV_MEMORY_TEMP)}
        return {name: degrees for name, degrees in sensors.items() if degrees is not None}

    def processes(self, uuid: str) -> Sequence[ProcessMemory] | None:
        """Compute, graphics and MPS processes in one list: one pid can stand in several of them."""
        lists = [self._processes_of_kind(uuid, kind) for kind in _PROCESS_KINDS]
        if all(found is None for found in lists):
            return None
        merged: dict[int, int | None] = {}
        for process in (process for found in lists for process in found or ()):
            used = _real(process.usedGpuMemory)
            known = merged.get(process.pid)
            merged[process.pid] = known if used is None else max(used, known or 0)
        return [ProcessMemory(pid, used) for pid, used in merged.items()]

    def _processes_of_kind(self, uuid: str, kind: str) -> Sequence[Any] | None:
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        found: Sequence[Any] | None = self._ask_first((f"{name}_v3", f"{name}_v2"), self._handles[uuid])
        return found

    def _field(self, handle: Any, field_id: int) -> int | None:
        """A field value that NVML gives as an unsigned int."""
        values = self._ask("nvmlDeviceGetFieldValues", handle, [field_id])
        if not values or values[0].nvmlReturn != 0:
            return None
        return _real(values[0].value.uiVal)

    def _identify(self, index: int, driver: Any) -> GpuIdentity | GpuFault:
        try:
            handle = self._binding.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(self._binding.nvmlDeviceGetUUID(handle))
            pci = self._ask("nvmlDeviceGetPciInfo", handle)
            name = self._ask("nvmlDeviceGetName", handle)
        except GpuDownError as error:
            return GpuFault(index, error.code)
        except self._binding.NVMLError as error:
            if error.value in _DOWN:
                raise NvmlDownError(_DOWN[error.value]) from error
            return GpuFault(index, error.value)
        self._handles[uuid] = handle
        bus_id = None if pci is None else _text(pci.busId)
        return GpuIdentity(index, uuid, _optional_text(name), bus_id, _optional_text(driver))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """One call; None when this driver, GPU or permission does not give the value."""
        return self._ask_first((name,), *arguments)

    def _ask_first(self, names: Sequence[str], *arguments: Any) -> Any:
        """The first of the calls that this driver and binding know, newest first."""
        for name in names:
            function = getattr(self._binding, name, None)
            if function is None:
                continue
            try:
                return function(*arguments)
            except self._binding.NVMLError as error:
                self._judge(name, error.value)
                if error.value not in _OTHER_VERSION:
                    return None
        return None

    def _judge(self, name: str, code: int) -> None:
        """Return for a value that is merely absent; raise for a GPU or driver that does not answer."""
        if code in _DOWN:
            raise NvmlDownError(_DOWN[code])
        if code not in _ABSENT:
            raise GpuDownError(code)
        if (name, code) not in self._logged:
            self._logged.add((name, code))
            _log.info("%s gives no value here: NVML return code %d", name, code)


def _import_binding() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlDownError("pynvml_not_installed") from error
    return pynvml


def _reason(code: int) -> str:
    return _DOWN.get(code) or _OPEN_FAILED.get(code, f"nvml_error_{code}")


def _real(value: int | None) -> int | None:
    """The value, unless it is one of NVML's all-ones marks for not available (nvml.h, NVML_VALUE_NOT_AVAILABLE)."""
    return None if value in {None, (1 << 32) - 1, (1 << 64) - 1} else value


def _ratio(percent: int) -> float | None:
    known = _real(percent)
    return None if known is None else known / 100


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)
