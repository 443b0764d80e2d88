"""The allocator settings of a recording, and the ones to try in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchmem.allocator.settings import (
    DEFAULT_CONFIG,
    LAST_PARSED,
    REQUEST_SETTINGS,
    AllocatorConfig,
    format_alloc_conf,
    parse_alloc_conf,
    parse_divisions,
    rejection_reason,
)
from torchmem.allocator.sizes import MIB
from torchmem.explain.remedies import (
    GARBAGE_COLLECTION_THRESHOLD,
    SPLIT_SIZES_MB,
)
from torchmem.sample.errors import UsageError
from torchmem.trace.recording import Recording

ROUNDUP_DIVISIONS = (2, 4, 8, 16)
"""Fewer divisions give fewer sizes, which are reused more often, but waste more in each block."""
COMBINED_DIVISIONS = (2, 8)
"""Those that are also tried together with other settings."""
GC_MEMORY_FRACTION = 0.95
"""The garbage collection runs only with a memory fraction below 1."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting to try: its name for people, its text, its meaning, or why it is not tried."""

    name: str
    conf: str
    config: AllocatorConfig = DEFAULT_CONFIG
    refused: str | None = None


def recorded_settings(recording: Recording) -> Candidate:
    """Return the settings that a recording was made under.

    Snapshots of PyTorch before 2.3 do not contain them; whether expandable segments were on follows
    from the segments.

    Raises:
        UsageError: the snapshot has a value that no PyTorch writes.
    """
    settings = recording.settings
    parsed = last_parsed(recording)
    simulated = {key: value for key, value in parsed.items() if key in REQUEST_SETTINGS}
    try:
        config = _effective(AllocatorConfig.parse(format_alloc_conf(simulated)), settings)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(
            f"{recording.name}: allocator_settings has a value that PyTorch does not write."
        ) from None
    if not settings and any(segment.is_expandable for segment in recording.segments):
        config = replace(config, expandable_segments=True)
    return Candidate("recorded", conf_text(config), config)


def last_parsed(recording: Recording) -> dict[str, str]:
    """Return the settings that the recorded process set, by their names."""
    return parse_alloc_conf(str(recording.settings.get(LAST_PARSED.upper()) or ""))


def torch_versions(recording: Recording) -> Mapping[str, str]:
    """Return the version of PyTorch that made a recording, or the oldest possible one.

    A capture names it. A plain snapshot does not, but has this setting since PyTorch 2.13. Empty
    if nothing is known.
    """
    since = "2.13" if "max_cached_size" in recording.settings else ""
    version = recording.facts.torch_version or since
    return {"torch": version} if version else {}


def conf_text(config: AllocatorConfig) -> str:
    """Return settings as in PYTORCH_CUDA_ALLOC_CONF, without those at their default."""
    default = DEFAULT_CONFIG
    fraction = config.per_process_memory_fraction
    parts = {
        "expandable_segments": config.expandable_segments or None,
        "max_split_size_mb": config.max_split_size and config.max_split_size // MIB,
        "max_non_split_rounding_mb": _megabytes_unless(
            config.large_segment_size, config.max_non_split_rounding_size
        ),
        "large_segment_size_mb": _megabytes_unless(
            default.large_segment_size, config.large_segment_size
        ),
        "roundup_power2_divisions": _divisions_text(config.roundup_power2_divisions),
        "garbage_collection_threshold": config.garbage_collection_threshold or None,
        "per_process_memory_fraction": None if fraction == 1 else fraction,
        "throw_on_cudamalloc_oom": config.throw_on_cudamalloc_oom or None,
    }
    return format_alloc_conf({key: str(value) for key, value in parts.items() if value is not None})


def candidate(name: str, conf: str, *, gpu_known: bool = True) -> Candidate:
    """Return a setting, refused if PyTorch would refuse it or if it has no effect here."""
    reason = rejection_reason(conf)
    if reason is not None:
        return Candidate(name, conf, refused=reason)
    config = AllocatorConfig.parse(conf)
    if config.garbage_collection_threshold and not gpu_known:
        reason = "It is a share of the GPU's memory, which is unknown."
    elif config.garbage_collection_threshold and config.per_process_memory_fraction == 1:
        reason = "It has no effect without a memory fraction below 1."
    elif config.per_process_memory_fraction < 1 and not gpu_known:
        reason = "It is a share of the GPU's memory, which is unknown."
    return Candidate(name, conf, config, reason)


def candidates(
    recording: Recording,
    recorded: Candidate,
    given: Sequence[str] | None,
    *,
    gpu_known: bool,
) -> list[Candidate]:
    """Return the given settings; if None, those worth trying, the simplest first.

    Duplicates and the recorded settings are left out.
    """
    if given is not None:
        texts = dict.fromkeys(given)
        return [candidate(text or "default", text, gpu_known=gpu_known) for text in texts]
    requests = (event.size for event in recording.events if event.action in {"alloc", "oom"})
    largest = max(requests, default=0)
    seen, found = {recorded.config}, []
    for name, conf in _texts(largest, recorded.config):
        setting = candidate(name, conf, gpu_known=gpu_known)
        if setting.refused is not None or setting.config not in seen:
            seen.add(setting.config)
            found.append(setting)
    return found


def _texts(largest: int, recorded: AllocatorConfig) -> Iterator[tuple[str, str]]:
    expandable = "expandable_segments:True"
    yield "default", ""
    yield "expandable segments", expandable
    for size in SPLIT_SIZES_MB:
        if size * MIB <= largest:  # otherwise no block is that large, and the setting has no effect
            yield f"split up to {size} MiB", f"max_split_size_mb:{size}"
    for count in ROUNDUP_DIVISIONS:
        yield f"rounded sizes, {count} divisions", f"roundup_power2_divisions:{count}"
    collection = f"garbage_collection_threshold:{GARBAGE_COLLECTION_THRESHOLD}"
    limit = f"per_process_memory_fraction:{GC_MEMORY_FRACTION}"
    yield "garbage collection", f"{collection},{limit}"
    for count in COMBINED_DIVISIONS:
        rounded = f"roundup_power2_divisions:{count}"
        yield f"expandable segments, {count} divisions", f"{expandable},{rounded}"
    if not recorded.expandable_segments:
        config = replace(recorded, expandable_segments=True)
        yield "recorded with expandable segments", conf_text(config)
    if not any(recorded.roundup_power2_divisions):
        for count in COMBINED_DIVISIONS:
            config = replace(recorded, roundup_power2_divisions=parse_divisions(str(count)))
            yield f"recorded with {count} divisions", conf_text(config)


def _effective(config: AllocatorConfig, settings: Mapping[str, object]) -> AllocatorConfig:
    """Override what was last parsed with what the allocator reports that it uses."""
    if "expandable_segments" in settings:
        config = replace(config, expandable_segments=settings["expandable_segments"] is True)
    # PyTorch reports -1 for unlimited.
    split = settings.get("max_split_size")
    if isinstance(split, int):
        config = replace(config, max_split_size=split if split > 0 else None)
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, (int, float)):
        config = replace(config, garbage_collection_threshold=float(threshold))
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        by_size = {int(size): int(count) for size, count in divisions.items()}
        entries = range(len(config.roundup_power2_divisions))
        counts = tuple(by_size.get(1 << entry, 0) for entry in entries)
        config = replace(config, roundup_power2_divisions=counts)
    return config


def _megabytes_unless(default: int, size: int) -> int | None:
    return None if size == default else size // MIB


def _divisions_text(divisions: tuple[int, ...]) -> str | None:
    if not any(divisions):
        return None
    if len(set(divisions)) == 1:
        return str(divisions[0])
    entries = ",".join(f"{1 << entry}:{count or 1}" for entry, count in enumerate(divisions))
    return f"[{entries}]"
