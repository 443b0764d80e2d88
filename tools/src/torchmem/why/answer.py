"""What `torchmem why` returns of any subject."""

from __future__ import annotations

from typing import Protocol


class Answer(Protocol):
    """An explanation, in each of the forms that the command writes."""

    def words(self) -> str:
        """Return it as text for a terminal."""

    def json_lines(self) -> list[str]:
        """Return it as JSON documents, one per line."""

    def page(self) -> bytes:
        """Return it as an HTML page. Raise UsageError if this subject has none."""
