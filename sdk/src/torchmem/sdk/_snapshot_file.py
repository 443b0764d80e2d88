"""Memory snapshots as files that PyTorch's memory_viz reads: pickled, private to the user, bounded in size."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torchmem.core.capture import MAX_SNAPSHOT_BYTES
from torchmem.sdk._publish import temporary_beside


class _Bounded:
    """A file that refuses to grow over MAX_SNAPSHOT_BYTES: the run directory may be memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_SNAPSHOT_BYTES

    def write(self, data: bytes) -> int:
        """Append `data`; raises OSError when that would be too much."""
        self._left -= len(data)
        if self._left < 0:
            raise OSError(f"the snapshot is larger than {MAX_SNAPSHOT_BYTES >> 20} MiB")
        return self._file.write(data)


def write_snapshot(path: Path, snapshot: Mapping[str, Any]) -> None:
    """Replace `path` at once, readable by this user only; raises OSError."""
    temporary = temporary_beside(path)
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            pickle.dump(snapshot, _Bounded(file))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
