"""The keys of `torchmem top`, for its help, its --help and the documentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """The names of keys that do the same, and what they do."""

    names: tuple[str, ...]
    does: str


KEYS = (
    Key(("↑", "↓", "j", "k"), "select the rank above or below"),
    Key(("Page Up", "Page Down", "Home", "End"), "move by ten ranks, or to the first or last"),
    Key(("Enter",), "open the report of the selected rank, as `torchmem report` prints it"),
    Key(("Esc",), "go back; in the list, remove the filter"),
    Key(("s",), "change the order: by rank, by least headroom, by most reserved memory"),
    Key(("/",), "show only the runs with a text in their names; Enter ends the text"),
    Key(("?", "h", "F1"), "explain the keys, the columns and the parts of the bars"),
    Key(("q", "Ctrl-C"), "quit"),
)
KEY_COLUMNS = 2 + max(len(" ".join(key.names)) for key in KEYS)
