"""Three days of a fleet in a real store, with numbers that are known exactly."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from docs.generate.pictures.history import STALE, History, prometheus
from support.stack import get, victoria_metrics

from torchmem.sample.remedy_words import REMEDY_WORDS

HOUR = 3600
DAYS = 3
GIB = 1 << 30
Span = tuple[float, float, float]
"""From an hour to an hour of the three days, and the value in that time."""
Runs = dict[str, list[Span]]

END = int(time.time()) // HOUR * HOUR - HOUR
START = END - DAYS * 24 * HOUR

OWNERS = {
    "gpt": {"user": "mia", "team": "vision", "namespace": "train", "model": "NVIDIA H100"},
    "probe": {"user": "leo", "team": "speech", "namespace": "dev", "model": "NVIDIA A100"},
}
PRICES = {"NVIDIA H100": 2.5, "NVIDIA A100": 1.0}
CURRENCY = "EUR"
# All GPUs with a price, by model. A GPU of a gone process is an A100.
PRICED: dict[str, Runs] = {
    "cluster:torchmem_priced_gpus:count": {model: [(0, 72, 4)] for model in PRICES},
    "cluster:nvml_idle_held_priced_gpus:sum": {"NVIDIA A100": [(40, 44, 0.5), (50, 53, 1)]},
    "cluster:torchmem_wasted_priced_gpus:sum": {
        "NVIDIA H100": [(12, 14, 0.5)],
        "NVIDIA A100": [(24, 32, 0.25), (40, 44, 0.5), (50, 53, 1)],
    },
}
# GPUs: of a launch until an OOM at 10:00, of one that starts again at 11:00, and of another run.
USED: Runs = {"gpt": [(0, 10, 2), (10, 10.5, 1), (11, 20, 2)], "probe": [(24, 48, 1)]}
LOST: Runs = {"gpt": [(10, 10.5, 1), (11, 11.1, 2)]}
STRANDED: Runs = {"gpt": [(12, 14, 0.5)], "probe": [(24, 32, 0.25)]}
EMPTY: Runs = {"probe": [(60, 64, 2)]}
IDLE: Runs = {"probe": [(40, 44, 0.5)]}
GPUS = {
    "run:torchmem_gpus:count": USED,
    "run:torchmem_oom_lost_gpus:sum": LOST,
    "run:torchmem_stranded_gpus:sum": STRANDED,
    "run:nvml_idle_held_gpus:sum": IDLE,
    "run:nvml_assigned_empty_gpus:sum": EMPTY,
}
CLUSTER: Runs = {
    "cluster:nvml_gpus:count": [(0, 72, 8)],
    "cluster:nvml_idle_held_gpus:sum": [(40, 44, 0.5), (50, 53, 1)],
    "cluster:torchmem_wasted_gpus:sum": [
        (12, 14, 0.5),
        (24, 32, 0.25),
        (40, 44, 0.5),
        (50, 53, 1),
    ],
}
BYTES = {
    "run:torchmem_peak_need_bytes:max": {"gpt": 70 * GIB, "probe": 20 * GIB},
    "run:torchmem_step_peak_bytes:max": {"gpt": 30 * GIB, "probe": 10 * GIB},
    "run:torchmem_device_total_bytes:min": {"gpt": 80 * GIB, "probe": 80 * GIB},
}
# Run, rank and pid; hours of start and end; state at the end, and steps.
PROCESSES = (
    ("gpt", "0", "10", 0.0, 10.5, "killed", 900),
    ("gpt", "1", "11", 0.0, 10.0, "oom", 900),
    ("gpt", "0", "20", 11.0, 20.0, "exited", 1800),
    ("gpt", "1", "21", 11.0, 20.0, "exited", 1800),
    ("probe", "0", "30", 24.0, 48.0, "exited", 500),
)
STATES = ("running", "exited", "oom", "killed")
MINUTE, PROCESS_INTERVAL = 60, 300


def _points(spans: Iterable[Span], interval: int = MINUTE) -> Iterator[tuple[int, float]]:
    """Yield the points of all spans, the end of each included, with a marker after it."""
    for first, last, value in spans:
        begin, end = (round(START + hours * HOUR) for hours in (first, last))
        for moment in range(begin + interval, end + 1, interval):
            yield moment * 1000, value
        yield (end + interval // 2) * 1000, STALE


def _add(history: History, name: str, spans: Iterable[Span], **labels: str) -> None:
    known = {"__name__": name, "job": "torchmem", **labels}
    history.add(tuple(sorted(known.items())), _points(spans))


def _add_processes(history: History) -> None:
    for run, rank, pid, first, last, ending, steps in PROCESSES:
        labels = {"instance": "n:9847", "rank": rank, "pid": pid, "run": run}
        shown = [(first, last + 0.2, 0.0)]
        seen = START + last * HOUR
        for state in STATES:
            spans = [
                (first, last, float(state == "running")),
                (last, last + 0.2, float(state == ending)),
            ]
            _add(history, "torchmem_process_state", spans, state=state, **labels)
        for name, value in (
            ("process_start_timestamp_seconds", START + first * HOUR),
            ("sample_timestamp_seconds", seen),
            ("steps_total", float(steps)),
        ):
            _add(history, f"torchmem_{name}", [(*shown[0][:2], value)], **labels)
    _add(
        history,
        "rank:torchmem_oom_end:timestamp",
        [(10, 10.2, START + 10 * HOUR)],
        instance="n:9847",
        rank="1",
        pid="11",
        run="gpt",
        cause="fragmentation",
        onset="stranded",
        remedy=REMEDY_WORDS["expandable_segments"],
    )


def fill(url: str) -> None:
    """Write the three days to a store by remote write."""
    history = History(url)
    for name, runs in GPUS.items():
        for run, spans in runs.items():
            _add(history, name, spans, run=run, **OWNERS[run])
    for name, spans in CLUSTER.items():
        _add(history, name, spans)
    for name, models in PRICED.items():
        for model, spans in models.items():
            _add(history, name, spans, model=model)
    for model, price in PRICES.items():
        name = "cluster:torchmem_gpu_hour_price:max"
        _add(history, name, [(0, 72, price)], model=model, currency=CURRENCY)
    for name, values in BYTES.items():
        for run, value in values.items():
            used = [(first, last, float(value)) for first, last, _ in USED[run]]
            _add(history, name, used, run=run)
    _add_processes(history)
    history.flush()


@contextmanager
def filled_prometheus(folder: Path) -> Iterator[str]:
    """Run a Prometheus with the three days; yield its URL."""
    with prometheus(folder) as url:
        fill(url)
        yield url


@contextmanager
def filled_victoria_metrics(folder: Path) -> Iterator[str]:
    """Run a VictoriaMetrics with the three days; yield its URL."""
    with victoria_metrics(folder) as url:
        fill(url)
        get(f"{url}/internal/force_flush")
        yield url
