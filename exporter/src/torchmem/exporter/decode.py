"""From untrusted bytes to a `Sample`: strict types, bounded sizes and numbers, harmless text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from torchmem.core.sample import (
    FREE_BLOCK_BOUNDS,
    SCHEMA_VERSION,
    STEP_DURATION_BOUNDS,
    DeviceSample,
    Layout,
    Sample,
)
from torchmem.exporter.refusals import RefusedError

MAX_ITEMS = 64  # of any list or mapping: devices, labels, settings, buckets
MAX_TEXT = 200  # characters of any string
MAX_NUMBER = 1 << 63
MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux, include/linux/threads.h


def decode(data: bytes) -> Sample:
    """The sample; raises RefusedError for anything that a healthy SDK of this schema does not write."""
    try:
        raw = msgspec.json.decode(data)
        if isinstance(raw, dict) and raw.get("schema") != SCHEMA_VERSION:
            raise RefusedError("unknown_schema")
        sample = msgspec.convert(_bounded(raw), Sample, strict=True)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RefusedError("malformed") from error
    if not _consistent(sample):
        raise RefusedError("out_of_bounds")
    return replace(sample, devices=_distinct(sample.devices))


def _bounded(value: Any) -> Any:
    """The same JSON value with its text made harmless; raises RefusedError when a bound is broken."""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, (int, float)):
        if not 0 <= value <= MAX_NUMBER:
            raise RefusedError("out_of_bounds")
        return value
    if isinstance(value, (dict, list)) and len(value) > MAX_ITEMS:
        raise RefusedError("out_of_bounds")
    if isinstance(value, dict):
        return {harmless(key): _bounded(item) for key, item in value.items()}
    return [_bounded(item) for item in value] if isinstance(value, list) else value


def harmless(text: str) -> str:
    """Text cut to MAX_TEXT characters, with a mark in place of control characters and lone surrogates."""
    text = text[:MAX_TEXT]
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _consistent(sample: Sample) -> bool:
    return (
        0 < sample.process.pid <= MAX_PID
        and len(sample.steps.duration_counts) == len(STEP_DURATION_BOUNDS) + 1
        and all(_plausible(device.layout) for device in sample.devices if device.layout)
    )


def _distinct(devices: Sequence[DeviceSample]) -> tuple[DeviceSample, ...]:
    """The first device of each UUID; a second one, or a second one without a UUID, could not be told apart."""
    first: dict[str | None, DeviceSample] = {}
    for device in devices:
        first.setdefault(device.uuid, device)
    return tuple(first.values())


def _plausible(layout: Layout) -> bool:
    buckets = len(layout.free_block_counts) == len(FREE_BLOCK_BOUNDS) + 1
    return buckets and layout.largest_free_block_bytes <= layout.free_bytes
