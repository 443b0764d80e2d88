"""The allocator settings that decide which request succeeds, out of the effective settings of a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchmem.core.alloc_conf import parse_alloc_conf
from torchmem.core.sizes import (
    LARGE_BUFFER,
    MIB,
    MIN_BLOCK_SIZE,
    MIN_LARGE_ALLOC,
    SMALL_SIZE,
    get_allocation_size,
    round_size,
)

# AcceleratorAllocatorConfig::roundup_power2_divisions: one entry for each power of two from 1 MiB to 32 GiB.
DIVISION_ENTRIES = 16


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings in bytes and counts, named as in c10/core/AllocatorConfig.h (PyTorch 2.13), with its defaults.

    `known`: whether these are the settings in effect; torch before 2.3 does not tell them.
    """

    known: bool = True
    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding_size: int = LARGE_BUFFER
    large_segment_size: int = LARGE_BUFFER
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_ENTRIES
    throw_on_cudamalloc_oom: bool = False
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> AllocatorConfig:
        """From the effective settings of a sample; raises ValueError for text that PyTorch does not write."""
        split = settings.get("max_split_size")
        return cls(
            known="expandable_segments" in settings,
            expandable_segments=settings.get("expandable_segments") == "True",
            max_split_size=None if split is None else int(split),
            max_non_split_rounding_size=_mebibytes(settings, "max_non_split_rounding_mb"),
            large_segment_size=_mebibytes(settings, "large_segment_size_mb"),
            roundup_power2_divisions=_divisions(settings.get("roundup_power2_divisions", "")),
            throw_on_cudamalloc_oom=settings.get("throw_on_cudamalloc_oom") == "True",
            garbage_collection_threshold=float(settings.get("garbage_collection_threshold", 0.0)),
        )

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """From a string as in PYTORCH_CUDA_ALLOC_CONF; keys that decide no request are left aside.

        Raises ValueError for a value that is not a number. What PyTorch itself refuses, such as a max_split_size_mb
        below large_segment_size_mb, is not looked for.
        """
        conf = parse_alloc_conf(text)
        split = conf.get("max_split_size_mb")
        return cls(
            expandable_segments=conf.get("expandable_segments") == "True",
            max_split_size=None if split is None else int(split) * MIB,
            max_non_split_rounding_size=_mebibytes(conf, "max_non_split_rounding_mb"),
            large_segment_size=_mebibytes(conf, "large_segment_size_mb"),
            roundup_power2_divisions=parse_divisions(conf.get("roundup_power2_divisions", "0")),
            throw_on_cudamalloc_oom=conf.get("throw_on_cudamalloc_oom") == "True",
            garbage_collection_threshold=float(conf.get("garbage_collection_threshold", 0.0)),
            per_process_memory_fraction=float(conf.get("per_process_memory_fraction", 1.0)),
        )

    def settings(self) -> dict[str, str]:
        """The settings as text, as `of` reads them; without what is not set."""
        divisions = {1 << entry: count for entry, count in enumerate(self.roundup_power2_divisions) if count}
        values = {
            "expandable_segments": self.expandable_segments,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "max_split_size": self.max_split_size,
            "max_non_split_rounding_mb": self.max_non_split_rounding_size // MIB,
            "large_segment_size_mb": self.large_segment_size // MIB,
            "roundup_power2_divisions": ",".join(f"{size}:{count}" for size, count in divisions.items()),
            "throw_on_cudamalloc_oom": self.throw_on_cudamalloc_oom,
        }
        return {name: str(value) for name, value in values.items() if value not in (None, "")}

    def round_size(self, size: int) -> int:
        """Size in bytes of the block that serves a request (`DeviceCachingAllocator::round_size`)."""
        divisions = self._divisions_for(size)
        if divisions <= 1 or size <= MIN_BLOCK_SIZE * divisions:
            return round_size(size)
        step = (1 << (size.bit_length() - 1)) // divisions
        return -(-size // step) * step

    def get_allocation_size(self, size: int) -> int:
        """Size in bytes of the segment for a block of `size` bytes (`get_allocation_size`)."""
        return self.large_segment_size if SMALL_SIZE < size < MIN_LARGE_ALLOC else get_allocation_size(size)

    def largest_request(self, block: int) -> int:
        """The largest request in bytes that is rounded to at most `block` bytes.

        The inverse of `DeviceCachingAllocator::round_size` (c10/cuda/CUDACachingAllocator.cpp): the largest size up
        to `block` that is rounded to itself.
        """
        if block <= 0:
            return 0
        power = 1 << (block.bit_length() - 1)
        divisions = self._divisions_for(block)
        step = power // divisions if divisions > 1 and block > MIN_BLOCK_SIZE * divisions else MIN_BLOCK_SIZE
        return block // step * step

    def may_use(self, block: int, request: int) -> bool:
        """Whether a free block may serve a request that it is large enough for (`get_free_block`, oversize rules)."""
        if self.max_split_size is None:
            return True
        if request < self.max_split_size:
            return block < self.max_split_size
        return block < request + self.max_non_split_rounding_size

    def _divisions_for(self, size: int) -> int:
        """`AcceleratorAllocatorConfig::roundup_power2_divisions(size)`: the entry of the power of two below."""
        return self.roundup_power2_divisions[max(0, min(size.bit_length() - 21, DIVISION_ENTRIES - 1))]


DEFAULT_CONFIG = AllocatorConfig()


def _mebibytes(settings: Mapping[str, str], name: str) -> int:
    return int(settings[name]) * MIB if name in settings else LARGE_BUFFER


def parse_divisions(text: str) -> tuple[int, ...]:
    """Entries from `4`, or from a list such as `[256:1,512:2,>:4]` with sizes in MiB.

    As in `parseRoundUpPower2Divisions`: the first value also holds for all smaller sizes, a size that is not named has
    none, and the value of `>` holds for all sizes above the one named before it (1 MiB if none was).
    """
    if not text.startswith("["):
        return (int(text),) * DIVISION_ENTRIES
    entries = [0] * DIVISION_ENTRIES
    index = 0
    for position, (size, count) in enumerate(parse_alloc_conf(text[1:-1]).items()):
        if size == ">":
            entries[index + 1 :] = [int(count)] * (DIVISION_ENTRIES - index - 1)
            continue
        index = min(int(size).bit_length() - 1, DIVISION_ENTRIES - 1)
        first = index if position else 0
        entries[first : index + 1] = [int(count)] * (index + 1 - first)
    return tuple(entries)


def _divisions(text: str) -> tuple[int, ...]:
    """From `1:4,2:4`: divisions by the power of two in MiB; those not named have none."""
    named = {int(size): int(count) for size, count in parse_alloc_conf(text).items()}
    return tuple(named.get(1 << entry, 0) for entry in range(DIVISION_ENTRIES))
