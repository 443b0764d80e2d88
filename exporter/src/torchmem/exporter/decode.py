"""From untrusted bytes to a `Sample`: strict types, bounded sizes and numbers, harmless text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from torchmem.exporter.refusals import RefusedError
from torchmem.sample.sample import (
    FREE_BLOCK_BOUNDS,
    SCHEMA_VERSION,
    STEP_DURATION_BOUNDS,
    Layout,
    Sample,
    distinct_devices,
)
from torchmem.sample.untrusted import sanitize_json

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
    return replace(sample, devices=distinct_devices(sample.devices))


def _bounded(raw: Any) -> Any:
    try:
        return sanitize_json(raw)
    except ValueError as error:
        raise RefusedError("out_of_bounds") from error


def _consistent(sample: Sample) -> bool:
    return (
        0 < sample.process.pid <= MAX_PID
        and len(sample.steps.duration_counts) == len(STEP_DURATION_BOUNDS) + 1
        and all(_plausible(device.layout) for device in sample.devices if device.layout)
    )


def _plausible(layout: Layout) -> bool:
    buckets = len(layout.free_block_counts) == len(FREE_BLOCK_BOUNDS) + 1
    return buckets and layout.largest_free_block_bytes <= layout.free_bytes
