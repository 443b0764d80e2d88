"""The limits of one test, from `@pytest.mark.gpu_memory(...)` and `with gpu_memory(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torchmem.allocator.sizes import format_size, parse_size
from torchmem.compare.peak_memory import PeakMemory
from torchmem.sample.errors import UsageError, did_you_mean

EXAMPLE = '@pytest.mark.gpu_memory(peak="6 GiB")'


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Limits in bytes, None for none, and where the test runs.

    peak, reserved: of `torch.cuda.max_memory_allocated` and `max_memory_reserved`. leak: what may
    still be allocated when the test's function has returned. gpu_model: the phantom GPU's model.
    world_size, rank: the test runs as this rank of so many; it does not wait for the others.
    """

    peak: int | None = None
    reserved: int | None = None
    leak: int | None = None
    gpu_model: str | None = None
    world_size: int | None = None
    rank: int = 0

    @classmethod
    def of(cls, keywords: Mapping[str, Any], positional: tuple[Any, ...] = ()) -> MemoryLimits:
        """Return the limits of a marker or a call. Raises UsageError for what it does not know."""
        names = [field.name for field in fields(cls)]
        if positional:
            raise UsageError(f"gpu_memory takes only named limits: write {EXAMPLE}.")
        for name in keywords:
            if name not in names:
                advice = did_you_mean(name, names, f"the names are {', '.join(names)}.")
                raise UsageError(f"gpu_memory has no limit {name!r}: {advice}")
        known = {name: _size(name, keywords.get(name)) for name in ("peak", "reserved", "leak")}
        given = {name: value for name, value in keywords.items() if name not in known}
        values: dict[str, Any] = {**known, **given}
        limits = cls(**values)
        limits.check_ranks()
        return limits

    def check_ranks(self) -> None:
        """Raise UsageError if there is no such rank."""
        world = self.world_size
        if world is None and self.rank == 0:
            return
        if not (isinstance(world, int) and isinstance(self.rank, int) and 0 <= self.rank < world):
            raise UsageError(
                f"there is no rank {self.rank!r} of world_size={world!r}: write for example "
                "world_size=8, rank=0."
            )

    def leaks(self, memory: PeakMemory) -> bool:
        """Whether more is left than allowed."""
        return self.leak is not None and (memory.leaked or 0) > self.leak

    def problems(self, memory: PeakMemory) -> Iterator[str]:
        """Yield a sentence for each limit that is exceeded."""
        rows = (
            ("peak allocated", memory.peak_allocated, self.peak),
            ("peak reserved", memory.peak_reserved, self.reserved),
            ("leaked", memory.leaked, self.leak),
        )
        for name, size, limit in rows:
            if size is not None and limit is not None and size > limit:
                more = format_size(size - limit)
                yield f"{name} {format_size(size)}, limit {format_size(limit)}: {more} too much."


def _size(name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, str):
        if value.strip() == "0":
            return 0
        try:
            return parse_size(value)
        except ValueError as error:
            raise UsageError(f"gpu_memory({name}=...): {error}.") from None
    raise UsageError(f"gpu_memory({name}={value!r}) is not a size: write it as '6 GiB'.")
