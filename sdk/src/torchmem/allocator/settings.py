"""PyTorch's allocator settings as they are written in the environment, and which of them were not obeyed.

Format: c10/core/AllocatorConfig.h, `ConfigTokenizer` (PyTorch 2.13), the same since 2.1: `key:value,key:[a:b,c:d]`,
white space ignored.

Which allocator settings PyTorch refuses, so that nobody is told to set them.

Source: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h, PyTorch 2.13; each refusal was seen there.

The allocator settings that decide which request succeeds, out of the effective settings of a process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchmem.allocator.sizes import (
    LARGE_BUFFER,
    MIB,
    MIN_BLOCK_SIZE,
    MIN_LARGE_ALLOC,
    SMALL_SIZE,
    get_allocation_size,
    round_size,
)

# The order in which PyTorch looks for them; the second one in ROCm builds, the third since 2.9.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LAST_PARSED = "pytorch_cuda_alloc_conf"
"""Key under which the effective settings hold the string that the allocator parsed last, as PyTorch's snapshot does."""

_SWITCHES = {
    "expandable_segments",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
}
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)(?:,|$)")


def parse_alloc_conf(text: str) -> dict[str, str]:
    """Settings by key, a list with its brackets; what PyTorch itself would refuse is left out."""
    return dict(_PAIR.findall(re.sub(r"\s", "", text)))


def requested_settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Every setting that any of the variables asks for, with its value; one may be there twice."""
    texts = [environment.get(variable, "") for variable in VARIABLES]
    return [setting for text in texts for setting in parse_alloc_conf(text).items()]


def ignored_settings(
    environment: Mapping[str, str], effective: Mapping[str, str]
) -> dict[str, bool]:
    """For each setting of the environment whether the allocator ignored it; without those for which nobody can tell.

    `effective` holds what PyTorch's snapshot calls `allocator_settings`, as text under lower-case names, and the
    `backend`. Once the script has set something else at run time only the backend can be told.
    """
    verdicts: dict[str, bool] = {}
    for name, value in requested_settings(environment):
        ignored = _is_ignored(name, value, environment, effective)
        if ignored is not None:
            verdicts[name] = verdicts.get(name, False) or ignored
    return verdicts


def _is_ignored(
    name: str, value: str, environment: Mapping[str, str], effective: Mapping[str, str]
) -> bool | None:
    backend = effective.get("backend")
    if name == "backend":
        return value != backend if backend in {"native", "cudaMallocAsync"} else None
    if "expandable_segments" not in effective:
        return None
    parsed = effective.get(LAST_PARSED, "")
    if parsed and parsed not in {environment.get(variable) for variable in VARIABLES}:
        return None
    return parse_alloc_conf(parsed).get(name) != value or _is_ineffective(name, value, effective)


def _is_ineffective(name: str, value: str, effective: Mapping[str, str]) -> bool:
    """Whether a value that was parsed is not what the allocator says it uses, as for features this build lacks."""
    if name == "max_split_size_mb" and value.isdecimal():
        return effective.get("max_split_size") != str(int(value) * MIB)
    return name in _SWITCHES and effective.get(name, value) != value


_LARGE_MB = LARGE_BUFFER // MIB
_SMALLEST_LARGE_MB = MIN_LARGE_ALLOC // MIB
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


def rejection_reason(text: str) -> str | None:
    """Why PyTorch 2.13 would refuse settings as in PYTORCH_CUDA_ALLOC_CONF, in one sentence; None if it takes them.

    Only the settings that decide which request succeeds are looked at; a key that is none of those is refused.
    """
    stripped = re.sub(r"\s", "", text)
    conf = parse_alloc_conf(stripped)
    if ",".join(f"{key}:{value}" for key, value in conf.items()) != stripped.rstrip(","):
        return f"{text!r} is not a list of key:value with commas between, each key once."
    for key, value in conf.items():
        check = _CHECKS.get(key)
        if check is None:
            return f"{key} is not one of {', '.join(_CHECKS)}."
        reason = check(value, conf)
        if reason is not None:
            return f"{key} {reason}."
    return None


def _switch(value: str, _: Mapping[str, str]) -> str | None:
    return None if value in {"True", "False"} else "must be True or False"


def _at_least_a_segment(value: str, conf: Mapping[str, str]) -> str | None:
    large = conf.get("large_segment_size_mb", "")
    least = int(large) if large.isdecimal() else _LARGE_MB
    return None if value.isdecimal() and int(value) >= least else f"must be {least} or more"


def _segment(value: str, _: Mapping[str, str]) -> str | None:
    return (
        None
        if value.isdecimal() and int(value) > _SMALLEST_LARGE_MB
        else f"must be over {_SMALLEST_LARGE_MB}"
    )


def _threshold(value: str, _: Mapping[str, str]) -> str | None:
    return (
        None
        if _NUMBER.fullmatch(value) and 0 < float(value) < 1
        else "must be between 0 and 1, without these"
    )


def _share(value: str, _: Mapping[str, str]) -> str | None:
    return (
        None if _NUMBER.fullmatch(value) and 0 <= float(value) <= 1 else "must be between 0 and 1"
    )


def _divisions(value: str, _: Mapping[str, str]) -> str | None:
    counts, sizes = [value], list[str]()
    if value.startswith("["):
        named = parse_alloc_conf(value[1:-1])
        counts, sizes = list(named.values()), [size for size in named if size != ">"]
    return None if counts and all(map(_is_power_of_2, (*counts, *sizes))) else "must be powers of 2"


def _is_power_of_2(text: str) -> bool:
    return text.isdecimal() and int(text).bit_count() == 1


_CHECKS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "expandable_segments": _switch,
    "max_split_size_mb": _at_least_a_segment,
    "max_non_split_rounding_mb": _at_least_a_segment,
    "large_segment_size_mb": _segment,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _threshold,
    "per_process_memory_fraction": _share,
    "throw_on_cudamalloc_oom": _switch,
}


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
            roundup_power2_divisions=_allocator_config_divisions(
                settings.get("roundup_power2_divisions", "")
            ),
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
        divisions = {
            1 << entry: count for entry, count in enumerate(self.roundup_power2_divisions) if count
        }
        values = {
            "expandable_segments": self.expandable_segments,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "max_split_size": self.max_split_size,
            "max_non_split_rounding_mb": self.max_non_split_rounding_size // MIB,
            "large_segment_size_mb": self.large_segment_size // MIB,
            "roundup_power2_divisions": ",".join(
                f"{size}:{count}" for size, count in divisions.items()
            ),
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
        return (
            self.large_segment_size
            if SMALL_SIZE < size < MIN_LARGE_ALLOC
            else get_allocation_size(size)
        )

    def largest_request(self, block: int) -> int:
        """The largest request in bytes that is rounded to at most `block` bytes.

        The inverse of `DeviceCachingAllocator::round_size` (c10/cuda/CUDACachingAllocator.cpp): the largest size up
        to `block` that is rounded to itself.
        """
        if block <= 0:
            return 0
        power = 1 << (block.bit_length() - 1)
        divisions = self._divisions_for(block)
        step = (
            power // divisions
            if divisions > 1 and block > MIN_BLOCK_SIZE * divisions
            else MIN_BLOCK_SIZE
        )
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
        return self.roundup_power2_divisions[
            max(0, min(size.bit_length() - 21, DIVISION_ENTRIES - 1))
        ]


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


def _allocator_config_divisions(text: str) -> tuple[int, ...]:
    """From `1:4,2:4`: divisions by the power of two in MiB; those not named have none."""
    named = {int(size): int(count) for size, count in parse_alloc_conf(text).items()}
    return tuple(named.get(1 << entry, 0) for entry in range(DIVISION_ENTRIES))
