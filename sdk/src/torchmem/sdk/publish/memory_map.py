"""The memory map of this process, published while someone looks at it and after an OOM.

`torchmem.sample.memory_map` says how the exporter asks and who may. The map is made from the
snapshots that the SDK takes for the fragmentation index, in the background thread, and its cost
counts toward their budget.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from torchmem.allocator.memory_map import device_map
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
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted_directory
from torchmem.sdk.draft import Draft
from torchmem.sdk.observation import MeasuredSnapshot, Oom
from torchmem.sdk.part import Part
from torchmem.sdk.safety.errors import Stage
from torchmem.sdk.safety.interruptions import ignore


class MapPublisher(Part):
    """Publishes the map of one process. `sample` is the path of its sample file.

    `is_pending` returns whether the process may die of the newest OOM, whose map is then kept.
    `request_snapshot` has the next snapshot taken soon.
    """

    stage: Stage = "memory_map"

    def __init__(
        self,
        sample: Path,
        *,
        enabled: bool,
        is_pending: Callable[[], bool] = lambda: False,
        request_snapshot: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = sibling_path(sample, MAP_SUFFIX)
        self._request = sibling_path(sample, REQUEST_SUFFIX)
        self._requests: dict[int, str] = {}
        self._name = sample.name.removesuffix(SAMPLE_SUFFIX)
        self._run_dir = sample.parent.parent
        self._enabled = enabled
        self._is_pending = is_pending
        self._request_snapshot = request_snapshot
        self._is_published = False
        self.is_asked = False

    def at_tick(self) -> None:
        """Find out whether someone looks, and remove the map if not."""
        if not self._enabled:
            return
        self.is_asked = self._is_requested()
        if self.is_asked:
            self._request_snapshot()
        elif self._is_published and not self._is_pending():
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
        request = self._requests.get(user)
        if request is None:
            path = request_directory(self._run_dir, user) / self._name
            request = self._requests[user] = os.fspath(path)
        if not os.path.lexists(request):  # the usual case; an exception would cost 100 us
            return False
        with ignore(OSError, UntrustedFileError):
            with open_untrusted_directory(Path(request).parent) as (directory, folder):
                status = os.stat(self._name, dir_fd=directory, follow_symlinks=False)
            return folder.st_uid in granted and _is_request(status, granted)
        return False

    def at_snapshot(self, snapshot: MeasuredSnapshot) -> None:
        """Write the map of a snapshot if someone looks at it."""
        if self.is_asked and self._enabled:
            self._write(snapshot)

    def at_oom(self, oom: Oom) -> None:
        """Write the map of the state that the OOM left."""
        if oom.observation and oom.observation.snapshot and self._enabled:
            self._write(oom.observation.snapshot)

    def complete(self, sample: Draft) -> None:
        """Add whether there is a map on request."""
        sample.add(memory_map=self._enabled)

    def _write(self, snapshot: MeasuredSnapshot) -> None:
        limit, content = MAX_BLOCKS, b""
        while limit and (not content or len(content) > MAX_MAP_BYTES):
            per_device = limit // max(1, len(snapshot.layouts))
            maps = [
                device_map(snapshot.segments, device, layout, snapshot.config, per_device)
                for device, layout in snapshot.layouts
            ]
            content = encode(MemoryMap(snapshot.timestamp, maps))
            limit //= 2
        replace_file(self._path, content)
        self._is_published = True


def _is_request(status: os.stat_result, granted: set[int]) -> bool:
    is_fresh = abs(time.time() - status.st_mtime) <= LEASE_SECONDS
    return is_fresh and status.st_uid in granted and stat.S_ISREG(status.st_mode)
