"""What was measured of one test, or of a block in it.

The values of a test travel between processes with its report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchmem.compare.peak_memory import PeakMemory, added, peak_of, peak_values
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


@dataclass(slots=True)
class BlockMemory:
    """What a block has used, known after its end; sizes in bytes on the fullest GPU.

    Raises RuntimeError before the end of the block.
    """

    memory: PeakMemory | None = None

    @property
    def peak(self) -> int:
        """The highest `torch.cuda.memory_allocated` in the block; 0 without CUDA."""
        return self._known.peak_allocated or 0

    @property
    def reserved(self) -> int:
        """The highest `torch.cuda.memory_reserved` in the block; 0 without CUDA."""
        return self._known.peak_reserved or 0

    @property
    def leaked(self) -> int:
        """What was allocated at the end of the block and not at its beginning."""
        return self._known.leaked or 0

    @property
    def components(self) -> dict[str, int]:
        """Bytes at the peak by component, such as parameters and activations."""
        return self._known.by_component

    @property
    def modules(self) -> dict[str, int]:
        """Bytes at the peak by module, such as encoder.layers.*.attention."""
        return _largest_first((use.module, use.bytes) for use in self._known.uses)

    @property
    def lines(self) -> dict[str, int]:
        """Bytes at the peak by line, such as model.py:31."""
        places = ((use.line.place if use.line else None, use.bytes) for use in self._known.uses)
        return _largest_first(places)

    @property
    def _known(self) -> PeakMemory:
        if self.memory is None:
            raise RuntimeError("what a block used is known after its end: read it below the block")
        return self.memory


def _largest_first(pairs: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    return dict(sorted(added(pairs).items(), key=lambda pair: -pair[1]))
