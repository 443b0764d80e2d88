"""A fake NVML made of plain values, for the demo and for tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from torchmem.exporter.gpus import Events, GpuEvent, GpuFault, GpuIdentity, GpuValue, Versions
from torchmem.exporter.nvml import GpuLostError, NvmlDownError
from torchmem.host.procfs import pid_namespace

V = TypeVar("V", bound=GpuValue)

_NOT_FOUND = 6  # NVML_ERROR_NOT_FOUND


class FakeGpu:
    """A GPU with at most one value of each type of `torchmem.exporter.subjects`.

    `event_kinds`: names of the events that it reports. With `error_code` every call on it fails
    with that NVML return code, as on a GPU that is lost.
    """

    def __init__(
        self,
        identity: GpuIdentity,
        *values: GpuValue | None,
        event_kinds: Collection[str] = (),
        error_code: int | None = None,
    ) -> None:
        self.identity = identity
        self.values = {type(value): value for value in values if value is not None}
        self.event_kinds = frozenset(event_kinds)
        self.error_code = error_code


@dataclass(slots=True)
class FakeEvents:
    """Events that a test puts into the queue `coming`; an exception in it is raised.

    `waits` counts the calls of `wait`.
    """

    kinds: Mapping[str, frozenset[str]]
    coming: SimpleQueue[GpuEvent | Exception] = field(default_factory=SimpleQueue)
    is_closed: bool = False
    waits: int = 0

    def wait(self, seconds: float) -> GpuEvent | None:
        """Return the next event of the queue."""
        self.waits += 1
        try:
            event = self.coming.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> None:
        """Set `is_closed`."""
        self.is_closed = True


class FakeNvml:
    """An `Nvml` whose GPUs come from `gpus`, which is called in each reading.

    If `gpus` raises NvmlDownError, NVML does not respond. Process ids belong to the pid namespace
    `namespace`, by default this process's. `on_call` is called at the start of every call, with the
    name of the method, for `read` the type of the value, and with the index or the UUID of the GPU:
    it can count, block or raise. `subscriptions` holds every event subscription.
    """

    def __init__(
        self,
        gpus: Callable[[], Sequence[FakeGpu | GpuFault]],
        versions: Versions | None = None,
        *,
        namespace: int | None = None,
        on_call: Callable[[object, object], None] = lambda _call, _gpu: None,
    ) -> None:
        self._list_gpus = gpus
        self._versions = versions or Versions()
        self._namespace = namespace or pid_namespace()
        self._on_call = on_call
        self._listed: Sequence[FakeGpu | GpuFault] = ()
        self._gpus: dict[str, FakeGpu] = {}
        self.subscriptions: list[FakeEvents] = []

    @classmethod
    def of(cls, *gpus: FakeGpu | GpuFault) -> FakeNvml:
        """Create a fake with fixed GPUs."""
        return cls(lambda: gpus)

    @classmethod
    def down(cls, reason: str) -> FakeNvml:
        """Create a fake that never responds."""

        def fail() -> Sequence[FakeGpu]:
            raise NvmlDownError(reason)

        return cls(fail)

    def open(self) -> None:
        """Do nothing."""
        self._on_call("open", None)

    def close(self) -> None:
        """Do nothing."""
        self._on_call("close", None)

    def pid_namespace(self) -> int | None:
        """Return the pid namespace of the listed processes."""
        return self._namespace

    def versions(self) -> Versions:
        """Return the given versions."""
        return self._versions

    def count(self) -> int:
        """Call `gpus` and return their number."""
        self._on_call("count", None)
        self._listed = self._list_gpus()
        self._gpus = {gpu.identity.uuid: gpu for gpu in self._listed if isinstance(gpu, FakeGpu)}
        return len(self._listed)

    def gpu(self, index: int) -> GpuIdentity | GpuFault:
        """Return the identity or the fault of a listed GPU."""
        self._on_call("gpu", index)
        gpu = self._listed[index]
        return gpu.identity if isinstance(gpu, FakeGpu) else gpu

    def keep(self, uuids: Collection[str]) -> None:
        """Do nothing."""

    def fault(self, uuid: str) -> int | None:
        """Return NVML_ERROR_NOT_FOUND for a GPU that is not listed."""
        return None if uuid in self._gpus else _NOT_FOUND

    def subscribe(self, uuids: Sequence[str]) -> Events | None:
        """Subscribe to the event kinds of the GPUs; None if they have none."""
        self._on_call("subscribe", None)
        kinds = {uuid: self._gpus[uuid].event_kinds for uuid in uuids}
        kinds = {uuid: names for uuid, names in kinds.items() if names}
        if not kinds:
            return None
        self.subscriptions.append(FakeEvents(kinds))
        return self.subscriptions[-1]

    def read(self, kind: type[V], uuid: str) -> V | None:
        """Return the GPU's value of this type."""
        self._on_call(kind, uuid)
        gpu = self._gpus[uuid]
        if gpu.error_code is not None:
            raise GpuLostError(gpu.error_code)
        value = gpu.values.get(kind)
        return value if isinstance(value, kind) else None

    def end_reading(self) -> None:
        """Do nothing."""
