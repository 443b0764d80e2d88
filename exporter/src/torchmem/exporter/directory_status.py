"""The state of the run directory itself: what is wrong with it, and the room on its file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

OVERFLOW_UID = 65534  # how a user namespace shows users that it does not map

DirectoryProblem = Literal[
    "missing",  # and no user can create it
    "unreadable",  # permission or I/O error, or not a directory
    "unwritable",  # only root may write, and the exporter is not root
    "not_sticky",  # every user can rename or remove the directories of others
    "foreign_owner",  # a user other than root and the exporter's can do so
]
DIRECTORY_PROBLEMS: tuple[DirectoryProblem, ...] = get_args(DirectoryProblem)

PROBLEM_TEXTS: Mapping[DirectoryProblem, str] = {
    "missing": "does not exist, and only root can create it",
    "unreadable": "cannot be read, or is not a directory",
    "unwritable": "only root may write to it",
    "not_sticky": "any user may rename or remove the directories of others; set mode 3777",
    "foreign_owner": "its owner is neither root nor the exporter's user and may remove everything",
}


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """The state of the run directory: what is wrong with it, and the room on its file system."""

    problem: DirectoryProblem | None = None
    size_bytes: int | None = None
    free_bytes: int | None = None
    inodes: int | None = None
    free_inodes: int | None = None


def can_appear(path: Path) -> bool:
    """Return whether every user may create the run directory, as below /tmp."""
    try:
        return bool(path.parent.stat().st_mode & stat.S_IWOTH) or os.access(path.parent, os.W_OK)
    except OSError:
        return False


def directory_status(directory: int) -> DirectoryStatus:
    """Return the state of the open run directory. Raises OSError."""
    room = os.statvfs(directory)
    return DirectoryStatus(
        _problem(os.fstat(directory)),
        room.f_blocks * room.f_frsize,
        # f_bfree would include what is reserved for root.
        room.f_bavail * room.f_frsize,
        # Btrfs, for example, has no fixed number of inodes and reports 0.
        room.f_files or None,
        room.f_ffree if room.f_files else None,
    )


def _problem(status: os.stat_result) -> DirectoryProblem | None:
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and not status.st_mode & stat.S_ISVTX:
        return "not_sticky"
    if not is_shared and status.st_uid == 0 != os.geteuid():
        return "unwritable"
    if status.st_uid not in {0, os.geteuid(), OVERFLOW_UID}:
        return "foreign_owner"
    return None
