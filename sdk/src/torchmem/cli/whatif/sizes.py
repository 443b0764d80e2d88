"""Sizes of memory as people type them."""

from __future__ import annotations

import re

from torchmem.core.errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("i", 1024), ("iB", 1024))
}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_size(text: str) -> int:
    """Bytes of "22.5GiB" (1024³), "24GB" (1000³), "8192M" or "1e9"; raises UsageError."""
    found = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[0-9]{1,2})?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = _BY_LOWER.get(found[2].lower()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if not 0 < size < 1 << 62:
        raise UsageError(f"--card {text[:40]!r} is no size: write it as 24GB (1000³ bytes) or 22.5GiB (1024³ bytes).")
    return size
