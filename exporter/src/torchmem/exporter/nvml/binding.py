"""The door to NVML: the only file that imports `pynvml`. Unsupported values become None, failures typed errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torchmem.exporter.gpu import GpuDownError, NvmlCallError, NvmlDownError

_log = logging.getLogger(__name__)

# The symbols of libnvidia-ml.so.1 that the exporter calls; of several versions the first that is there answers.
SYMBOLS = (
    "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString",
    "nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUUID",
    "nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetJpgUtilization", "nvmlDeviceGetOfaUtilization",
    "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetNumFans", "nvmlDeviceGetFanSpeed_v2", "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkErrorCounter", "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetEccMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    "nvmlDeviceGetProcessUtilization",
    "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmSampleFree", "nvmlGpmMetricsGet",
    "nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
)  # fmt: skip

# Return codes of nvml.h (nvmlReturn_t, driver 580), by what they mean for a reader.
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, TIMEOUT, FUNCTION_NOT_FOUND = 2, 3, 6, 10, 13
_INSUFFICIENT_SIZE = 7
OTHER_VERSION = {
    INVALID_ARGUMENT,
    FUNCTION_NOT_FOUND,
    25,
}  # an older driver's answer to a newer struct or call
# Not supported, not permitted, no data: the value is left out. nvidia-ml-py raises 0 for an empty list of samples.
_ABSENT = {0, 2, 3, 4, 6, _INSUFFICIENT_SIZE, 13, 14, 19, 20, 21, 22, 23, 24, 25, 26, 27, 29}
# Timeout, interrupts, lost, reset required, blocked by the system, not found: the GPU answers nothing any more.
_GPU_DOWN = {TIMEOUT, 11, 15, 16, 17, 28}
_DOWN = {
    1: "uninitialized",
    9: "driver_not_loaded",
    12: "library_not_found",
    18: "driver_library_version_mismatch",
}
_OPEN_FAILED = {
    4: "no_permission",
    13: "function_not_found",
    15: "gpu_is_lost",
    17: "operating_system",
    999: "unknown_error",
}


class Door:
    """Asks the module pynvml, or `module` that behaves like it; logs once what is not given here, and why."""

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._logged: set[tuple[str, int]] = set()

    @property
    def module(self) -> Any:
        """The binding: its functions raise its own NVMLError. Raises NvmlDownError where it is not installed."""
        if self._module is None:
            self._module = _import_binding()
        return self._module

    def demand(self, name: str, *arguments: Any) -> Any:
        """One call on NVML as a whole, without which there is nothing; raises NvmlDownError."""
        try:
            return getattr(self.module, name)(*arguments)
        except self.module.NVMLError as error:
            raise NvmlDownError(_DOWN.get(error.value) or _open_failure(error.value)) from error

    def ask(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """One value; None when this driver, GPU or permission does not give it."""
        value, _ = self.answer((name,), *arguments, **keywords)
        return value

    def ask_first(self, names: Sequence[str], *arguments: Any) -> Any:
        """One value, from the first of the calls that this driver and binding know, newest first."""
        value, _ = self.answer(names, *arguments)
        return value

    def answer(self, names: Sequence[str], *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        """Value and return code.

        Raises NvmlDownError or GpuDownError when driver or GPU do not answer, NvmlCallError for any other failure.
        """
        value, code = None, FUNCTION_NOT_FOUND
        for name in names:
            value, code = self._call(name, *arguments, **keywords)
            if code not in OTHER_VERSION:
                break
        self._judge(name, code)
        return value, code

    def newer(self, name: str, *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        """As `answer`, for a call that an older one can stand in for: a code of OTHER_VERSION is no news yet."""
        value, code = self._call(name, *arguments, **keywords)
        if code not in OTHER_VERSION:
            self._judge(name, code)
        return value, code

    def fields(self, handle: Any, *wanted: int | tuple[int, int]) -> list[int | None]:
        """Field values (nvmlDeviceGetFieldValues), each by its id or by (id, scope)."""
        found = self.ask("nvmlDeviceGetFieldValues", handle, list(wanted))
        return [_field(value) for value in found] if found else [None] * len(wanted)

    def code_of(self, name: str, *arguments: Any) -> int:
        """NVML's return code of a call, 0 when it succeeded; judges nothing."""
        function = getattr(self.module, name, None)
        if function is None:
            return FUNCTION_NOT_FOUND
        try:
            function(*arguments)
        except self.module.NVMLError as error:
            return int(error.value)
        return 0

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        function = getattr(self.module, name, None)
        if function is None:
            return None, FUNCTION_NOT_FOUND
        code = _INSUFFICIENT_SIZE
        for _ in range(
            2
        ):  # a list can grow between nvidia-ml-py's question for its length and the list itself
            try:
                return function(*arguments, **keywords), 0
            except self.module.NVMLError as error:
                code = int(error.value)
            if code != _INSUFFICIENT_SIZE:
                break
        return None, code

    def _judge(self, name: str, code: int) -> None:
        """Return for a value, and for one that is merely absent."""
        if code == 0:
            return
        if code in _DOWN:
            raise NvmlDownError(_DOWN[code])
        if code in _GPU_DOWN:
            raise GpuDownError(code)
        absent = code in _ABSENT
        if (name, code) not in self._logged:
            self._logged.add((name, code))
            level = logging.INFO if absent else logging.WARNING
            _log.log(level, "%s gives no value here: NVML return code %d", name, code)
        if not absent:
            raise NvmlCallError(name, code)


def real(value: int | None) -> int | None:
    """The value, unless it is one of NVML's all-ones marks for not available (nvml.h, NVML_VALUE_NOT_AVAILABLE)."""
    return None if value in {None, (1 << 32) - 1, (1 << 64) - 1} else value


def ratio(percent: int | None) -> float | None:
    """A percentage as a share of one."""
    known = real(percent)
    return None if known is None else known / 100


def scaled(value: int | None, factor: float) -> float | None:
    """A value in another unit."""
    known = real(value)
    return None if known is None else known * factor


def thousandths(value: int | None) -> float | None:
    """Milliwatts as watts, millijoules as joules. Dividing rounds once: 0.001 is no binary number."""
    known = real(value)
    return None if known is None else known / 1000


def text(value: Any) -> str | None:
    """Text, which older bindings give as bytes."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _field(found: Any) -> int | None:
    """A field value by the type that NVML says it has (nvmlValueType_t)."""
    if found.nvmlReturn != 0:
        return None
    member = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}.get(
        found.valueType
    )
    return None if member is None else real(int(getattr(found.value, member)))


def _open_failure(code: int) -> str:
    return _OPEN_FAILED.get(code, f"nvml_error_{code}")


def _import_binding() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlDownError("pynvml_not_installed") from error
    return pynvml
