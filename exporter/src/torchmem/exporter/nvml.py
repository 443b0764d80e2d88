"""NVML: the only file that imports `pynvml`. Calls functions by name and maps NVML's return codes.

An unavailable value is None; a failure of NVML, of one GPU or of one call is an exception. The
return codes are nvmlReturn_t of nvml.h, driver 580.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from torchmem.exporter.binding import OutdatedBinding, outdated_binding
from torchmem.exporter.missing_values import MissingValues
from torchmem.exporter.nvml_reasons import code_in_words, reason_in_words

_log = logging.getLogger(__name__)

S = TypeVar("S", bound="DeviceState")
T = TypeVar("T")

SELDOM_SECONDS = 55.0
"""How old a value may be that hardly ever changes, or whose call takes long.

Below a minute, so that a scrape every 60 s, which is never exact, reads it each time.
"""

NOT_SUPPORTED, NOT_FOUND, TIMEOUT, FUNCTION_NOT_FOUND = 3, 6, 10, 13
_INVALID_ARGUMENT, _INSUFFICIENT_SIZE, _ARGUMENT_VERSION_MISMATCH = 2, 7, 25
# An older driver's answer to a newer function or structure.
OTHER_VERSION = {_INVALID_ARGUMENT, FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH}
# Not supported, not permitted, no data: the value is left out. pynvml raises 0 for an empty list.
_UNAVAILABLE = {0, 2, 3, 4, NOT_FOUND, _INSUFFICIENT_SIZE, 13, 14, *range(19, 28), 29}
# Timeout, interrupt, lost, reset required, operating system, GPU not found: the GPU is gone.
_GPU_LOST = {TIMEOUT, 11, 15, 16, 17, 28}
NVML_DOWN = {
    1: "uninitialized",
    9: "driver_not_loaded",
    12: "library_not_found",
    18: "driver_library_version_mismatch",
}
OPEN_FAILED = {
    4: "no_permission",
    13: "function_not_found",
    15: "gpu_is_lost",
    17: "operating_system",
    999: "unknown_error",
}
_NOT_AVAILABLE = {(1 << 32) - 1, (1 << 64) - 1}  # NVML_VALUE_NOT_AVAILABLE of nvml.h
# Member of the nvmlValue_t union by nvmlValueType_t; floating point (0) does not occur here.
_FIELD_MEMBERS = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class NvmlDownError(Exception):
    """NVML as a whole does not respond; `reason` is a value of the label of `nvml_up`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"NVML does not respond: {reason_in_words(reason)}")
        self.reason = reason


class GpuLostError(Exception):
    """One GPU does not respond; `code` is NVML's return code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the GPU does not respond: {code_in_words(code)}")
        self.code = code


class NvmlCallError(Exception):
    """One call failed although its GPU responds; only the value that it would return is missing."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed: {code_in_words(code)}")
        self.code = code


class NvmlLibrary:
    """NVML's functions by name; `missing_values` notes each that is not available.

    `module` is pynvml by default, or an object with the same functions and `NVMLError`. `clock`
    returns Unix seconds, `monotonic` seconds that never go back. `is_wsl`: whether this is Linux
    under Windows, where NVML does not know the processes of Windows.
    """

    def __init__(
        self,
        module: Any = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        is_wsl: bool | None = None,
    ) -> None:
        self._module = module
        self._functions: dict[str, Callable[..., Any]] = {}
        self._constants: dict[Sequence[str], Any] = {}
        self.clock = clock
        self.monotonic = monotonic
        self.is_wsl = "microsoft" in platform.release().lower() if is_wsl is None else is_wsl
        self.missing_values = MissingValues()
        self.array_types: set[type] = set()

    @property
    def module(self) -> Any:
        """The binding itself; raises NvmlDownError where pynvml is not installed."""
        if self._module is None:
            self._module = _import_pynvml()
            outdated = self.outdated_binding
            if outdated:
                _log.warning("%s; replace it: %s", outdated, outdated.remedy)
        return self._module

    @cached_property
    def outdated_binding(self) -> OutdatedBinding | None:
        """What is wrong with the installed pynvml, if anything."""
        return outdated_binding(self.module)

    def require(self, name: str, *arguments: Any) -> Any:
        """Call a function without which nothing can be read; raise NvmlDownError if it fails."""
        try:
            return getattr(self.module, name)(*arguments)
        except self.module.NVMLError as error:
            raise NvmlDownError(_open_failure(int(error.value))) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Return a function's value, or None where this driver, GPU or permission lacks it.

        Raises what `check` raises.
        """
        value, code = self.try_call(name, *arguments)
        if code:
            self.check(name, code)
        return value

    def call_optional(self, name: str, *arguments: Any) -> Any:
        """Like `call`, but return None also if the call fails in an unexpected way."""
        try:
            return self.call(name, *arguments)
        except NvmlCallError:
            return None

    def call_first(self, names: Sequence[str], *arguments: Any) -> Any:
        """Like `call`, for the first function that driver and binding know. Newest first."""
        value, code = None, FUNCTION_NOT_FOUND
        for name in names:
            value, code = self.try_call(name, *arguments)
            if code not in OTHER_VERSION:
                break
        self.check(name, code)
        return value

    def constant(self, *names: str) -> Any:
        """Like `call_first`, for a value that does not change until NVML is closed: it is kept."""
        value = self._constants.get(names)
        if value is None:
            value = self._constants[names] = self.call_first(names)
        return value

    def forget_constants(self) -> None:
        """Forget what was read once, because NVML is closed."""
        self._constants = {}

    def try_call(self, name: str, *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        """Return a function's value and return code, whatever the code is."""
        function = self._functions.get(name) or self._function(name)
        if function is None:
            return None, FUNCTION_NOT_FOUND
        code = _INSUFFICIENT_SIZE
        for _ in (1, 2):  # a list can grow between pynvml's call for its length and the next
            try:
                return function(*arguments, **keywords), 0
            except self.module.NVMLError as error:
                code = int(error.value)
            except UnicodeDecodeError as error:  # text that is not UTF-8, which pynvml decodes
                return text(error.object), 0
            if code != _INSUFFICIENT_SIZE:
                break
        return None, code

    def _function(self, name: str) -> Callable[..., Any] | None:
        function: Callable[..., Any] | None = getattr(self.module, name, None)
        if function is not None:
            self._functions[name] = function
        return function

    def check(self, name: str, code: int) -> None:
        """Return if the code means success or an unavailable value.

        Raises NvmlDownError or GpuLostError when the driver or the GPU does not respond, and
        NvmlCallError for any other failure, such as "driver not loaded" while other calls succeed.
        """
        if code == 0:
            return
        if code in NVML_DOWN and not self._responds():
            raise NvmlDownError(NVML_DOWN[code])
        if code in _GPU_LOST:
            raise GpuLostError(code)
        unavailable = code in _UNAVAILABLE
        self.missing_values.note(logging.INFO if unavailable else logging.WARNING, name, code)
        if not unavailable:
            raise NvmlCallError(name, code)

    def _responds(self) -> bool:
        return self.try_call("nvmlDeviceGetCount")[1] == 0


class DeviceState:
    """What a subject keeps for one GPU between two readings."""

    def release(self, nvml: NvmlLibrary) -> None:
        """Free what NVML allocated for it, before NVML is shut down or when the GPU is gone."""


class NvmlDevice:
    """A GPU or MIG device: calls NVML functions with its handle as the first argument."""

    def __init__(self, nvml: NvmlLibrary, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle
        self._states: dict[type, Any] = {}
        self._constants: dict[tuple[Any, ...], Any] = {}
        self._seldom: dict[Hashable, tuple[float, Any]] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Call `NvmlLibrary.call` with the handle."""
        nvml = self.nvml
        value, code = nvml.try_call(name, self.handle, *arguments)
        if code:
            nvml.check(name, code)
        return value

    def constant(self, name: str, *arguments: Any) -> Any:
        """Like `call`, for a value that does not change as long as NVML is open: it is kept."""
        key = (name, *arguments)
        value = self._constants.get(key)
        if value is None:
            value = self._constants[key] = self.call(name, *arguments)
        return value

    def seldom(self, read: Callable[..., T], *arguments: Hashable) -> T:
        """Return what a function reads from the GPU, at most SELDOM_SECONDS ago.

        For settings and states that hardly ever change: each call of the driver costs a scrape more
        than all that is done with its value.
        """
        value: T = self._at_times((read, *arguments), lambda: read(self, *arguments))
        return value

    def call_seldom(self, name: str) -> Any:
        """Like `call`, but return the value of at most SELDOM_SECONDS ago.

        For settings, and for calls that take the driver a large part of a millisecond or more.
        """
        return self._at_times(name, lambda: self.call(name))

    def _at_times(self, key: Hashable, read: Callable[[], Any]) -> Any:
        now, kept = self.nvml.monotonic(), self._seldom.get(key)
        if kept is None or now - kept[0] >= SELDOM_SECONDS:
            kept = self._seldom[key] = now, read()
        return kept[1]

    def call_first(self, names: Sequence[str], *arguments: Any) -> Any:
        """Call `NvmlLibrary.call_first` with the handle."""
        return self.nvml.call_first(names, self.handle, *arguments)

    def field_values(self, *fields: int | tuple[int, int]) -> list[int | None]:
        """Return the values of nvmlDeviceGetFieldValues, each by its id or by (id, scope)."""
        values = self.call("nvmlDeviceGetFieldValues", list(fields))
        # ctypes creates an array type again unless it is kept, which takes longer than the call.
        self.nvml.array_types.add(type(values))
        return [_field_value(value) for value in values] if values else [None] * len(fields)

    def state(self, kind: type[S]) -> S:
        """Return the object of this type that is kept for the GPU; create it at the first call."""
        if kind not in self._states:
            self._states[kind] = kind()
        state: S = self._states[kind]
        return state

    def release(self) -> None:
        """Forget all state of the GPU, and what was read once or seldom."""
        self._constants, self._seldom = {}, {}
        states, self._states = self._states, {}
        for state in states.values():
            state.release(self.nvml)


def available(value: int | None) -> int | None:
    """Return the value, or None for NVML's all-ones marks that mean "not available"."""
    return None if value in _NOT_AVAILABLE else value


def plausible(value: int | None, maximum: int) -> int | None:
    """Return an available value from 0 to `maximum`, or None: no GPU has more, so it is garbage."""
    known = available(value)
    return None if known is None or not 0 <= known <= maximum else known


def ratio(percent: int | None, maximum: int = 100) -> float | None:
    """Convert a percentage to a ratio; more than `maximum` is garbage."""
    return divided(plausible(percent, maximum), 100)


def thousandths(value: int | None) -> float | None:
    """Convert milliwatts to watts, millijoules to joules."""
    return divided(value, 1000)


def divided(value: int | None, divisor: int) -> float | None:
    """Divide an available value. Unlike multiplying by 0.001, it rounds only once."""
    known = available(value)
    return None if known is None else known / divisor


def multiplied(value: int | None, factor: float) -> float | None:
    """Multiply an available value."""
    known = available(value)
    return None if known is None else known * factor


def text(value: Any) -> str | None:
    """Return text as str; older bindings return bytes. Bytes that are not UTF-8 are escaped."""
    if value is None:
        return None
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def text_field(structure: Any, name: str) -> str | None:
    """Return a text field of a structure, which pynvml decodes when it is read."""
    try:
        return text(getattr(structure, name))
    except UnicodeDecodeError as error:
        return text(error.object)


def _field_value(field: Any) -> int | None:
    member = _FIELD_MEMBERS.get(field.valueType) if field.nvmlReturn == 0 else None
    return None if member is None else available(int(getattr(field.value, member)))


def _open_failure(code: int) -> str:
    return NVML_DOWN.get(code) or OPEN_FAILED.get(code, f"nvml_error_{code}")


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlDownError("pynvml_not_installed") from error
    return pynvml
