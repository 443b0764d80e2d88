"""Metric families as rows of label values, which are cheaper than prometheus_client's samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Values: TypeAlias = "float | tuple[float, ...]"
"""The value of a row, or the values of the series that it has."""


class RowFamily(Metric):
    """A family of `rows`: each has a key, which stands for its series, and their value or values.

    `expand` returns the samples of a row from its key and values. prometheus_client's encoders and
    other readers get them from `samples`, which is filled at its first use. `head` is the family
    without samples.
    """

    def __init__(
        self,
        head: Metric,
        rows: Sequence[tuple[Hashable, Values]],
        expand: Callable[[Any, Any], Iterable[Sample]],
    ) -> None:
        # Metric's own __init__ checks the name again, for each family of each page.
        self.name, self.documentation = head.name, head.documentation
        self.unit, self.type = head.unit, head.type
        self.rows, self.expand = rows, expand

    def __getattr__(self, name: str) -> Any:
        if name != "samples":
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        self.samples = [row for key, value in self.rows for row in self.expand(key, value)]
        return self.samples

    def of_row(self, key: Hashable, values: Values) -> Metric:
        """Return a family with the samples of one row."""
        return RowFamily(self, [(key, values)], self.expand)
