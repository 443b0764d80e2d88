"""How much of the page and of the exporter's memory one user of the node may take.

A rank with one GPU has a file of 2 to 8 KB, 70 to 100 series and 15 KB of the page.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from torchmem.explain.threat_series import Judgment, threat_families
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.sample import DeviceSample, Sample

MAX_FILES_PER_USER = 1024
MAX_DEVICES_PER_USER = 2048
MAX_FILE_BYTES_PER_USER = 4 << 20
MAX_SERIES_PER_USER = 30_000
MAX_PAGE_BYTES_PER_USER = 8 << 20

NODE_SHARES = 2
"""All users together may take this many times the budget of one user."""

MAX_PAGE_BYTES_PER_FILE_BYTE = 128
"""Upper bound of page bytes per file byte; the worst file that was found has 50."""

_LINE_BYTES = 24  # braces, value, end of line
_LABEL_BYTES = 4  # =, two quotes, comma


@dataclass(slots=True)
class Budget:
    """The rest of the budget of one user, or of the node."""

    files: int = MAX_FILES_PER_USER
    devices: int = MAX_DEVICES_PER_USER
    file_bytes: int = MAX_FILE_BYTES_PER_USER
    series: int = MAX_SERIES_PER_USER
    page_bytes: int = MAX_PAGE_BYTES_PER_USER

    @classmethod
    def of_node(cls) -> Budget:
        """Return the budget of all users together."""
        user = cls()
        return cls(**{name: getattr(user, name) * NODE_SHARES for name in cls.__slots__})

    def share(self, users: int) -> Budget:
        """Return one user's budget while `users` users, this one included, share what is left."""
        user = Budget()
        return Budget(
            **{
                name: min(getattr(user, name), getattr(self, name) // users)
                for name in self.__slots__
            }
        )

    def take(self, name: str, amount: int) -> bool:
        """Subtract an amount and return True, or return False if it exceeds the rest."""
        rest: int = getattr(self, name)
        if rest < amount:
            return False
        setattr(self, name, rest - amount)
        return True

    def take_all(self, used: Budget, given: Budget) -> None:
        """Subtract what a user has used of the budget `given`, of which `used` is left."""
        for name in self.__slots__:
            spent = getattr(given, name) - getattr(used, name)
            setattr(self, name, getattr(self, name) - spent)


@dataclass(frozen=True, slots=True)
class PageShare:
    """What a process takes of the page: a hash of name and labels of each series, and their bytes.

    The bytes are those of the text format. Both depend only on what becomes a label.
    """

    series: array[int]
    bytes: int

    @classmethod
    def of(cls, sample: Sample, pid: int | str, *, all_series: bool = False) -> PageShare:
        """Return the share of a process."""
        view = ProcessView(sample, pid, "running", {})
        judged = [(labels, _longest(device)) for labels, device in view.devices()]
        page = [*families([view], all_series=all_series), *threat_families(judged)]
        rows = [row for family in page for row in family.samples]
        size = sum(len(row.name) + _LINE_BYTES + _labels_size(row.labels) for row in rows)
        # Python salts the hashes of texts, so no user can make two series equal on purpose.
        return cls(array("q", [hash((row.name, *row.labels.items())) for row in rows]), size)


def _longest(device: DeviceSample) -> Judgment:
    """Return the judgment with most text: which one is made depends on numbers."""
    return Judgment("fragmentation", 0, device.growth.component if device.growth else None)


def _labels_size(labels: Mapping[str, str]) -> int:
    """Return the bytes of labels as text, where a backslash, a quote and a newline take two."""
    escaped = sum(map(_escaped_size, labels.values()))
    return escaped + sum(len(name) + _LABEL_BYTES for name in labels)


def _escaped_size(text: str) -> int:
    return len(text.encode()) + text.count("\\") + text.count('"') + text.count("\n")
