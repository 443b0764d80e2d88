"""A faster encoder for metric families, which benchmarks/encoders.py compares.

It writes each set of label values once for each exposition, where prometheus_client looks at every
name and label of every sample. It handles only what torchmem's families have: names of the classic
alphabet, and no timestamps, exemplars or native histograms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

_TEXT_TYPES = {"info": "gauge", "unknown": "untyped"}
_TEXT_SUFFIXES = {"counter": "_total", "info": "_info"}

_number: Callable[[float], str] = floatToGoString  # it has no annotations


def text(registry: CollectorRegistry) -> bytes:
    """Return the text format 0.0.4."""
    lines = _Lines()
    return "".join(part for family in registry.collect() for part in _text(family, lines)).encode()


def openmetrics(registry: CollectorRegistry) -> bytes:
    """Return OpenMetrics 1.0."""
    lines = _Lines()
    parts = [part for family in registry.collect() for part in _openmetrics(family, lines)]
    return "".join([*parts, "# EOF\n"]).encode()


def _text(family: Metric, lines: _Lines) -> Iterator[str]:
    name = family.name + _TEXT_SUFFIXES.get(family.type, "")
    documentation = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {documentation}\n"
    yield f"# TYPE {name} {_TEXT_TYPES.get(family.type, family.type)}\n"
    yield from lines.of(family.samples)


def _openmetrics(family: Metric, lines: _Lines) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.documentation)}\n"
    yield f"# TYPE {family.name} {family.type}\n"
    if family.unit:
        yield f"# UNIT {family.name} {family.unit}\n"
    yield from lines.of(family.samples)


class _Lines:
    """The samples of one exposition as lines; equal label sets are written once."""

    def __init__(self) -> None:
        self._labels: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}

    def of(self, samples: Iterable[Sample]) -> Iterator[str]:
        for name, labels, value, *_ in samples:
            yield f"{name}{self._block(labels)} {_number(value)}\n"

    def _block(self, labels: dict[str, str]) -> str:
        if not labels:
            return ""
        key = (tuple(labels), tuple(labels.values()))
        block = self._labels.get(key)
        if block is None:
            pairs = (f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
            block = self._labels[key] = "{" + ",".join(pairs) + "}"
        return block


def _escaped(value: str) -> str:
    if "\\" in value or "\n" in value or '"' in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
