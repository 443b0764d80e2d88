"""What the monitor shows to parts: a snapshot that was measured, and an OOM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmem.allocator.backend import Device
    from torchmem.allocator.settings import AllocatorConfig
    from torchmem.allocator.snapshot import SegmentInfo
    from torchmem.allocator.tensor_groups import TensorGroup
    from torchmem.explain.call_stack import Origin
    from torchmem.explain.lines import Lines
    from torchmem.explain.verdict import Verdict
    from torchmem.sample.sample import Layout, OomRecord


@dataclass(frozen=True, slots=True)
class MeasuredSnapshot:
    """A memory snapshot, the devices that it shows, and the settings at that time.

    segments: all segments, in PyTorch's form.
    timestamp: Unix time.
    """

    segments: Sequence[SegmentInfo]
    timestamp: float
    layouts: Sequence[tuple[Device, Layout]]
    config: AllocatorConfig


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """The arguments of the allocator's OOM observer, in bytes.

    device: torch's index of the device.
    requested: the request, rounded to a segment.
    limit: the memory limit, or the device's total.
    driver_free: free memory at the driver.
    origin: where in the program it was requested.
    gradients_enabled: whether autograd recorded there; None if unknown.
    """

    device: int
    requested: int
    limit: int
    driver_free: int
    origin: Origin | None = None
    gradients_enabled: bool | None = None


@dataclass(frozen=True, slots=True)
class OomObservation:
    """What is only known inside the observer.

    `device` is torch's index, and `layout` was measured from `snapshot`. For the other fields, see
    `torchmem.explain.oom_report.OomReport`.
    """

    device: int
    oom: OomRecord
    driver_free_bytes: int
    limit_bytes: int | None
    layout: Layout | None
    layout_before: Layout | None
    origin: Origin | None = None
    lines: Lines | None = None
    verdict: Verdict | None = None
    snapshot: MeasuredSnapshot | None = None
    tensors: tuple[TensorGroup, ...] = ()
    gradients_enabled: bool | None = None
    last_error_bytes: int | None = None


@dataclass(slots=True)
class Oom:
    """One OOM. Each part may add to `observation`, for the parts after it.

    failed: the request to PyTorch's allocator; None for the OOM of another library.
    observation: None if the state could not be read.
    """

    failed: FailedAllocation | None
    observation: OomObservation | None
