"""NVML across scrapes: the real driver, reopening after a failure, and one log line per change.

`PyNvml` is the driver's `Nvml`; `Driver` opens any `Nvml` and remembers every GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from torchmem.exporter.gpus import (
    Events,
    GpuFault,
    GpuIdentity,
    GpuLabels,
    GpuValue,
    Nvml,
    Versions,
)
from torchmem.exporter.nvml import (
    NVML_DOWN,
    GpuLostError,
    NvmlCallError,
    NvmlDevice,
    NvmlDownError,
    NvmlLibrary,
)
from torchmem.exporter.nvml_reasons import code_in_words
from torchmem.exporter.reading import Reading
from torchmem.exporter.subjects import identity, xid_events
from torchmem.host.process_table import INITIAL_PID_NAMESPACE

_log = logging.getLogger(__name__)

V = TypeVar("V", bound=GpuValue)

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0

_ALL_OF_NVML: GpuLabels = ("", "")  # in place of a GPU

Calling = Callable[[GpuLabels], AbstractContextManager[object]]


class PyNvml:
    """The `Nvml` of the NVIDIA driver."""

    def __init__(self, library: NvmlLibrary | None = None) -> None:
        self._library = library or NvmlLibrary()
        self._devices: dict[str, NvmlDevice] = {}

    def open(self) -> None:
        """Call nvmlInit; raise NvmlDownError if binding, library or driver are missing."""
        self._library.require("nvmlInit")

    def close(self) -> None:
        """Shut NVML down; failures are ignored."""
        with suppress(NvmlDownError):
            for device in self._devices.values():
                device.release()
            self._library.forget_constants()
            self._library.try_call("nvmlShutdown")

    def pid_namespace(self) -> int | None:
        """Return the initial pid namespace: the driver reports its pids even inside a container."""
        return INITIAL_PID_NAMESPACE

    def versions(self) -> Versions:
        """Read the versions of driver, NVML and CUDA."""
        return identity.read_versions(self._library)

    def count(self) -> int:
        """Call nvmlDeviceGetCount."""
        return int(self._library.require("nvmlDeviceGetCount"))

    def gpu(self, index: int) -> GpuIdentity | GpuFault:
        """Return the identity of a GPU, or a fault if the GPU does not respond."""
        try:
            return identity.read_identity(self._library, index, self._device)
        except (GpuLostError, NvmlCallError) as error:
            return GpuFault(index, error.code)

    def _device(self, uuid: str, handle: object) -> NvmlDevice:
        """Return the device with this UUID, with the handle that is valid now."""
        device = self._devices.get(uuid)
        if device is None:
            device = self._devices[uuid] = NvmlDevice(self._library, handle)
        device.handle = handle
        return device

    def keep(self, uuids: Collection[str]) -> None:
        """Forget the handles and the state of all other GPUs."""
        for uuid in [uuid for uuid in self._devices if uuid not in uuids]:
            self._devices.pop(uuid).release()

    def fault(self, uuid: str) -> int | None:
        """Return the return code of nvmlDeviceGetHandleByUUID, None for success."""
        _, code = self._library.try_call("nvmlDeviceGetHandleByUUID", uuid)
        return code or None

    def subscribe(self, uuids: Sequence[str]) -> Events | None:
        """Create an event set that stays valid while this NVML is closed."""
        gpus = {uuid: self._devices[uuid] for uuid in uuids}
        return xid_events.subscribe(self._library, gpus)

    def read(self, kind: type[V], uuid: str) -> V | None:
        """Read one value of a GPU."""
        return kind.read(self._devices[uuid])

    def end_reading(self) -> None:
        """Log the calls that returned no value."""
        self._library.missing_values.log()


@dataclass(frozen=True, slots=True)
class GpuList:
    """GPUs that respond, by index, and labels of the lost ones with NVML's code if there is one."""

    present: tuple[GpuIdentity, ...]
    lost: Mapping[GpuLabels, int | None]


class Driver:
    """Opens an `Nvml` when needed, and again with growing pauses after a failure.

    `known` holds every GPU that was ever identified, so that a lost one keeps its series.
    """

    def __init__(self, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self.nvml = nvml
        self.known: Mapping[str, GpuIdentity] = {}
        self._clock = clock
        self._is_open = False
        self._by_index: dict[int, GpuIdentity] = {}
        self._failure: NvmlDownError | None = None
        self._retry_seconds = MIN_RETRY_SECONDS
        self._retry_at = 0.0

    def list_gpus(
        self, hung: Collection[GpuLabels] = (), calling: Calling = nullcontext
    ) -> GpuList:
        """Identify every GPU except `hung` ones, each within `calling` of its labels.

        Raises NvmlDownError, also before the next attempt is due.
        """
        self._open()
        answers = self._identify({index for index, _ in hung}, calling)
        _check_any_responds(answers)
        present = {answer.uuid: answer for answer in answers if isinstance(answer, GpuIdentity)}
        faults = [answer for answer in answers if isinstance(answer, GpuFault)]
        lost: dict[GpuLabels, int | None] = {
            self._labels(fault.index, present): fault.code for fault in faults
        }
        listed = {uuid for _, uuid in [*lost, *hung]}
        self.nvml.keep({*present, *(uuid for _, uuid in hung)})
        for uuid, gpu in self.known.items():
            if uuid not in present and uuid not in listed:
                lost[gpu.labels] = self.nvml.fault(uuid)
        self._by_index |= {gpu.index: gpu for gpu in present.values()}
        self.known = {**self.known, **present}
        return GpuList(tuple(present.values()), lost)

    def fail(self, error: NvmlDownError, *, in_use: bool = False) -> None:
        """Close NVML after it stopped responding, and schedule the next attempt.

        `in_use`: a call in another thread has not returned, so NVML must not be shut down.
        """
        # The pause is not over: `_open` has raised the same failure again.
        if error is self._failure:
            return
        if self._failure is None or self._failure.reason != error.reason:
            _log.warning("%s; retrying with pauses of up to %.0f s", error, MAX_RETRY_SECONDS)
        if not in_use:
            self.close()
        self._failure = error
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)

    def succeed(self) -> None:
        """Note that NVML responds: the next failure starts with a short pause again."""
        if self._failure is not None:
            _log.info("NVML responds again")
        self._failure, self._retry_seconds = None, MIN_RETRY_SECONDS

    def close(self) -> None:
        """Close NVML if it is open."""
        if self._is_open:
            self._is_open = False
            self.nvml.close()

    def _open(self) -> None:
        if self._failure is not None and self._clock() < self._retry_at:
            raise self._failure
        if self._is_open:
            return
        self.nvml.open()
        self._is_open, self._by_index = True, {}

    def _identify(self, skipped: Collection[str], calling: Calling) -> list[GpuIdentity | GpuFault]:
        answers = []
        for index in range(self.nvml.count()):
            if str(index) not in skipped:
                with calling(self._labels(index, {})):
                    answers.append(self.nvml.gpu(index))
        return answers

    def _labels(self, index: int, present: Mapping[str, GpuIdentity]) -> GpuLabels:
        """Use the UUID that had this index before, unless that GPU has another index now."""
        before = self._by_index.get(index)
        uuid = before.uuid if before is not None and before.uuid not in present else ""
        return str(index), uuid


def _check_any_responds(answers: Sequence[GpuIdentity | GpuFault]) -> None:
    """Raise NvmlDownError if every GPU returns a code that means NVML as a whole is down."""
    codes = [answer.code if isinstance(answer, GpuFault) else 0 for answer in answers]
    if codes and all(code in NVML_DOWN for code in codes):
        raise NvmlDownError(NVML_DOWN[codes[0]])


class FailureLog:
    """Logs once when a GPU, or NVML as a whole, stops responding, and once when it is back."""

    def __init__(self) -> None:
        self._failed: frozenset[GpuLabels] = frozenset()

    def note(self, reading: Reading, deadline_seconds: float) -> None:
        """Log the changes of this reading. Only a finished one shows that a GPU is back."""
        late = f"within the deadline of {deadline_seconds:g} s; skipping it until it does"
        failures = self._failures(reading, late)
        for labels in failures.keys() - self._failed:
            _log.warning("%s %s", _name(labels), failures[labels])
        has_finished = not reading.down_reason
        for labels in self._failed - failures.keys() if has_finished else ():
            _log.info("%s responds again", _name(labels))
        self._failed = frozenset(failures) if has_finished else self._failed | failures.keys()

    def _failures(self, reading: Reading, late: str) -> Mapping[GpuLabels, str]:
        current = reading.current_gpu
        failures: dict[GpuLabels, str] = {}
        if reading.down_reason == "timeout" and current is None:
            failures[_ALL_OF_NVML] = f"did not respond {late}"
        failures |= {labels: _lost(code) for labels, code in reading.lost.items()}
        failures |= dict.fromkeys(reading.hung, f"did not respond {late}")
        if current is not None:
            collector = reading.collector
            failures[current] = f"did not respond to the collector {collector} {late}"
        return failures


def _lost(code: int | None) -> str:
    return f"is lost: {code_in_words(code)}"


def _name(labels: GpuLabels) -> str:
    index, uuid = labels
    return "NVML" if labels == _ALL_OF_NVML else f"GPU {index} ({uuid or 'UUID unknown'})"
