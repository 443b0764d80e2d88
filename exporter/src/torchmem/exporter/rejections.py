"""Why files of the run directory are not used, counted by reason and logged once for each user."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal, get_args

from torchmem.sample.run_directory import is_user_directory
from torchmem.sample.untrusted import printable

_log = logging.getLogger(__name__)

MAX_LOGGED = 1024  # users and reasons

Reason = Literal[
    "not_regular",  # symlink, FIFO, socket, device, directory
    "unreadable",  # permission or I/O error
    "unsafe_directory",  # a user's directory that is a link or a file, or that others may write to
    "too_large",  # more than MAX_SAMPLE_BYTES
    "malformed",  # not JSON, or not a sample
    "unknown_schema",  # written by another version of torchmem
    "out_of_bounds",  # negative, not finite, too long or contradictory values
    "foreign_owner",  # the owner is not that of the directory, or not that of the process it names
    "too_many",  # more files, devices or directories than one user may have
    "over_budget",  # more bytes or series than one user may publish
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

    def once(self, path: str, owner: int, reason: Reason, version: object) -> None:
        """Count and log a rejection unless this version of the file has been counted."""
        if self._refused.get(path) != version:
            self._refused[path] = version
            self.counts[reason] += 1
            self._log(path, owner, reason)

    def exceed(self, path: str, owner: int, reason: Reason) -> None:
        """Note a file beyond its owner's limits; only more of them than before are counted."""
        self._excess[owner, reason] += 1
        self._log(path, owner, reason)

    def end_scan(self) -> None:
        """Count the files beyond the limits that the last scan did not have."""
        for (_, reason), more in (self._excess - self._last_excess).items():
            self.counts[reason] += more
        self._last_excess, self._excess = self._excess, Counter()

    def forget_all_but(self, paths: set[str]) -> None:
        """Forget rejected files that are gone; directories stay until their names are free."""
        self._refused = {
            path: version
            for path, version in self._refused.items()
            if path in paths or is_user_directory(path)
        }

    def _log(self, path: str, owner: int, reason: Reason) -> None:
        if (owner, reason) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((owner, reason))
            _log.warning(
                "rejected %s of user %d: %s; further ones of this user are only counted",
                printable(path),
                owner,
                reason,
            )
