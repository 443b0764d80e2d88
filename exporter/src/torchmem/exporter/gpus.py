"""The GPUs of a node: their identity, the values read from them, and the protocol `Nvml`.

The driver and the demo implement `Nvml`, and so do the tests' fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torchmem.exporter.binding import OutdatedBinding
from torchmem.exporter.nvml import NvmlDevice
from torchmem.metrics.catalog import MetricSpec

if TYPE_CHECKING:
    from typing_extensions import Self

V = TypeVar("V", bound="GpuValue")

GpuLabels = tuple[str, str]
"""Values of the labels gpu (NVML index) and uuid."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A GPU that responds: NVML index, UUID, and the facts of `nvml_gpu_info`."""

    index: int
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    driver_version: str | None = None
    vbios_version: str | None = None
    compute_mode: str | None = None
    persistence_mode: str | None = None
    labels: GpuLabels = field(init=False, repr=False, compare=False)
    """Values of the labels gpu and uuid."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", (str(self.index), self.uuid))


@dataclass(frozen=True, slots=True)
class GpuFault:
    """An NVML index whose GPU cannot be identified, with the NVML return code."""

    index: int
    code: int


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the driver, of NVML, and the newest CUDA that the driver supports (as 13.0).

    `outdated_binding` is an installed pynvml that lacks functions of NVML, None if it is complete.
    `platform` is "wsl" on Linux under Windows.
    """

    driver: str | None = None
    nvml: str | None = None
    cuda: str | None = None
    outdated_binding: OutdatedBinding | None = None
    platform: str | None = None


class GpuValue:
    """Base class of what is read from a GPU: frozen dataclasses in base units, None if unknown.

    Each class of `torchmem.exporter.subjects` is read as a whole: a call that fails costs this
    value of this GPU and nothing else. The fields that are `series` are those of a metric.
    """

    __slots__ = ()

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Self | None:
        """Read the value; return None where this GPU, driver or permission does not provide it."""
        raise NotImplementedError


def series(
    metric: MetricSpec, by_key: Callable[[Any], Mapping[Any, Any]] | None = None, **options: Any
) -> Any:
    """Return a field of a GpuValue whose value is that of a metric, by default None.

    Of a metric with more labels than a GPU's, the value is a mapping from the last label to
    numbers, or something that `by_key` makes one of. `options` are those of `dataclasses.field`.
    """
    return field(metadata={"metric": metric, "by_key": by_key}, **(options or {"default": None}))


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An event of a GPU; `xid` is the code if the event is an XID error."""

    uuid: str
    name: str
    xid: int | None = None


class Events(Protocol):
    """A subscription to GPU events. One thread uses it; it may outlive the `Nvml` it came from."""

    @property
    def kinds(self) -> Mapping[str, frozenset[str]]:
        """Names of the events that are reported, by GPU UUID."""

    def wait(self, seconds: float) -> GpuEvent | None:
        """Return the next event, None if there is none in time.

        Raises NvmlDownError or GpuLostError.
        """

    def close(self) -> None:
        """End the subscription; never raises."""


class Nvml(Protocol):
    """A source of GPU values.

    Every call may raise NvmlDownError; those with a UUID may also raise GpuLostError and
    NvmlCallError.
    """

    def open(self) -> None:
        """Initialize NVML; called again after a failure."""

    def close(self) -> None:
        """Shut NVML down; never raises."""

    def pid_namespace(self) -> int | None:
        """Return the inode of the pid namespace that process ids belong to, None if unknown."""

    def versions(self) -> Versions:
        """Return the versions of the driver and its libraries."""

    def count(self) -> int:
        """Return the number of GPUs."""

    def gpu(self, index: int) -> GpuIdentity | GpuFault:
        """Identify the GPU at an NVML index. Calls with its UUID are allowed only after this."""

    def keep(self, uuids: Collection[str]) -> None:
        """Release everything that belongs to other GPUs than these."""

    def fault(self, uuid: str) -> int | None:
        """Return NVML's return code for a GPU that lost its index; None if it is without error."""

    def subscribe(self, uuids: Sequence[str]) -> Events | None:
        """Subscribe to the events of these GPUs; None where events are not supported."""

    def read(self, kind: type[V], uuid: str) -> V | None:
        """Read one value of a GPU; None where it is not available."""

    def end_reading(self) -> None:
        """Note that all GPUs have been read; never raises."""
