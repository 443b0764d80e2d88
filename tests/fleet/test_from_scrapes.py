"""`torchmem fleet` says what was scraped: through every shipped rule, in a real Prometheus."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from docs.generate.pictures.history import History, prometheus, with_stale_markers
from docs.generate.pictures.rules import evaluate
from support.needs import skip_without
from support.simulated_time import SCRAPE_SECONDS, Series, scrapes

from torchmem.cli.main import main

SCENARIO = "leak"
MINUTE = 60
HOURS = 2
# The first scrape, at a full minute: the report reads one value in each minute.
START = int(time.time()) // MINUTE * MINUTE - HOURS * 3600
UNTIL = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(START + HOURS * 3600))
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def write(url: str, scraped: Series) -> int:
    """Write scrapes to a store; return the number of the last one."""
    history, last = History(url), max(map(max, scraped.values()))
    step = int(SCRAPE_SECONDS * 1000)
    ticks = range(START * 1000, START * 1000 + (last + 2) * step, step)
    for series, values in scraped.items():
        name, _, labelled = series.partition("{")
        # The simulation counts seconds since its start.
        shift = START if name.endswith("_timestamp_seconds") else 0
        points = {ticks[number]: value + shift for number, value in values.items()}
        key = (("__name__", name), *_LABEL.findall(labelled))
        history.add(key, with_stale_markers(points, ticks))
        if name == "torchmem_sample_timestamp_seconds":
            started = dict.fromkeys(points, float(START))
            begun = (("__name__", "torchmem_process_start_timestamp_seconds"), *key[1:])
            history.add(begun, with_stale_markers(started, ticks))
    history.flush()
    return last


@pytest.fixture(scope="module")
def scraped() -> Series:
    """Return the scrapes of two ranks that leak until they run out of memory."""
    return scrapes(SCENARIO)


@pytest.fixture(scope="module")
def store(scraped: Series, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prometheus with these scrapes, and with what the rules made of them each minute."""
    skip_without("prometheus")
    with prometheus(tmp_path_factory.mktemp("store")) as url:
        # Two minutes more, in which the series end.
        seconds = int(write(url, scraped) * SCRAPE_SECONDS) + 2 * MINUTE
        evaluate(History(url), range(START * 1000, (START + seconds) * 1000, MINUTE * 1000))
        yield url


@pytest.fixture
def report(store: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the report of these hours as JSON."""
    since = ["--since", f"{HOURS}h", "--until", UNTIL]
    assert main(["fleet", "--prometheus", store, *since, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def minutes(scraped: Series, prefix: str) -> int:
    """Return in how many full minutes after the start the series with a prefix are 1, together."""
    every = int(MINUTE / SCRAPE_SECONDS)
    return sum(
        values.get(number) == 1.0
        for series, values in scraped.items()
        if series.startswith(prefix)
        for number in range(every, max(values) + 1, every)
    )


def newest(scraped: Series, prefix: str) -> list[float]:
    """Return the last value of each series with a prefix."""
    return [values[max(values)] for series, values in scraped.items() if series.startswith(prefix)]


def labels(scraped: Series, prefix: str, name: str) -> set[str]:
    """Return the values of a label of the series with a prefix that end above 0."""
    return {
        dict(_LABEL.findall(series))[name]
        for series, values in scraped.items()
        if series.startswith(prefix) and values[max(values)] > 0
    }


@pytest.mark.stack
def test_gpu_hours_are_those_of_the_scrapes(report: dict[str, Any], scraped: Series) -> None:
    """The GPU-hours of the run and of all GPUs are the minutes in which their series were there."""
    states = {name: values for name, values in scraped.items() if 'state="running"' in name}

    assert [(bill["run"], bill["used"]) for bill in report["by_run"]] == [
        (SCENARIO, pytest.approx(minutes(states, "torchmem_process_state{") / 60))
    ]
    assert report["all_gpus"] == pytest.approx(minutes(scraped, "nvml_gpu_up{") / 60)


@pytest.mark.stack
def test_the_end_is_that_of_the_scrapes(report: dict[str, Any], scraped: Series) -> None:
    """The launch lasts until its last rank wrote, with the cause and the onset of its OOMs."""
    written = newest(scraped, "torchmem_sample_timestamp_seconds{")
    died = newest(scraped, "torchmem_last_oom_timestamp_seconds{")
    (cause,) = labels(scraped, "torchmem_ooms_total{", "cause")
    (onset,) = labels(scraped, "torchmem_last_oom_info{", "onset")
    (ending,) = report["endings"]

    assert (ending["run"], ending["outcome"], ending["ranks"]) == (SCENARIO, "oom", len(written))
    assert (ending["cause"], ending["onset"]) == (cause, onset)
    assert (ending["start"], ending["end"]) == (START, START + max(written))
    assert ending["gpu_hours"] == pytest.approx(sum(died) / 3600)
