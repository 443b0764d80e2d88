"""PyTorch's allocator settings: how they are written, which were ignored, and what they do.

Format: c10/core/AllocatorConfig.h, `ConfigTokenizer`, PyTorch 2.13, unchanged since 2.1:
`key:value,key:[a:b,c:d]`, white space ignored. Rejected values: c10/core/AllocatorConfig.cpp and
c10/cuda/CUDAAllocatorConfig.h, PyTorch 2.13; each rejection was observed there.
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
from torchmem.sample.errors import did_you_mean

# In the order in which PyTorch reads them; the second in ROCm builds, the third since 2.9.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
"""Variables that turn caching off, whatever their value."""
LAST_PARSED = "pytorch_cuda_alloc_conf"
"""Key of the effective settings that holds the last string that the allocator parsed."""
ADVICE_VARIABLE = "TORCHMEM_ADVICE"
"""The setting that `torchmem run --apply-advice` has added, as `key:value`, or WITHDRAWN."""
ADVICE_LABEL = "advice"
"""The label of torchmem_process_info with the same value."""
WITHDRAWN = "withdrawn"
"""The value where an earlier attempt of the run got a setting, and this one got none."""

_SWITCHES = {
    "expandable_segments",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
}
# The lookbehind starts a match only where a key starts, which keeps the search linear.
_PAIR = re.compile(r"(?<![^,:\[\]])([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)(?:,|$)")
_INTEGER = re.compile(r"[0-9]{1,18}")


def parse_alloc_conf(text: str) -> dict[str, str]:
    """Return the settings by key; a list keeps its brackets. Text in any other form is ignored."""
    return dict(_PAIR.findall("".join(text.split())))


def format_alloc_conf(conf: Mapping[str, str]) -> str:
    """Return settings as text that `parse_alloc_conf` reads."""
    return ",".join(f"{key}:{value}" for key, value in conf.items())


def requested_settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the key and value of each setting in any of the variables; a key may occur twice."""
    texts = [environment.get(variable, "") for variable in VARIABLES]
    return [setting for text in texts for setting in parse_alloc_conf(text).items()]


def ignored_settings(
    environment: Mapping[str, str], effective: Mapping[str, str]
) -> dict[str, bool]:
    """Return whether the allocator ignored each setting of the environment.

    Settings for which this cannot be determined are left out; after the script has changed settings
    at run time, these are all but the backend.

    Args:
        environment: the environment variables of the process.
        effective: `allocator_settings` of PyTorch's snapshot, as text under lower-case names, and
            the `backend`.
    """
    ignored: dict[str, bool] = {}
    for name, value in requested_settings(environment):
        is_ignored = _is_ignored(name, value, environment, effective)
        if is_ignored is not None:
            ignored[name] = ignored.get(name, False) or is_ignored
    return ignored


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
    """Return whether the allocator ignores a parsed value, as for features that a build lacks."""
    if name == "max_split_size_mb" and _INTEGER.fullmatch(value):
        return effective.get("max_split_size") != str(int(value) * MIB)
    return name in _SWITCHES and effective.get(name, value) != value


_LARGE_MB = LARGE_BUFFER // MIB
_MIN_LARGE_MB = MIN_LARGE_ALLOC // MIB
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def rejection_reason(text: str) -> str | None:
    """Return why PyTorch 2.13 would reject a value of PYTORCH_CUDA_ALLOC_CONF, in one sentence.

    Return None if it accepts the value. Only REQUEST_SETTINGS are checked; other keys are rejected.
    """
    stripped = "".join(text.split())
    conf = parse_alloc_conf(stripped)
    if format_alloc_conf(conf) != stripped.rstrip(","):
        return f"{text!r} is not a list of key:value pairs separated by commas, each key once."
    for key, value in conf.items():
        check = _CHECKS.get(key)
        if check is None:
            known = f"the settings are {', '.join(_CHECKS)}."
            return f"{key} is not an allocator setting: {did_you_mean(key, _CHECKS, known)}"
        reason = check(value, conf)
        if reason is not None:
            return f"{key} {reason}."
    return None


def _require(valid: bool, requirement: str) -> str | None:
    return None if valid else f"must be {requirement}"


def _check_switch(value: str, _: Mapping[str, str]) -> str | None:
    return _require(value in {"True", "False"}, "True or False")


def _check_split_size(value: str, conf: Mapping[str, str]) -> str | None:
    large = conf.get("large_segment_size_mb", "")
    minimum = int(large) if _INTEGER.fullmatch(large) else _LARGE_MB
    valid = bool(_INTEGER.fullmatch(value)) and int(value) >= minimum
    return _require(valid, f"a whole number, {minimum} or more")


def _check_segment_size(value: str, _: Mapping[str, str]) -> str | None:
    valid = bool(_INTEGER.fullmatch(value)) and int(value) > _MIN_LARGE_MB
    return _require(valid, f"a whole number over {_MIN_LARGE_MB}")


def _check_threshold(value: str, _: Mapping[str, str]) -> str | None:
    number = float(value) if _NUMBER.fullmatch(value) else -1.0
    return _require(0 < number < 1, "between 0 and 1, exclusive")


def _check_fraction(value: str, _: Mapping[str, str]) -> str | None:
    number = float(value) if _NUMBER.fullmatch(value) else -1.0
    return _require(0 <= number <= 1, "between 0 and 1")


def _check_divisions(value: str, _: Mapping[str, str]) -> str | None:
    counts, sizes = [value], list[str]()
    if value.startswith("["):
        listed = parse_alloc_conf(value[1:-1])
        counts, sizes = list(listed.values()), [size for size in listed if size != ">"]
    valid = bool(counts) and all(map(_is_power_of_2, (*counts, *sizes)))
    return _require(valid, "powers of 2")


def _is_power_of_2(text: str) -> bool:
    return bool(_INTEGER.fullmatch(text)) and int(text).bit_count() == 1


_CHECKS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "expandable_segments": _check_switch,
    "max_split_size_mb": _check_split_size,
    "max_non_split_rounding_mb": _check_split_size,
    "large_segment_size_mb": _check_segment_size,
    "roundup_power2_divisions": _check_divisions,
    "garbage_collection_threshold": _check_threshold,
    "per_process_memory_fraction": _check_fraction,
    "throw_on_cudamalloc_oom": _check_switch,
}
REQUEST_SETTINGS = frozenset(_CHECKS)
"""The settings that decide which requests succeed."""


# AcceleratorAllocatorConfig::roundup_power2_divisions: one for each power of 2, 1 MiB to 32 GiB.
DIVISION_ENTRIES = 16


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """The settings that decide which requests succeed, in bytes and counts.

    Names and defaults: c10/core/AllocatorConfig.h, PyTorch 2.13. Read from text, the default of
    `max_non_split_rounding_size` is `large_segment_size` (`AcceleratorAllocatorConfig::parseArgs`).
    `known` is False if the settings in effect are unknown, as with torch before 2.3.
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
        """Return the effective settings of a sample.

        Raises ValueError for text that PyTorch does not write.
        """
        split = settings.get("max_split_size")
        large = _mebibytes(settings, "large_segment_size_mb", LARGE_BUFFER)
        return cls(
            known="expandable_segments" in settings,
            expandable_segments=settings.get("expandable_segments") == "True",
            max_split_size=None if split is None else int(split),
            max_non_split_rounding_size=_mebibytes(settings, "max_non_split_rounding_mb", large),
            large_segment_size=large,
            roundup_power2_divisions=_effective_divisions(
                settings.get("roundup_power2_divisions", "")
            ),
            throw_on_cudamalloc_oom=settings.get("throw_on_cudamalloc_oom") == "True",
            garbage_collection_threshold=float(settings.get("garbage_collection_threshold", 0.0)),
        )

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Return the settings of a value of PYTORCH_CUDA_ALLOC_CONF; other keys are ignored.

        Raises ValueError for a value that is not a number. Values that PyTorch rejects, such as a
        max_split_size_mb below large_segment_size_mb, are accepted; see `rejection_reason`.
        """
        conf = parse_alloc_conf(text)
        split = conf.get("max_split_size_mb")
        large = _mebibytes(conf, "large_segment_size_mb", LARGE_BUFFER)
        return cls(
            expandable_segments=conf.get("expandable_segments") == "True",
            max_split_size=None if split is None else int(split) * MIB,
            max_non_split_rounding_size=_mebibytes(conf, "max_non_split_rounding_mb", large),
            large_segment_size=large,
            roundup_power2_divisions=parse_divisions(conf.get("roundup_power2_divisions", "0")),
            throw_on_cudamalloc_oom=conf.get("throw_on_cudamalloc_oom") == "True",
            garbage_collection_threshold=float(conf.get("garbage_collection_threshold", 0.0)),
            per_process_memory_fraction=float(conf.get("per_process_memory_fraction", 1.0)),
        )

    def settings(self) -> dict[str, str]:
        """Return the settings as text that `of` reads, without those that are not set."""
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
        """Return the block size for a request (`DeviceCachingAllocator::round_size`), in bytes."""
        divisions = self._divisions_for(size)
        if divisions <= 1 or size <= MIN_BLOCK_SIZE * divisions:
            return round_size(size)
        step = (1 << (size.bit_length() - 1)) // divisions
        return -(-size // step) * step

    def get_allocation_size(self, size: int) -> int:
        """Return the segment size for a block of `size` bytes (`get_allocation_size`)."""
        return (
            self.large_segment_size
            if SMALL_SIZE < size < MIN_LARGE_ALLOC
            else get_allocation_size(size)
        )

    def largest_request(self, block: int) -> int:
        """Return the largest request that is rounded to at most `block` bytes.

        This is the inverse of `DeviceCachingAllocator::round_size` in
        c10/cuda/CUDACachingAllocator.cpp: the largest size up to `block` that is rounded to itself.
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
        """Return whether a free block may serve a request that fits in it (`get_free_block`)."""
        if self.max_split_size is None:
            return True
        if request < self.max_split_size:
            return block < self.max_split_size
        return block < request + self.max_non_split_rounding_size

    def _divisions_for(self, size: int) -> int:
        """Return the entry of the power of two at or below `size`; see `DIVISION_ENTRIES`."""
        entry = max(0, min(size.bit_length() - 21, DIVISION_ENTRIES - 1))
        return self.roundup_power2_divisions[entry]


DEFAULT_CONFIG = AllocatorConfig()


def _mebibytes(settings: Mapping[str, str], name: str, default: int) -> int:
    return int(settings[name]) * MIB if name in settings else default


def parse_divisions(text: str) -> tuple[int, ...]:
    """Return the entries for a number such as `4`, or a list such as `[256:1,512:2,>:4]` in MiB.

    As in `parseRoundUpPower2Divisions`, the first value also applies to all smaller sizes, a size
    that is not listed has no divisions, and the value of `>` applies to all sizes above the one
    listed before it (1 MiB if none is).
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


def _effective_divisions(text: str) -> tuple[int, ...]:
    """Return the entries for text such as `1:4,2:4`; powers of two in MiB not listed have none."""
    named = {int(size): int(count) for size, count in parse_alloc_conf(text).items()}
    return tuple(named.get(1 << entry, 0) for entry in range(DIVISION_ENTRIES))
