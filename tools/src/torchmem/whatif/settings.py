"""Allocator settings to try, as text and as the simulator takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torchmem.allocator.remedies import (
    GARBAGE_COLLECTION_THRESHOLD,
    ROUNDUP_DIVISIONS,
    SPLIT_SIZES_MB,
)
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
from torchmem.recording.recording import Recording
from torchmem.sample.errors import UsageError

LIMITED_TO = 0.95
"""The garbage collection works only below a memory fraction."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting to try: its name for people, its text, what it means, or why it is not tried."""

    name: str
    conf: str
    config: AllocatorConfig = DEFAULT_CONFIG
    refused: str | None = None


def recorded_settings(recording: Recording) -> Candidate:
    """The settings that a recording was made under; PyTorch before 2.3 does not tell, its segments do in part.

    Raises:
        UsageError: the snapshot has a value that no PyTorch writes.
    """
    settings = recording.settings
    last = str(settings.get(LAST_PARSED.upper()) or "")
    parsed = {
        key: value for key, value in parse_alloc_conf(last).items() if key in REQUEST_SETTINGS
    }
    try:
        config = AllocatorConfig.parse(format_alloc_conf(parsed))
        config = _effective(config, settings)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(
            f"{recording.name}: allocator_settings has a value that PyTorch does not write."
        ) from None
    if not settings and any(segment.is_expandable for segment in recording.segments):
        config = replace(config, expandable_segments=True)
    return Candidate("recorded", conf_text(config), config)


def conf_text(config: AllocatorConfig) -> str:
    """Settings as PYTORCH_CUDA_ALLOC_CONF takes them, without those at their default."""
    default = DEFAULT_CONFIG
    parts = {
        "expandable_segments": config.expandable_segments or None,
        "max_split_size_mb": config.max_split_size and config.max_split_size // MIB,
        "max_non_split_rounding_mb": _other(
            config.max_non_split_rounding_size, default.max_non_split_rounding_size
        ),
        "large_segment_size_mb": _other(config.large_segment_size, default.large_segment_size),
        "roundup_power2_divisions": _divisions_text(config.roundup_power2_divisions),
        "garbage_collection_threshold": config.garbage_collection_threshold or None,
        "per_process_memory_fraction": _fraction(config.per_process_memory_fraction),
        "throw_on_cudamalloc_oom": config.throw_on_cudamalloc_oom or None,
    }
    return format_alloc_conf({key: str(value) for key, value in parts.items() if value is not None})


def candidate(name: str, conf: str, *, card_known: bool = True) -> Candidate:
    """A setting by its text, refused if PyTorch would refuse it, or if it means nothing here."""
    reason = rejection_reason(conf)
    if reason is not None:
        return Candidate(name, conf, refused=reason)
    config = AllocatorConfig.parse(conf)
    if config.garbage_collection_threshold and not card_known:
        reason = "It counts in shares of the card's memory, which is not known."
    elif config.garbage_collection_threshold and config.per_process_memory_fraction == 1:
        reason = "It does nothing without a memory fraction below 1."
    elif config.per_process_memory_fraction < 1 and not card_known:
        reason = "It is a share of the card's memory, which is not known."
    return Candidate(name, conf, config, reason)


def grid(recording: Recording, recorded: Candidate, *, card_known: bool) -> list[Candidate]:
    """What is worth a try, the simplest first: never the recorded settings, never the same twice."""
    largest = max(
        (event.size for event in recording.events if event.action in {"alloc", "oom"}), default=0
    )
    seen, found = {recorded.config}, []
    for name, conf in _texts(largest, recorded.config):
        one = candidate(name, conf, card_known=card_known)
        if one.refused is not None or one.config not in seen:
            seen.add(one.config)
            found.append(one)
    return found


def _texts(largest: int, recorded: AllocatorConfig) -> Iterator[tuple[str, str]]:
    expandable, rounded = (
        "expandable_segments:True",
        f"roundup_power2_divisions:{ROUNDUP_DIVISIONS}",
    )
    yield "default", ""
    yield "expandable segments", expandable
    for size in SPLIT_SIZES_MB:
        if size * MIB <= largest:  # otherwise nothing is that large, and the default is the same
            yield f"split up to {size} MiB", f"max_split_size_mb:{size}"
    yield "rounded sizes", rounded
    collected = f"garbage_collection_threshold:{GARBAGE_COLLECTION_THRESHOLD},per_process_memory_fraction:{LIMITED_TO}"
    yield "garbage collection", collected
    yield "expandable segments, rounded sizes", f"{expandable},{rounded}"
    if not recorded.expandable_segments:
        yield (
            "recorded with expandable segments",
            conf_text(replace(recorded, expandable_segments=True)),
        )
    if not any(recorded.roundup_power2_divisions):
        divisions = parse_divisions(str(ROUNDUP_DIVISIONS))
        yield (
            "recorded with rounded sizes",
            conf_text(replace(recorded, roundup_power2_divisions=divisions)),
        )


def _effective(config: AllocatorConfig, settings: Mapping[str, object]) -> AllocatorConfig:
    """What the allocator says it uses goes before what was last parsed."""
    if "expandable_segments" in settings:
        config = replace(config, expandable_segments=settings["expandable_segments"] is True)
    split = settings.get("max_split_size")
    if isinstance(split, int):
        config = replace(config, max_split_size=split if split > 0 else None)
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, (int, float)):
        config = replace(config, garbage_collection_threshold=float(threshold))
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        named = {int(size): int(count) for size, count in divisions.items()}
        entries = tuple(
            named.get(1 << entry, 0) for entry in range(len(config.roundup_power2_divisions))
        )
        config = replace(config, roundup_power2_divisions=entries)
    return config


def _other(size: int, default: int) -> int | None:
    return None if size == default else size // MIB


def _fraction(fraction: float) -> float | None:
    return None if fraction == 1 else fraction


def _divisions_text(divisions: tuple[int, ...]) -> str | None:
    if not any(divisions):
        return None
    if len(set(divisions)) == 1:
        return str(divisions[0])
    named = ",".join(f"{1 << entry}:{count or 1}" for entry, count in enumerate(divisions))
    return f"[{named}]"
