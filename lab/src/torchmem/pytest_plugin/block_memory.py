"""What a block of a test has used, as the test reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.compare.peak_memory import PeakMemory


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
        return _sums((use.module, use.bytes) for use in self._known.uses)

    @property
    def lines(self) -> dict[str, int]:
        """Bytes at the peak by line, such as model.py:31."""
        return _sums((use.line and use.line.place, use.bytes) for use in self._known.uses)

    @property
    def _known(self) -> PeakMemory:
        if self.memory is None:
            raise RuntimeError("what a block used is known after its end: read it below the block")
        return self.memory


def _sums(pairs: object) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, size in pairs:  # type: ignore[attr-defined]
        if name is not None:
            sums[name] = sums.get(name, 0) + size
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))
