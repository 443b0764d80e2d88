"""The memory map of a process: its segments and blocks, as a file beside its sample.

The process publishes it only while the exporter asks for it. The request is an empty file, named
like the sample, that the exporter touches every few seconds for as long as someone looks, in a
directory of its own. If it cannot have that directory, because another user has taken the name, it
asks its own user's processes in their directory. Those who may ask are the process's own user,
root, and the user who owns the run directory, which is the exporter's service: it reads the samples
anyway. The map holds addresses and sizes, but no data, tensor names or source lines.

A map is JSON, compressed with gzip. The exporter decodes it (`torchmem.exporter.live.memory_map`).
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchmem.sample.sample import ENCODER, Layout
from torchmem.sample.untrusted import MAX_ITEMS

SCHEMA_VERSION = 1
MAP_SUFFIX = ".map.json.gz"
REQUEST_SUFFIX = ".map-request"
"""Suffix of a request beside the sample."""

# A request that was not touched for this long has ended.
LEASE_SECONDS = 30.0

MAX_BLOCKS = 100_000
MAX_MAP_BYTES = 2 << 20
"""Bound of the file. A map of 100,000 blocks has 0.3 to 0.7 MB."""
MAX_JSON_BYTES = 24 << 20

STATES = "apf"
"""One letter for each block: active_allocated, active_pending_free, inactive.

An upper-case letter stands for several small blocks of this state that are drawn as one.
"""


LETTERS = frozenset(STATES + STATES.upper())
MAX_EXACT = 1 << 53  # JavaScript's numbers are exact below
MAX_COMMAS = 8 * MAX_BLOCKS + 256 * MAX_ITEMS
"""In the JSON: each segment with one block has 8, and each further block has one."""
WBITS = 16 + zlib.MAX_WBITS
"""Of a gzip file, for zlib."""

_REQUEST_DIRECTORY = "map-requests"
_OVERFLOW_UID = 65534  # how a user namespace shows every user that it does not map


def request_directory(run_dir: Path, uid: int) -> Path:
    """Return the directory of the requests of exporters that run as a user."""
    return run_dir / f"{_REQUEST_DIRECTORY}-{uid}"


def granted_users(run_dir: Path, uid: int | None) -> set[int]:
    """Return the users who may ask for the map of a process of the user `uid`. Raises OSError."""
    users = {0, run_dir.stat().st_uid} | ({uid} if uid is not None else set())
    return users - {_OVERFLOW_UID}


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """A segment and its blocks in the order of their addresses; `sizes` in bytes.

    The blocks fill the segment. `states` has one letter of `STATES` for each of them. `pool_id` is
    (0, 0) for the default pools, and names a CUDA graph or a MemPool otherwise.
    """

    address: int
    pool: Literal["small", "large"]
    stream: int
    pool_id: tuple[int, int]
    expandable: bool
    sizes: list[int]
    states: str


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The segments of one device, and the layout that was measured in the same snapshot.

    `large_page_bytes` is the size of a page of expandable segments in the large pool; those in the
    small pool have pages of 2 MiB. `merged_blocks` is how many blocks are drawn as fewer, without
    a change in the bytes of any state. `omitted_bytes` are the bytes of segments that are left out.
    """

    index: int
    uuid: str | None
    total_bytes: int | None
    large_page_bytes: int
    layout: Layout
    segments: list[SegmentMap]
    merged_blocks: int = 0
    omitted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The maps of a process's devices at `timestamp`, in Unix seconds."""

    timestamp: float
    devices: list[DeviceMap]
    schema: int = SCHEMA_VERSION


def is_plausible(segment: SegmentMap) -> bool:
    """Return whether a segment of a file may be one."""
    names = (segment.address, segment.stream, *segment.pool_id)
    return (
        len(segment.sizes) == len(segment.states) > 0
        and LETTERS.issuperset(segment.states)
        and min(segment.sizes) > 0
        and min(names) >= 0
        and max(*names, *segment.sizes) < MAX_EXACT
    )


def encode(memory_map: MemoryMap) -> bytes:
    """Return the content of the file. Most of the time is compression, without the GIL."""
    return gzip.compress(ENCODER.encode(memory_map).encode(), 1, mtime=0)
