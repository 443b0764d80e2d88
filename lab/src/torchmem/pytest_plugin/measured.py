"""What was measured of one test, as it travels between processes with the test's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchmem.compare.peak_memory import PeakMemory, peak_of, peak_values
from torchmem.sample.untrusted import convert

ATTRIBUTE = "gpu_memory"
"""The attribute of a test's report that carries the values."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Where a test was measured, and what may explain its figures.

    torch: PyTorch's version, "" if the test never imported it. values_read: how often it read
    from a phantom GPU, whose values are zero. processes: how many processes it started.
    """

    gpu_model: str
    torch: str
    is_phantom: bool
    values_read: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredTest:
    """What a test used on each GPU, by PyTorch's index. left: what was leaked, if that matters."""

    conditions: Conditions
    devices: Mapping[int, PeakMemory]
    left: Mapping[int, PeakMemory] = field(default_factory=dict)

    @property
    def fullest(self) -> PeakMemory | None:
        """The GPU's memory with the highest peak; None if the test used no GPU memory."""
        return max(self.devices.values(), key=lambda each: each.peak_allocated or 0, default=None)

    def values(self) -> dict[str, Any]:
        """Return the JSON object."""
        devices = {str(device): peak_values(memory) for device, memory in self.devices.items()}
        return {"conditions": asdict(self.conditions), "devices": devices}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MeasuredTest:
        """Return what `values` returned. Raises ValueError."""
        devices = {int(device): peak_of(memory) for device, memory in values["devices"].items()}
        return cls(convert(values["conditions"], Conditions), devices)
