"""A sample as JSON bytes; unknown values are null. Reading back, with distrust, is the exporter's part."""

from __future__ import annotations

import json
from typing import Any

from torchmem.core.sample import Sample


def _fields(part: Any) -> dict[str, Any]:
    """One dataclass by field name. `dataclasses.asdict` would copy everything below it too, at four times the cost."""
    return {name: getattr(part, name) for name in part.__slots__}


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_fields)


def encode(sample: Sample) -> bytes:
    """One line of UTF-8 JSON that ends with a newline; raises ValueError for NaN and infinity."""
    return _ENCODER.encode(sample).encode() + b"\n"
