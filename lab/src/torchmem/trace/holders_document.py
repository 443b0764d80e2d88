"""What holds the memory of a snapshot, as JSON: one line per device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchmem.trace.holders import HolderGroup, Holders
from torchmem.trace.leaks import Leak

TABLES = ("by_line", "by_module", "by_size", "by_age", "by_pool")


def document(found: Holders) -> str:
    """Return what is in use at one moment; sizes are requested bytes."""
    return _line({**_heading(found), **{name: _groups(getattr(found, name)) for name in TABLES}})


def leaks_document(found: Holders, leaks: Sequence[Leak] | None) -> str:
    """Return the lines whose memory grows; null if the recording is too short to tell."""
    rows = None
    if leaks is not None:
        rows = [
            {**asdict(leak.line), "bytes_by_part": leak.parts, "blocks": leak.blocks}
            for leak in leaks
        ]
    return _line({**_heading(found), "leaks": rows})


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
        "request": _groups([found.request])[0] if found.request else None,
    }


def _groups(groups: Sequence[HolderGroup]) -> list[dict[str, Any]]:
    return [
        {
            **(asdict(group.line) if group.line else {"key": group.key}),
            "bytes": group.size_bytes,
            "blocks": group.blocks,
        }
        for group in groups
    ]


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)
