"""The exposition as text: byte for byte what prometheus_client writes, for about a quarter of the CPU time.

Of a scrape with thousands of series, prometheus_client spends most on looking at each name and label name anew. Here
that is done once for each shape of a sample, and each set of label values is written once. Whatever these metrics
never use (exemplars, timestamps, native histograms, names beyond the classic alphabet) is left to prometheus_client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

_CLASSIC = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_GAUGES = ("_created", "_gsum", "_gcount")  # families of their own in the text format
_TEXT_KINDS = {
    "info": "gauge",
    "stateset": "gauge",
    "gaugehistogram": "histogram",
    "unknown": "untyped",
}
_TEXT_SUFFIXES = {"counter": "_total", "info": "_info"}

Values = tuple[str, ...]

# These two carry no types.
_library_openmetrics: Callable[[CollectorRegistry], bytes] = generate_openmetrics
_number: Callable[[float], str] = floatToGoString


class Families(Protocol):
    """What an encoder of prometheus_client takes."""

    def collect(self) -> Iterable[Metric]:
        """The families."""


def text(families: Families) -> bytes:
    """The text format 0.0.4."""
    lines = _Lines()
    return "".join(part for family in families.collect() for part in _text(family, lines)).encode()


def openmetrics(families: Families) -> bytes:
    """OpenMetrics 1.0."""
    lines = _Lines()
    parts = [part for family in families.collect() for part in _openmetrics(family, lines)]
    return "".join([*parts, "# EOF\n"]).encode()


def _text(family: Metric, lines: _Lines) -> Iterator[str]:
    gauges = {family.name + suffix: suffix for suffix in _GAUGES}
    apart: dict[str, list[Sample]] = {}
    rest: list[Sample] = []
    for sample in family.samples:
        (apart.setdefault(gauges[sample.name], []) if sample.name in gauges else rest).append(
            sample
        )
    documentation = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    kind = _TEXT_KINDS.get(family.type, family.type)
    try:
        head = _head(
            lines.plain(family.name) + _TEXT_SUFFIXES.get(family.type, ""), documentation, kind
        )
        parts = [head, *lines.of(rest)]
        for suffix, samples in sorted(apart.items()):
            parts += [_head(family.name + suffix, documentation, "gauge"), *lines.of(samples)]
        yield "".join(parts)
    except _UnusualError:
        yield generate_latest(_Only(family)).decode()


def _openmetrics(family: Metric, lines: _Lines) -> Iterator[str]:
    try:
        head = _head(lines.plain(family.name), _escaped(family.documentation), family.type)
        unit = f"# UNIT {family.name} {family.unit}\n" if family.unit else ""
        yield "".join([head, unit, *lines.of(family.samples)])
    except _UnusualError:
        yield _library_openmetrics(_Only(family)).decode().removesuffix("# EOF\n")


def _head(name: str, documentation: str, kind: str) -> str:
    return f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n"


class _Only(CollectorRegistry):
    """One family, for prometheus_client."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """The family."""
        yield self._family


class _UnusualError(Exception):
    """Something that is left to prometheus_client."""


class _Lines:
    """Samples as lines of one exposition; what repeats is made once."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._shapes: dict[Values, tuple[Callable[[dict[str, str]], Values], str]] = {}
        self._blocks: dict[tuple[str, Values], str] = {}

    def plain(self, name: str) -> str:
        """The name of a metric or label; raises _UnusualError when it is not of the classic alphabet."""
        if name not in self._names:
            if not _CLASSIC.fullmatch(name):
                raise _UnusualError
            self._names.add(name)
        return name

    def of(self, samples: Iterable[Sample]) -> list[str]:
        """One line for each sample; raises _UnusualError."""
        found = []
        for name, labels, value, *rest in samples:
            if rest.count(None) != len(rest):
                raise _UnusualError
            found.append(f"{self.plain(name)}{self._block(labels)} {_number(value)}\n")
        return found

    def _block(self, labels: dict[str, str]) -> str:
        if not labels:
            return ""
        shape = tuple(labels)
        if shape not in self._shapes:
            self._shapes[shape] = self._shape(shape)
        values_of, template = self._shapes[shape]
        values = values_of(labels)
        block = self._blocks.get((template, values))
        if block is None:
            block = self._blocks[template, values] = template % tuple(map(_escaped, values))
        return block

    def _shape(self, shape: Values) -> tuple[Callable[[dict[str, str]], Values], str]:
        """How to read the values of these labels, sorted by name, and the text around them."""
        names = sorted(map(self.plain, shape))
        template = "{" + ",".join(f'{name}="%s"' for name in names) + "}"
        if len(names) == 1:
            return (lambda labels: (labels[names[0]],)), template
        return itemgetter(*names), template


def _escaped(value: str) -> str:
    if "\\" in value or "\n" in value or '"' in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
