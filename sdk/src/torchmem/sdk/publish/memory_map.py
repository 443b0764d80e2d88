"""The memory map of this process, published while someone looks at it and after an OOM.

`torchmem.sample.memory_map` says how the exporter asks and who may. The map is made from the
snapshots that the SDK takes for the fragmentation index, in the background thread, and its cost
counts toward their budget.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from torchmem.allocator.backend import Device
from torchmem.allocator.memory_map import device_map
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.sample.memory_map import (
    LEASE_SECONDS,
    MAP_SUFFIX,
    MAX_BLOCKS,
    MAX_MAP_BYTES,
    REQUEST_SUFFIX,
    MemoryMap,
    encode,
    granted_users,
    request_directory,
)
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.run_directory import SAMPLE_SUFFIX, replace_file
from torchmem.sample.sample import Layout
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted_directory
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import ignore

Measured = Sequence[tuple[Device, Layout]]
"""Devices and their layouts in one snapshot."""


class MapPublisher:
    """Publishes the map of one process. `sample` is the path of its sample file.

    `tick` and `publish` run in the background thread, `keep_oom` in the OOM observer. The methods
    count their errors and raise none.
    """

    def __init__(self, sample: Path, errors: Errors, *, enabled: bool) -> None:
        self._path = sibling_path(sample, MAP_SUFFIX)
        self._request = sibling_path(sample, REQUEST_SUFFIX)
        self._name = sample.name.removesuffix(SAMPLE_SUFFIX)
        self._run_dir = sample.parent.parent
        self._errors = errors
        self._enabled = enabled
        self._is_published = False
        self.is_asked = False

    def tick(self, *, keep: bool) -> None:
        """Find out whether someone looks, and remove the map if not; with `keep` it stays."""
        if not self._enabled:
            return
        with self._errors.suppress("memory_map"):
            self.is_asked = self._is_requested()
            if self._is_published and not self.is_asked and not keep:
                self._is_published = False
                self._path.unlink(missing_ok=True)

    def _is_requested(self) -> bool:
        with ignore(OSError):
            granted = granted_users(self._run_dir, os.geteuid())
            return self._has_own_request() or any(
                self._has_asked(user, granted) for user in granted
            )
        return False

    def _has_own_request(self) -> bool:
        """Return whether this user or root asks in the user's own directory."""
        if not os.path.lexists(self._request):
            return False
        with ignore(OSError):
            return _is_request(self._request.lstat(), {0, os.geteuid()})
        return False

    def _has_asked(self, user: int, granted: set[int]) -> bool:
        request = request_directory(self._run_dir, user) / self._name
        if not os.path.lexists(request):  # the usual case; an exception would cost 100 us
            return False
        with ignore(OSError, UntrustedFileError):
            with open_untrusted_directory(request.parent) as (directory, folder):
                status = os.stat(self._name, dir_fd=directory, follow_symlinks=False)
            return folder.st_uid in granted and _is_request(status, granted)
        return False

    def publish(
        self,
        segments: Sequence[SegmentInfo],
        timestamp: float,
        measured: Measured,
        config: AllocatorConfig,
    ) -> None:
        """Write the map of a snapshot if someone looks at it."""
        if self.is_asked and self._enabled:
            self._write(segments, timestamp, measured, config)

    def keep_oom(
        self, segments: Sequence[SegmentInfo] | None, measured: Measured, config: AllocatorConfig
    ) -> None:
        """Write what an OutOfMemoryError left."""
        if segments is not None and self._enabled:
            self._write(segments, time.time(), measured, config)

    def _write(
        self,
        segments: Sequence[SegmentInfo],
        timestamp: float,
        measured: Measured,
        config: AllocatorConfig,
    ) -> None:
        with self._errors.suppress("memory_map"):
            limit, content = MAX_BLOCKS, b""
            while limit and (not content or len(content) > MAX_MAP_BYTES):
                per_device = limit // max(1, len(measured))
                maps = [
                    device_map(segments, device, layout, config, per_device)
                    for device, layout in measured
                ]
                content = encode(MemoryMap(timestamp, maps))
                limit //= 2
            replace_file(self._path, content)
            self._is_published = True


def _is_request(status: os.stat_result, granted: set[int]) -> bool:
    is_fresh = abs(time.time() - status.st_mtime) <= LEASE_SECONDS
    return is_fresh and status.st_uid in granted and stat.S_ISREG(status.st_mode)
