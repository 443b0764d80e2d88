"""The keys of `torchmem top`, for its help, its --help and the documentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """The names of keys that do the same, and what they do."""

    names: tuple[str, ...]
    does: str


KEYS = (
    Key(("Up", "Down", "j", "k"), "select a rank; scroll in a report"),
    Key(("Page Up", "Page Down", "Home", "End"), "move by ten, to the first, or to the last"),
    Key(("Enter",), "open the rank's report, that of `torchmem why`"),
    Key(("Esc",), "go back; in the list, remove the filter"),
    Key(("s",), "order by rank, least headroom or most reserved"),
    Key(("/",), "show only runs whose names contain a text"),
    Key(("?", "h", "F1"), "explain the keys, the columns and the bars"),
    Key(("q", "Ctrl-C"), "quit"),
)
KEY_COLUMNS = 2 + max(len(" ".join(key.names)) for key in KEYS)
