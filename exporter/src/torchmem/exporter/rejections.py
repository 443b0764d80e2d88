"""Why files of the run directory are not used, counted by reason and logged once for each user."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Literal, get_args

from torchmem.sample.untrusted import printable

_log = logging.getLogger(__name__)

MAX_LOGGED = 1024  # users and reasons
MAX_COUNTED = 8192  # users and reasons that are told apart; further ones are counted as one user
_OTHERS = -1

Reason = Literal[
    "not_regular",  # symlink, FIFO, socket, device, directory
    "unreadable",  # permission or I/O error
    "no_descriptors",  # the exporter has no file descriptor left
    "unsafe_directory",  # a user's directory that is a link or a file, or that others may write to
    "too_large",  # more than MAX_SAMPLE_BYTES
    "malformed",  # not JSON, or not a sample
    "unknown_schema",  # written by another version of torchmem
    "out_of_bounds",  # negative, not finite, too long or contradictory values
    "foreign_owner",  # the owner is not that of the directory, or not that of the process it names
    "too_many",  # more files, devices or directories than one user may have
    "over_budget",  # more bytes or series than one user may publish
    "series_churn",  # more new series than one user may create in an hour
    "duplicate",  # another file has the same rank, pid and run
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class RejectedSampleError(Exception):
    """A file that is not used as a sample."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Refusals:
    """Counts what is rejected, by reason, and logs the first of each user and reason."""

    def __init__(self) -> None:
        self.counts: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._refused: dict[str, object] = {}
        self._excess = Counter[tuple[int, Reason]]()
        self._last_excess = Counter[tuple[int, Reason]]()
        self._logged: set[tuple[int, Reason]] = set()

    @property
    def lacked_descriptors(self) -> bool:
        """Whether the last scan left out files because no file descriptor was left."""
        return any(reason == "no_descriptors" for _, reason in self._last_excess)

    def once(self, path: str, owner: int, reason: Reason, version: object) -> None:
        """Count and log a rejection unless this version of the file has been counted."""
        if self._refused.get(path) != version:
            self._refused[path] = version
            self.counts[reason] += 1
            self._log(path, owner, reason)

    def exceed(self, path: str, owner: int, reason: Reason) -> None:
        """Note a refusal of this scan; refusals are only counted if there are more than before."""
        key = owner, reason
        if key not in self._excess and len(self._excess) >= MAX_COUNTED:
            key = _OTHERS, reason
        self._excess[key] += 1
        self._log(path, owner, reason)

    def end_scan(self, paths: Collection[str]) -> None:
        """Count what only this scan refused, not the last one; forget all files but `paths`."""
        for (_, reason), more in (self._excess - self._last_excess).items():
            self.counts[reason] += more
        self._last_excess, self._excess = self._excess, Counter()
        self._refused = {path: self._refused[path] for path in paths if path in self._refused}

    def _log(self, path: str, owner: int, reason: Reason) -> None:
        if (owner, reason) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((owner, reason))
            _log.warning(
                "rejected %s of user %d: %s; further ones of this user are only counted",
                printable(path),
                owner,
                reason,
            )
