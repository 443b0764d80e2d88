"""What a client takes, by its Accept headers with their weights (RFC 9110, 12.4.2 and 12.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchmem.exporter import exposition
from torchmem.exporter.exposition import Families

_MOST_ITEMS = 32


@dataclass(frozen=True, slots=True)
class Format:
    """One exposition format."""

    content_type: str
    encode: Callable[[Families], bytes]


TEXT = Format("text/plain; version=0.0.4; charset=utf-8", exposition.text)
OPENMETRICS = Format(
    "application/openmetrics-text; version=1.0.0; charset=utf-8", exposition.openmetrics
)


def choose_format(accept: str) -> Format:
    """OpenMetrics 1.0.0 for a client that prefers it over text; text for every other one."""
    weights = {TEXT: 0.0, OPENMETRICS: 0.0}
    for name, parameters, weight in _items(accept):
        if name == "application/openmetrics-text" and parameters.get("version", "1.0.0") == "1.0.0":
            weights[OPENMETRICS] = max(weights[OPENMETRICS], weight)
        elif name in {"text/plain", "text/*", "*/*"}:
            weights[TEXT] = max(weights[TEXT], weight)
    return (
        OPENMETRICS if weights[OPENMETRICS] > 0 and weights[OPENMETRICS] >= weights[TEXT] else TEXT
    )


def takes_gzip(accept_encoding: str) -> bool:
    """Whether the client asked for gzip; `gzip;q=0` forbids it, and `*` stands for what is not named."""
    weights = {name: weight for name, _, weight in _items(accept_encoding)}
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _items(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, parameters and weight of each item; one with a broken weight is left out."""
    for item in header.split(",")[:_MOST_ITEMS]:
        name, *rest = (part.strip().lower() for part in item.split(";"))
        parameters = {
            key.strip(): value.strip().strip('"')
            for key, _, value in (part.partition("=") for part in rest)
        }
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            continue
        if name and 0 <= weight <= 1:
            yield name, parameters, weight
