"""Which files of the run directory are looked at: at most some of each user, the newest first.

Every user may create any number of names, and with a range of subordinate user IDs (subuid(5)) also
be thousands of users. What is kept of them and read at one scan is bounded, and what one of them
creates does not displace the files of another one.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from torchmem.exporter.directory_status import OVERFLOW_UID
from torchmem.exporter.rejections import Reason, Refusals
from torchmem.sample.run_directory import (
    MAX_ENTRIES,
    MAX_USER_ENTRIES,
    SAMPLE_SUFFIX,
    is_user_directory,
)
from torchmem.sample.untrusted import (
    UntrustedFileError,
    lacks_descriptors,
    open_untrusted_directory,
)

MAX_READ_USERS = 4096  # whose directories are opened at one scan
MIN_USER_ENTRIES = 256  # of a user, however many users there are
MAX_DIRECTORIES_PER_USER = 64
MAX_LISTED_PER_USER = 2048  # files
MAX_LISTED = 1 << 15  # files of all users together


@dataclass(frozen=True, slots=True)
class FileVersion:
    """One version of one file, identified by its change time (ctime), which users cannot set.

    `directory` is the name of the user's directory. `user` names the owner, or in a user namespace
    that does not map the owner, the directory.
    """

    directory: str
    name: str
    inode: int
    size: int
    changed_ns: int
    mtime: float
    uid: int
    regular: bool

    @classmethod
    def of(cls, directory: str, name: str, status: os.stat_result) -> FileVersion:
        """Return the version of a file with this status."""
        return cls(
            directory,
            name,
            status.st_ino,
            status.st_size,
            status.st_ctime_ns,
            status.st_mtime,
            status.st_uid,
            stat.S_ISREG(status.st_mode),
        )

    @property
    def path(self) -> str:
        """The path in the run directory."""
        return f"{self.directory}/{self.name}"

    @property
    def user(self) -> str:
        """The user ID, or the directory of an unmapped user."""
        return _user(self.directory, self.uid)


def _user(directory: str, uid: int) -> str:
    return directory if uid == OVERFLOW_UID else str(uid)


def list_files(
    run_dir: int, known: Collection[str], refusals: Refusals, max_users: int = MAX_READ_USERS
) -> dict[str, list[FileVersion]]:
    """Return the sample files that their owners alone could have put there, by user, newest first.

    `run_dir` is the open run directory. If it has more than `max_users` users, those in `known` are
    read, and others by chance, so that each one's turn comes. Raises OSError.
    """
    directories = _Directories(refusals)
    with os.scandir(run_dir) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            if is_user_directory(entry.name):
                directories.add(entry)
    chosen = directories.chosen(known, max_users)
    scan = _Scan(run_dir, len(chosen), refusals)
    listed = {user: scan.newest_files(names) for user, names in chosen}
    for files in listed.values():
        files.sort(key=lambda version: version.changed_ns, reverse=True)
    return {user: files for user, files in listed.items() if files}


class _Directories:
    """The newest directories of each user. The one with the user's own name is always among them.

    A directory's change time shows when a file in it was last replaced; only its owner can do that.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._by_user: dict[str, list[tuple[bool, int, str]]] = {}

    def add(self, entry: os.DirEntry[str]) -> None:
        """Note a name that has the form of a user's directory."""
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            uid, name = status.st_uid, entry.name
            if not stat.S_ISDIR(status.st_mode):
                self._refusals.exceed(name, uid, "unsafe_directory")
                return
            found = self._by_user.setdefault(_user(name, uid), [])
            found.append((name == str(uid), status.st_ctime_ns, name))
            if len(found) >= 2 * MAX_DIRECTORIES_PER_USER:
                self._cut(found, uid)

    def _cut(self, found: list[tuple[bool, int, str]], uid: int) -> None:
        found.sort(reverse=True)
        for _, _, name in found[MAX_DIRECTORIES_PER_USER:]:
            self._refusals.exceed(name, uid, "too_many")
        del found[MAX_DIRECTORIES_PER_USER:]

    def chosen(self, known: Collection[str], max_users: int) -> list[tuple[str, list[str]]]:
        """Return the users to read, each with the names of the directories."""
        users = list(self._by_user)
        if len(users) > max_users:
            random.shuffle(users)
            users.sort(key=lambda user: user not in known)
        for user in users[max_users:]:
            self._refusals.exceed(user, _uid(user), "too_many")
        for user in users[:max_users]:
            self._cut(self._by_user[user], _uid(user))
        return [(user, [name for *_, name in self._by_user[user]]) for user in users[:max_users]]


def _uid(user: str) -> int:
    return int(user) if user.isdigit() else OVERFLOW_UID


class _Scan:
    """Lists the files of one user after another; `users` share what is looked at and kept."""

    def __init__(self, run_dir: int, users: int, refusals: Refusals) -> None:
        self._run_dir = run_dir
        self._refusals = refusals
        self._kept = min(MAX_LISTED_PER_USER, MAX_LISTED // max(1, users))
        self._entries = min(MAX_USER_ENTRIES, max(MIN_USER_ENTRIES, MAX_ENTRIES // max(1, users)))

    def newest_files(self, names: list[str]) -> list[FileVersion]:
        """Return a user's newest files, in the directories with these names."""
        found = list[FileVersion]()
        left = self._entries
        for name in names:
            left -= self._read(name, left, found)
        for version in found[self._kept :]:
            self._refusals.exceed(version.path, version.uid, "too_many")
        return found[: self._kept]

    def _read(self, name: str, limit: int, found: list[FileVersion]) -> int:
        """Add the newest files of a directory to `found`; return how many entries were seen."""
        seen = 0
        try:
            with (
                open_untrusted_directory(name, directory=self._run_dir) as (descriptor, status),
                os.scandir(descriptor) as entries,
            ):
                for entry in islice(entries, limit):
                    seen += 1
                    if entry.name.endswith(SAMPLE_SUFFIX):
                        with contextlib.suppress(OSError):  # removed in the meantime
                            version = FileVersion.of(
                                name, entry.name, entry.stat(follow_symlinks=False)
                            )
                            self._keep(version, status.st_uid, found)
        except UntrustedFileError as error:
            self._refuse(name, error.problem)
        except OSError as error:
            if lacks_descriptors(error):
                self._refuse(name, "no_descriptors")
        # One more than is kept, so that `newest_files` sees that there were too many.
        _cut_oldest(found, self._kept + 1)
        return seen

    def _refuse(self, name: str, reason: Reason) -> None:
        with contextlib.suppress(OSError):  # removed in the meantime
            uid = os.stat(name, dir_fd=self._run_dir, follow_symlinks=False).st_uid
            self._refusals.exceed(name, uid, reason)

    def _keep(self, version: FileVersion, owner: int, found: list[FileVersion]) -> None:
        if version.uid != owner:
            self._refusals.exceed(version.path, version.uid, "foreign_owner")
            return
        found.append(version)
        if len(found) > 2 * self._kept:
            _cut_oldest(found, self._kept + 1)


def _cut_oldest(found: list[FileVersion], kept: int) -> None:
    found.sort(key=lambda version: version.changed_ns, reverse=True)
    del found[kept:]
