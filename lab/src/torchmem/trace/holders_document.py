"""What holds the memory of a snapshot, as JSON: one line per device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchmem.trace.holders import HolderGroup, Holders
from torchmem.trace.leaks import Leak

TABLES = (
    *("by_line", "by_module", "by_size", "by_age", "by_pool"),
    *("by_annotation", "by_metadata", "by_region"),
)


def document(found: Holders, more: Mapping[str, Any]) -> str:
    """Return what is in use at one moment, and more; sizes are requested bytes."""
    tables = {name: groups(getattr(found, name)) for name in TABLES}
    return _line({**_heading(found), **tables, **more})


def leaks_document(found: Holders, leaks: Sequence[Leak] | None) -> str:
    """Return the lines whose memory grows; null if the recording is too short to tell."""
    return _line({**_heading(found), "leaks": leak_rows(leaks)})


def leak_rows(leaks: Sequence[Leak] | None) -> list[dict[str, Any]] | None:
    """Return a row for each line."""
    if leaks is None:
        return None
    return [
        {**asdict(leak.line), "bytes_by_part": leak.parts, "blocks": leak.blocks} for leak in leaks
    ]


def _heading(found: Holders) -> dict[str, Any]:
    return {
        "name": found.name,
        "device": found.device,
        "at": found.at,
        "event": found.moment,
        "events": found.events,
        "seconds": found.seconds,
        "bytes": found.size_bytes,
        "blocks": found.blocks,
        "rounding_bytes": found.rounding_bytes,
        "request": groups([found.request])[0] if found.request else None,
    }


def groups(found: Sequence[HolderGroup]) -> list[dict[str, Any]]:
    """Return a row for each group."""
    return [
        {
            **(asdict(group.line) if group.line else {"key": group.key}),
            "bytes": group.size_bytes,
            "blocks": group.blocks,
        }
        for group in found
    ]


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)
