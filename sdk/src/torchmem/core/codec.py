"""A sample as JSON bytes; unknown values are left out. Reading back, with distrust, is the exporter's part."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from torchmem.core.sample import Sample


def encode(sample: Sample) -> bytes:
    """One line of UTF-8 JSON that ends with a newline."""
    text = json.dumps(_present(asdict(sample)), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_present(item) for item in value]
    return value
