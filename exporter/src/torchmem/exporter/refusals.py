"""Why a file of the run directory is refused: a closed set of reasons, each counted from 0."""

from __future__ import annotations

from typing import Literal, get_args

Reason = Literal[
    "not_regular",  # symlink, FIFO, socket, device, directory
    "unreadable",  # permission or I/O error
    "too_large",  # more than core.rundir.MAX_SAMPLE_BYTES
    "malformed",  # not JSON, or not a sample
    "unknown_schema",  # written by another version of torchmem
    "out_of_bounds",  # negative, not finite, too long or contradictory values
    "foreign_owner",  # the file's owner is not the owner of the process it names
    "too_many",  # more files or devices than one user may publish
    "duplicate",  # another file shows the same rank, pid and run
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class RefusedError(Exception):
    """A file that is not shown."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
