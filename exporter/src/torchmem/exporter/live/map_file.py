"""The file of a rank's memory map, checked before a browser gets it.

The file is untrusted input. It is bounded before it is decoded, because 25 KB can expand to a
thousand times that, and a byte of JSON to many of Python objects: first it is expanded piece by
piece and only counted. Then one segment after the other is decoded strictly and encoded again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from torchmem.node.published import Published
from torchmem.sample.memory_map import (
    MAP_SUFFIX,
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
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import FREE_BLOCK_BOUNDS
from torchmem.sample.untrusted import (
    MAX_ITEMS,
    UntrustedFileError,
    open_untrusted_directory,
    read_untrusted,
    sanitize_json,
)

MAX_KEPT_MAPS = 8
MAX_KEPT_BYTES = 8 << 20
MAX_OBJECTS = MAX_BLOCKS + 4 * MAX_ITEMS
"""In the JSON: each segment has a block, and each device has a few more objects."""

_PIECE_BYTES = 1 << 20
_SENT_BYTES = 128 << 10
_GZIP_LEVEL = 1
_MALFORMED = "The file of the map is malformed."
_TOO_MANY = "The map has too many blocks or devices."
_OUT_OF_BOUNDS = "A number in the map is out of bounds."


@dataclass(frozen=True, slots=True)
class _UncheckedDevice(DeviceMap):
    segments: list[msgspec.Raw]  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _UncheckedMap(MemoryMap):
    devices: list[_UncheckedDevice]  # type: ignore[assignment]


_map_decoder = msgspec.json.Decoder(_UncheckedMap, strict=True)
_segment_decoder = msgspec.json.Decoder(SegmentMap, strict=True)


class MapFiles:
    """Reads the maps of ranks, and keeps the newest few, because several viewers may request them.

    A file that was refused is not read again either. `check` is `checked`.
    """

    def __init__(self, run_dir: Path, check: Callable[[bytes, float], bytes] | None = None) -> None:
        self._run_dir, self._check = run_dir, check or checked
        self._kept: dict[str, tuple[str, bytes | ValueError]] = {}

    def read(self, rank: Published, now: float) -> tuple[str, bytes] | None:
        """Return the rank's map as gzipped JSON, and a string that changes with it.

        None without a map. Raises ValueError, with a sentence, for one that is refused.
        """
        sample = self._run_dir / rank.path
        name = sample.name.removesuffix(SAMPLE_SUFFIX) + MAP_SUFFIX
        try:
            with open_untrusted_directory(sample.parent, rank.uid) as (directory, _):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                version = f"{status.st_ino}-{status.st_ctime_ns}-{status.st_size}"
                if self._kept.get(rank.path, ("",))[0] != version:
                    data, _ = read_untrusted(name, MAX_MAP_BYTES, rank.uid, directory=directory)
                    self._keep(rank.path, version, self._checked(data, now))
        except FileNotFoundError:
            return None
        except (OSError, UntrustedFileError) as error:
            raise ValueError(f"The file of the map {error}.") from error
        content = self._kept[rank.path][1]
        if isinstance(content, ValueError):
            # Each time a kept exception is raised, its traceback would grow.
            raise content.with_traceback(None)
        return version, content

    def _checked(self, data: bytes, now: float) -> bytes | ValueError:
        try:
            return self._check(data, now)
        except ValueError as error:
            return error

    def _keep(self, path: str, version: str, content: bytes | ValueError) -> None:
        self._kept.pop(path, None)
        self._kept[path] = version, content
        while len(self._kept) > 1 and (
            len(self._kept) > MAX_KEPT_MAPS or sum(map(_size, self._kept.values())) > MAX_KEPT_BYTES
        ):
            del self._kept[next(iter(self._kept))]


def _size(kept: tuple[str, bytes | ValueError]) -> int:
    return len(kept[1]) if isinstance(kept[1], bytes) else 0


def checked(data: bytes, now: float) -> bytes:
    """Return the content of a map file again, with sanitized text and a time not later than `now`.

    Raises ValueError, with a sentence, for anything that a healthy SDK of this schema does not
    write: wrong types, implausible sizes, numbers that are not finite.
    """
    gzipped = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, WBITS)
    try:
        content = _map_decoder.decode(_expanded(data))
        pieces = [gzipped.compress(piece) for piece in _Rewriter().map(content, now)]
    except (msgspec.MsgspecError, UnicodeError, RecursionError, zlib.error) as error:
        raise ValueError(_MALFORMED) from error
    return b"".join(pieces) + gzipped.flush()


async def expanded_pieces(gzipped: bytes) -> AsyncIterator[bytes]:
    """Yield the content of a map that was checked, for clients that do not accept gzip."""
    for piece in _inflated(gzipped, _SENT_BYTES):
        yield piece


def _expanded(data: bytes) -> bytes:
    """Return the content of one gzip member, counted before. Raises ValueError."""
    size = objects = commas = 0
    for piece in _inflated(data, _PIECE_BYTES):
        size += len(piece)
        objects += piece.count(b"{")
        commas += piece.count(b",")
        if size > MAX_JSON_BYTES or objects > MAX_OBJECTS or commas > MAX_COMMAS:
            raise ValueError("The map is too large.")
    return zlib.decompress(data, WBITS, max(size, 1))


def _inflated(data: bytes, piece_bytes: int) -> Iterator[bytes]:
    """Yield the content of one gzip member. Raises ValueError if there is more, or less, of it."""
    stream = zlib.decompressobj(WBITS)
    while not stream.eof:
        piece = stream.decompress(data, piece_bytes)
        data = stream.unconsumed_tail
        if not piece and not stream.eof:
            raise ValueError(_MALFORMED)
        yield piece
    if stream.unused_data:
        raise ValueError(_MALFORMED)


class _Rewriter:
    """Checks a map and writes it as JSON, one segment after the other. Raises ValueError."""

    def __init__(self) -> None:
        self._blocks = 0

    def map(self, content: _UncheckedMap, now: float) -> Iterator[bytes]:
        """Yield the pieces of the whole map."""
        if content.schema != SCHEMA_VERSION:
            raise ValueError("The rank runs another version of torchmem.")
        if len(content.devices) > MAX_ITEMS:
            raise ValueError(_TOO_MANY)
        timestamp = min(max(content.timestamp, 0.0), now)
        head = replace(content, timestamp=timestamp, devices=[])
        yield from _filled(head, "devices", map(self._device, content.devices))

    def _device(self, device: _UncheckedDevice) -> Iterator[bytes]:
        head = _checked_head(device)
        total = head.omitted_bytes

        def segments() -> Iterator[Iterable[bytes]]:
            nonlocal total
            for raw in device.segments:
                segment = _segment_decoder.decode(raw)
                total += self._segment_bytes(segment)
                yield [msgspec.json.encode(segment)]

        yield from _filled(head, "segments", segments())
        if max(total, head.total_bytes or 0, head.large_page_bytes) >= MAX_EXACT:
            raise ValueError(_OUT_OF_BOUNDS)

    def _segment_bytes(self, segment: SegmentMap) -> int:
        self._blocks += len(segment.sizes)
        if self._blocks > MAX_BLOCKS:
            raise ValueError(_TOO_MANY)
        if not is_plausible(segment):
            raise ValueError("A segment in the map is implausible.")
        return sum(segment.sizes)


def _filled(head: Any, name: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield `head` as JSON, with items in its empty list `name`."""
    before, opening, after = msgspec.json.encode(head).partition(f'"{name}":['.encode())
    yield before + opening
    for number, item in enumerate(items):
        yield b"," if number else b""
        yield from item
    yield after


def _checked_head(device: _UncheckedDevice) -> DeviceMap:
    """Return a device without segments, with sanitized text."""
    try:
        head = sanitize_json(msgspec.to_builtins(replace(device, segments=[])))
    except ValueError as error:
        raise ValueError(_OUT_OF_BOUNDS) from error
    if len(device.layout.free_block_counts or ()) != len(FREE_BLOCK_BOUNDS) + 1:
        raise ValueError("The map has another form of histogram.")
    if device.large_page_bytes == 0:
        raise ValueError("A page in the map has no size.")
    return msgspec.convert(head, DeviceMap)
