"""What `torchmem why` returns of any subject."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchmem.sample.errors import UsageError


class Answer(Protocol):
    """An explanation, in each of the forms that the command writes."""

    def words(self) -> str:
        """Return it as text for a terminal."""

    def json_lines(self) -> list[str]:
        """Return it as JSON documents, one per line."""

    def page(self) -> bytes:
        """Return it as an HTML page. Raise UsageError if this subject has none."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """An answer about the ranks of a node, as text and as data of JSON.

    `narrow` says how to ask for less, if the answer is too long. `html` writes the page; None if
    there is none.
    """

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    narrow: str = ""
    html: Callable[[], bytes] | None = None

    def words(self) -> str:
        """Return the text."""
        return self.text

    def json_lines(self) -> list[str]:
        """Return the data; what is unknown is null."""
        return [json.dumps(self.data, allow_nan=False)]

    def page(self) -> bytes:
        """Return the page. Raise UsageError if there is none."""
        if self.html is None:
            raise UsageError(
                "--html writes what this machine knows of one rank: leave --list and --exporter "
                "out, or open the page of the exporter."
            )
        return self.html()
