"""A sample as JSON bytes; unknown values are null. Reading back, with distrust, is the exporter's part."""

from __future__ import annotations

import json
from dataclasses import asdict

from torchmem.core.sample import Sample


def encode(sample: Sample) -> bytes:
    """One line of UTF-8 JSON that ends with a newline."""
    return json.dumps(asdict(sample), separators=(",", ":"), allow_nan=False).encode() + b"\n"
