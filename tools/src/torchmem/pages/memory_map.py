"""The memory map that a process has left beside its sample and its OOM reports.

The file is untrusted. If it is missing or cannot be used, the page has no map.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torchmem.allocator.memory_map import thinned
from torchmem.sample.memory_map import (
    MAX_BLOCKS,
    MAX_COMMAS,
    MAX_EXACT,
    MAX_JSON_BYTES,
    MAX_MAP_BYTES,
    SCHEMA_VERSION,
    WBITS,
    DeviceMap,
    MemoryMap,
    SegmentMap,
    is_plausible,
)
from torchmem.sample.untrusted import UntrustedFileError, convert, read_untrusted, strict_json

MIN_BLOCKS = 128
"""A map with fewer segments shows too little."""


def read(path: Path, owner: int | None = None) -> MemoryMap | None:
    """Return the map in a file of the user `owner`, or of any user if None; None without a map."""
    try:
        data, _ = read_untrusted(path, MAX_MAP_BYTES, owner)
        found = convert(strict_json(_expanded(data)), MemoryMap)
    except (OSError, UntrustedFileError, ValueError, zlib.error):
        return None
    is_sound = found.schema == SCHEMA_VERSION and all(map(_is_plausible, found.devices))
    return found if is_sound and _count(found) <= MAX_BLOCKS else None


def drawn(mapped: DeviceMap, max_bytes: int) -> dict[str, Any] | None:
    """Return a map as the page's code draws it, thinned to a size as JSON; None if too little fits.

    The keys are those of /api/v1/map, as far as the map needs them.
    """
    limit = MAX_BLOCKS
    while limit >= MIN_BLOCKS:
        document = _document(thinned(mapped, limit))
        if len(json.dumps(document, separators=(",", ":"))) <= max_bytes:
            return document
        limit //= 2
    return None


def _expanded(data: bytes) -> bytes:
    stream = zlib.decompressobj(WBITS)
    content = stream.decompress(data, MAX_JSON_BYTES)
    if not stream.eof or content.count(b",") > MAX_COMMAS:
        raise ValueError("the map is too large")
    return content


def _count(found: MemoryMap) -> int:
    return sum(len(segment.sizes) for segment in _segments(found))


def _segments(found: MemoryMap) -> Iterator[SegmentMap]:
    return chain.from_iterable(device.segments for device in found.devices)


def _is_plausible(device: DeviceMap) -> bool:
    numbers = (device.merged_blocks, device.omitted_bytes)
    return (
        device.large_page_bytes > 0
        and all(0 <= number < MAX_EXACT for number in (*numbers, device.large_page_bytes))
        and all(map(is_plausible, device.segments))
        and sum(map(sum, (segment.sizes for segment in device.segments))) < MAX_EXACT
    )


def _document(mapped: DeviceMap) -> dict[str, Any]:
    return {
        "large_page_bytes": mapped.large_page_bytes,
        "layout": {"largest_free_block_bytes": mapped.layout.largest_free_block_bytes},
        "merged_blocks": mapped.merged_blocks,
        "omitted_bytes": mapped.omitted_bytes,
        "segments": [
            {name: getattr(segment, name) for name in SegmentMap.__slots__}
            for segment in mapped.segments
        ],
    }
