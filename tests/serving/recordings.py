"""Recordings of real engines: what the exporter said in each state, as one table of series.

`WRITE_RECORDINGS=1 make test-serving test-sglang` makes them again. The tests of the rules read
them, which need no engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parent / "recordings"
TIME = "torchmem_sample_timestamp_seconds"
"""Each process writes its sample every few seconds, so the newest one is the time of the page."""


@dataclass(frozen=True)
class Recording:
    """The values of series in one state of an engine, and the time of the page (Unix seconds)."""

    time: float
    values: Mapping[str, float]


def write(name: str, pages: Mapping[str, str]) -> None:
    """Write the pages of an engine's states, if WRITE_RECORDINGS is set."""
    if "WRITE_RECORDINGS" not in os.environ:
        return
    states = {state: _values(page) for state, page in pages.items()}
    series = sorted({each for values in states.values() for each in values})
    rows = {each: [values.get(each) for values in states.values()] for each in series}
    lines = ",\n".join(f"{json.dumps(each)}: {json.dumps(row)}" for each, row in rows.items())
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{name}.json"
    file.write_text(f'{{"states": {json.dumps(list(states))},\n"series": {{\n{lines}\n}}}}\n')


def read(name: str) -> dict[str, Recording]:
    """Return the recordings of an engine by state."""
    table = json.loads((FOLDER / f"{name}.json").read_text())
    found: dict[str, Recording] = {}
    for index, state in enumerate(table["states"]):
        known = {each: row[index] for each, row in table["series"].items()}
        values = {each: value for each, value in known.items() if value is not None}
        times = [value for each, value in values.items() if each.startswith(TIME)]
        found[state] = Recording(max(times), values)
    return found


def _values(page: str) -> dict[str, float]:
    """Return the values of the series of a page, by the text of the series."""
    samples = (s for f in text_string_to_metric_families(page) for s in f.samples)
    return {_series(s.name, s.labels.items()): s.value for s in samples}


def _series(name: str, labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels))
    return f"{name}{{{inside}}}"
