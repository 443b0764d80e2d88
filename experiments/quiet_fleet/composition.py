"""The series of nodes in a window of time, made of recordings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from experiments.quiet_fleet.fleet import GPUS, Fleet, Placed
from experiments.quiet_fleet.node import KEPT_SECONDS
from experiments.quiet_fleet.recordings import Recording, Values, Workload, recorded

IDLE, DRIVER_DOWN = Workload("idle", hours=0.5), Workload("driver down", hours=0.5)
TAIL = round(KEPT_SECONDS / 60)
_RUN_LABELS = re.compile(r'(rank="0"|pid="P"|run="some-run"|launch="L")')
MISSED = np.inf
"""The value of a minute in which Prometheus did not scrape: nothing, and no mark of an end."""

Window = tuple[int, int]
"""First minute, and the one after the last."""


def read_only(recording: Recording, read: frozenset[str]) -> Recording:
    """Return a recording with the series that rules read."""
    kept = {n: v for n, v in recording.series.items() if n.partition("{")[0] in read}
    return Recording(recording.body, kept)


class Composer:
    """Makes the series of a fleet's nodes from recordings; `read`: the metrics that rules read."""

    def __init__(self, fleet: Fleet, folder: Path, read: frozenset[str]) -> None:
        self._fleet, self._folder, self._read = fleet, folder, read
        self._recordings: dict[Workload, Recording] = {}

    def series(
        self, nodes: Iterable[str], window: Window, step: int = 1
    ) -> Iterator[tuple[str, str]]:
        """Yield the series of some nodes and their values, in promtool's notation, for a step."""
        for node in nodes:
            for name, values in self._node(node, window).items():
                yield name, notation(values, step)

    def _recording(self, workload: Workload) -> Recording:
        if workload not in self._recordings:
            found = recorded(workload, self._folder)
            self._recordings[workload] = read_only(found, self._read)
        return self._recordings[workload]

    def _node(self, node: str, window: Window) -> Mapping[str, Values]:
        found: dict[str, Values] = {}
        first, end = window
        for gpu in range(GPUS):
            self._place(found, IDLE, (node, gpu), window, window)
        placed = (each for each in self._fleet.placed if each.node == node)
        for each in sorted(placed, key=lambda each: each.start):
            self._place_process(found, each, window)
        up = f'up{{job="torchmem",instance="{node}:9847"}}'
        found[up] = np.ones(end - first)
        for kind, where, at, minutes in self._fleet.outages:
            if where in ("", node):
                self._interrupt(found, kind, node, (at - first, at - first + minutes), window)
        return found

    def _place(
        self,
        found: dict[str, Values],
        workload: Workload,
        where: tuple[str, int],
        minutes: Window,
        window: Window,
    ) -> None:
        """Fill a GPU's minutes with the last minute of a recording."""
        for name, values in self._recording(workload).series.items():
            into = found.setdefault(renamed(name, *where), np.full(window[1] - window[0], np.nan))
            into[minutes[0] - window[0] : minutes[1] - window[0]] = values[-1]

    def _place_process(self, found: dict[str, Values], placed: Placed, window: Window) -> None:
        recording = self._recording(placed.workload)
        minutes = recording.minutes(placed.loops) + TAIL
        first, end = max(window[0], placed.start), min(window[1], placed.start + minutes)
        if first >= end:
            return
        for name in recording.series:
            if "uuid=" not in name and "pid=" not in name:
                continue
            lasting = recording.lasting(name, placed.loops)
            part = lasting[first - placed.start : end - placed.start]
            if name.partition("{")[0].endswith("_timestamp_seconds"):
                part = part + 60.0 * (placed.start - window[0])
            into = found.setdefault(
                renamed(name, placed.node, placed.gpu, placed),
                np.full(window[1] - window[0], np.nan),
            )
            into[first - window[0] : first - window[0] + len(part)] = part

    def _interrupt(
        self, found: dict[str, Values], kind: str, node: str, minutes: Window, window: Window
    ) -> None:
        first, end = max(0, minutes[0]), min(window[1] - window[0], minutes[1])
        if first >= end:
            return
        for name, values in found.items():
            is_up = name.startswith("up{")
            if kind == "prometheus":
                values[first:end] = MISSED
            elif kind != "driver":
                values[first:end] = 0.0 if is_up else np.nan
            elif name.startswith(("nvml_", "torchmem_exporter_collector")):
                values[first:end] = np.nan
            if kind == "reboot" and name.startswith("torchmem_exporter_start_timestamp"):
                values[end:] = 60.0 * end
        if kind == "driver":
            away = first + window[0], end + window[0]
            self._place(found, DRIVER_DOWN, (node, 0), away, window)


def renamed(name: str, node: str, gpu: int, placed: Placed | None = None) -> str:
    """Return a recorded series as the fleet has it."""
    name = name.replace('instance="node:9847"', f'instance="{node}:9847"')
    name = name.replace('gpu="0"', f'gpu="{gpu}"').replace("GPU-node", f"GPU-{node}-{gpu}")
    if placed is None:
        return name
    labels = {
        'rank="0"': f'rank="{placed.rank}"',
        'pid="P"': f'pid="{placed.pid}"',
        'run="some-run"': f'run="{placed.run}"',
        'launch="L"': f'launch="{placed.launch}"',
    }
    return _RUN_LABELS.sub(lambda match: labels[match[0]], name)


def notation(values: Values, step: int = 1) -> str:
    """Return values as promtool reads them; a series ends where a scrape lacks it.

    Between evaluations, which come every `step` minutes, a value that repeats is left out: promtool
    takes longer to store it than to evaluate it, and no rule sees it.
    """
    same = (values[1:] == values[:-1]) | (np.isnan(values[1:]) & np.isnan(values[:-1]))
    begins = [0, *(np.flatnonzero(~same) + 1).tolist(), len(values)]
    words: list[str] = []
    for first, end in pairwise(begins):
        words += _repeated(float(values[first]), first, end, step)
    return " ".join(words)


def _repeated(value: float, first: int, end: int, step: int) -> list[str]:
    """Return the words for a value from a minute until another."""
    if np.isnan(value):
        words = ["stale"] if first else ["_"]
        return words + [f"_x{end - first - 1}"] * (end - first > 1)
    if np.isinf(value):
        return [f"_x{end - first}"]
    text = str(int(value)) if value.is_integer() else repr(value)
    if step == 1:
        return [f"{text}x{end - first - 1}" if end - first > 1 else text]
    kept = {first, *range(first + -first % step, end, step)}
    return [text if minute in kept else "_" for minute in range(first, end)]
