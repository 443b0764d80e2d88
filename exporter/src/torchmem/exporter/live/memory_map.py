"""The memory map of one rank: ask the rank for it while someone looks, and check what it wrote.

The rank publishes its map only while it is asked (`torchmem.sample.memory_map`). The file is
untrusted input: it is bounded, decoded strictly, and encoded again before a browser gets it.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec

from torchmem.exporter.run_directory import Published
from torchmem.sample.memory_map import (
    LEASE_SECONDS,
    MAP_SUFFIX,
    MAX_BLOCKS,
    MAX_JSON_BYTES,
    MAX_MAP_BYTES,
    SCHEMA_VERSION,
    STATES,
    DeviceMap,
    MemoryMap,
    SegmentMap,
    granted_users,
    request_directory,
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

TOUCH_SECONDS = 5.0
MAX_EXACT = 1 << 53  # JavaScript's numbers are exact below
MAX_KEPT_MAPS = 8
_LETTERS = frozenset(STATES + STATES.upper())


class CannotAskError(Exception):
    """The rank cannot be asked; the text says why, in one sentence."""


class Requests:
    """Asks ranks for their maps, with files in a directory of the exporter's own user."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._touched: dict[str, float] = {}

    def touch(self, rank: Published, now: float) -> None:
        """Ask a rank for its map, or go on asking; `now` in Unix seconds. Raises CannotAskError."""
        if now - self._touched.get(rank.path, 0.0) < TOUCH_SECONDS:
            return
        self._check_granted(rank)
        folder = request_directory(self._run_dir, os.geteuid())
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
            with open_untrusted_directory(folder, os.geteuid()) as (directory, _):
                os.fchmod(directory, 0o755)  # ranks of other users look into it
                _remove_ended(directory, now)
                _touch(directory, Path(rank.path).name.removesuffix(SAMPLE_SUFFIX))
        except UntrustedFileError as error:
            raise CannotAskError(f"The directory {folder} {error}.") from error
        except OSError as error:
            raise CannotAskError(f"{folder} cannot be written ({error.strerror}).") from error
        self._touched = {path: at for path, at in self._touched.items() if now - at < LEASE_SECONDS}
        self._touched[rank.path] = now

    def _check_granted(self, rank: Published) -> None:
        own = os.geteuid()
        with contextlib.suppress(OSError):
            if own in granted_users(self._run_dir, rank.uid):
                return
        raise CannotAskError(
            f"The exporter runs as user {own}, but a rank publishes its map only for its own user, "
            "for root, and for the owner of the run directory."
        )


def _remove_ended(directory: int, now: float) -> None:
    """Remove requests that were not renewed, also those of an exporter that was killed."""
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if abs(now - status.st_mtime) > LEASE_SECONDS:
                os.unlink(name, dir_fd=directory)


def _touch(directory: int, name: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o644, dir_fd=directory)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


class MapFiles:
    """Reads the maps of ranks. The newest few are kept, as several viewers may look at them."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._kept: dict[str, tuple[str, bytes]] = {}

    def read(self, rank: Published, now: float) -> tuple[str, bytes] | None:
        """Return the rank's map as gzipped JSON, and a text that changes with it.

        None if there is no map. Raises ValueError, with a sentence, for one that is refused.
        """
        sample = self._run_dir / rank.path
        name = sample.name.removesuffix(SAMPLE_SUFFIX) + MAP_SUFFIX
        try:
            with open_untrusted_directory(sample.parent, rank.uid) as (directory, _):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                version = f"{status.st_ino}-{status.st_ctime_ns}-{status.st_size}"
                kept = self._kept.get(rank.path)
                if kept and kept[0] == version:
                    return kept
                data, _ = read_untrusted(name, MAX_MAP_BYTES, rank.uid, directory=directory)
        except FileNotFoundError:
            return None
        except (OSError, UntrustedFileError) as error:
            raise ValueError(f"The file of the map {error}.") from error
        content = gzip.compress(msgspec.json.encode(decode(data, now)), 1, mtime=0)
        self._kept.pop(rank.path, None)
        self._kept[rank.path] = version, content
        if len(self._kept) > MAX_KEPT_MAPS:
            del self._kept[next(iter(self._kept))]
        return version, content


def decode(data: bytes, now: float) -> MemoryMap:
    """Decode the file of a map: strict types, bounded sizes, finite numbers, sanitized text.

    Its time is not later than `now`. Raises ValueError, with a sentence, for anything that a
    healthy SDK of this schema does not write.
    """
    try:
        found = msgspec.json.decode(_expanded(data), type=MemoryMap, strict=True)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, zlib.error) as error:
        raise ValueError("The file of the map is malformed.") from error
    if found.schema != SCHEMA_VERSION:
        raise ValueError("The rank runs another version of torchmem.")
    blocks = sum(len(segment.sizes) for device in found.devices for segment in device.segments)
    if len(found.devices) > MAX_ITEMS or blocks > MAX_BLOCKS:
        raise ValueError("The map has too many blocks or devices.")
    devices = [_checked(device) for device in found.devices]
    return replace(found, timestamp=min(max(found.timestamp, 0.0), now), devices=devices)


def _expanded(data: bytes) -> bytes:
    """Return the content of one gzip member. Raises ValueError."""
    stream = zlib.decompressobj(wbits=31)
    content = stream.decompress(data, MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError("The map is too large.")
    if not stream.eof or stream.unused_data:
        raise ValueError("The file of the map is malformed.")
    return content


def _checked(device: DeviceMap) -> DeviceMap:
    """Return a device with sanitized text. Raises ValueError for implausible numbers."""
    try:
        header = sanitize_json(msgspec.to_builtins(replace(device, segments=[])))
    except ValueError as error:
        raise ValueError("A number in the map is out of bounds.") from error
    if len(device.layout.free_block_counts) != len(FREE_BLOCK_BOUNDS) + 1:
        raise ValueError("The map has another form of histogram.")
    total = sum(map(_bytes, device.segments)) + device.omitted_bytes
    if max(total, device.total_bytes or 0, device.large_page_bytes) >= MAX_EXACT:
        raise ValueError("A number in the map is out of bounds.")
    if device.large_page_bytes == 0:
        raise ValueError("A page in the map has no size.")
    return replace(msgspec.convert(header, DeviceMap), segments=device.segments)


def _bytes(segment: SegmentMap) -> int:
    """Return the bytes of a segment. Raises ValueError."""
    names = (segment.address, segment.stream, *segment.pool_id)
    is_plausible = (
        len(segment.sizes) == len(segment.states) > 0
        and _LETTERS.issuperset(segment.states)
        and min(segment.sizes) > 0
        and min(names) >= 0
        and max(*names, *segment.sizes) < MAX_EXACT
    )
    if not is_plausible:
        raise ValueError("A segment in the map is implausible.")
    return sum(segment.sizes)
