"""The past of a store: the points that rules and panels look back at, without waiting for them."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, islice
from random import Random
from typing import Any

from benchmarks.cluster.watching import HOUR, Watcher, seconds
from support.dashboards import BOARDS, PANELS, filled_in
from support.promql import rules
from support.stack import get

BATCH = 1000
_WINDOW = re.compile(
    r"(?P<name>[a-z]\w*(?::\w+)*)(?:\{[^}]*\})?"
    r"(?:\[(?P<window>\d+[smhd])(?::\w+)?\])?(?: offset (?P<offset>\d+[smhd]))?"
)


def windows() -> dict[str, int]:
    """Return the seconds that rules and the dashboard Fleet look back, by metric; at most an hour.

    The dashboard shows an hour. Rules that look back a day read a few series of each run.
    """
    texts = [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)]
    for panel in PANELS.values():
        if panel in BOARDS["fleet"]["panels"]:
            texts += [filled_in(target["expr"], span="1h") for target in panel["targets"]]
    longest: dict[str, int] = {}
    for text in texts:
        for match in _WINDOW.finditer(text):
            durations = filter(None, match.group("window", "offset"))
            if looked_back := sum(map(seconds, durations)):
                known = longest.get(match["name"], 0)
                longest[match["name"]] = min(HOUR, max(looked_back, known))
    return longest


def fill(watcher: Watcher, at: float, interval: float, points: int) -> int:
    """Write the `points` of an hour before `at` for all series with a window; return how many.

    A series with a window of half an hour gets half of the points. Each rises slowly to its newest
    value, so that no counter starts again. `interval` is between two points (s).
    """
    written = 0
    for name, window in windows().items():
        times = [int((at - number * interval) * 1000) for number in range(1, points + 1)]
        kept = times[: points * window // HOUR]
        for batch in _batches(watcher.ask("query", query=name, time=at)["result"]):
            request = urllib.request.Request(  # noqa: S310 - loopback
                f"{watcher.url}/api/v1/import", "\n".join(_lines(batch, kept)).encode()
            )
            urllib.request.urlopen(request, timeout=120).close()  # noqa: S310
            written += len(batch) * len(kept)
    get(f"{watcher.url}/internal/force_flush")
    return written


def _batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _lines(rows: Iterable[Mapping[str, Any]], times: list[int]) -> Iterator[str]:
    """Yield each series as VictoriaMetrics imports it; `times` are in ms, newest first."""
    chance = Random(0)  # noqa: S311
    shares = list(accumulate((chance.random() * 1e-4 for _ in times), initial=0.0))
    moments = json.dumps(times)
    for row in rows:
        value = float(row["value"][1])
        metric = json.dumps(row["metric"])
        values = json.dumps([_past(value, share) for share in shares[1:]])
        yield f'{{"metric":{metric},"values":{values},"timestamps":{moments}}}'


def _past(value: float, share: float) -> float:
    """Return a value that is lower by a share, as an integer if it is large; 0 and 1 are states."""
    if value in (0.0, 1.0):
        return value
    return round(value * (1 - share), None if abs(value) > 1000 else 6)
