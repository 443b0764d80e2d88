"""The last ten minutes of a node: what is kept, for how long, and in how many bytes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live.test_page import dead_process, node_of
from support.browser import Page
from support.publishing import own_sample, publish
from support.waiting import until

from torchmem.demo.node import SimulatedNode, uuid
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.explain.parts import GROUPS, LEGEND, PartBytes, group_bytes
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.history import (
    MAX_GPUS,
    MAX_POINTS,
    MAX_RANKS_PER_USER,
    MAX_SERIES,
    SECONDS,
    SPACING_SECONDS,
    HistorySeries,
    NodeHistory,
)
from torchmem.exporter.live.states import States
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.node.state import GpuState, NodeState, NvmlState, RankState
from torchmem.sample.sample import Ending, State

GIB = 1 << 30
NVML_ERROR_GPU_IS_LOST = 15


def node(time: float, *ranks: RankState, gpus: int = 1) -> NodeState:
    """Return the state of a node whose GPUs have 80 GiB, and these ranks on the first one."""
    parts = (PartBytes("in_use", 30 * GIB), PartBytes("free", 50 * GIB))
    found = [
        GpuState(uuid=f"GPU-{at}", up=True, parts=parts, ranks=() if at else ranks)
        for at in range(gpus)
    ]
    return NodeState(
        schema=1,
        time=time,
        node="node",
        version="0",
        nvml=NvmlState(up=True),
        legend=LEGEND,
        gpus=tuple(found),
        waiting=(),
    )


def rank(time: float, id_: str = "a", state: State = "running", **more: object) -> RankState:
    """Return a rank that has published at a time."""
    values = {"tensor_bytes": int(time), "reserved_bytes": int(time) + 1, **more}
    return RankState(
        id=id_,
        rank=0,
        run="night",
        pid=1,
        state=state,
        sample_time=time,
        **values,  # type: ignore[arg-type]
    )


@given(st.lists(st.floats(0.1, 400), max_size=300))
def test_a_series_is_bounded_and_ends_with_the_newest_point(pauses: list[float]) -> None:
    """It keeps the newest point, none older than ten minutes, and never more than MAX_POINTS."""
    series, now = HistorySeries(("one",)), 0.0
    for pause in pauses:
        now += pause
        series.add(now, [now])
    columns = series.columns
    times = list(columns.times)

    assert len(times) == len(columns.values["one"]) <= MAX_POINTS
    if times:
        assert times[-1] == round(now, 1)
        assert times[0] >= now - SECONDS - 0.1
    assert all(after - before >= SPACING_SECONDS - 0.2 for before, after in pairwise(times[:-1]))
    assert [value and round(value, 1) for value in columns.values["one"]] == times


def test_a_rank_that_died_keeps_its_last_minutes() -> None:
    """Its last point is what it published at its end, however long ago that was."""
    history = NodeHistory()
    for time in range(0, 700, 10):
        history.add(node(time, rank(time)))
    for time in range(700, 1500, 10):
        history.add(node(time, rank(695, state="oom")))
    kept = history.of_rank("GPU-0", "a")

    assert (kept.times[0], kept.times[-1]) == (100.0, 695.0)
    assert (kept.values["reserved_bytes"][-1], kept.values["tensor_bytes"][-1]) == (696, 695)
    assert history.of_gpus().gpus["GPU-0"].times[-1] == 1490.0


def test_what_is_gone_is_forgotten() -> None:
    """A rank that the node no longer publishes has no history, and neither has a removed GPU."""
    history = NodeHistory()
    history.add(node(1, rank(1), gpus=2))
    history.add(node(2))

    assert list(history.of_rank("GPU-0", "a").times) == []
    assert list(history.of_gpus().gpus) == ["GPU-0"]


def test_the_budget() -> None:
    """All series together take at most the documented bytes, and no user takes all of them."""
    users = 2 * (MAX_SERIES // MAX_RANKS_PER_USER)
    ranks = [
        rank(1, f"{user}-{number}", uid=user)
        for user in range(users)
        for number in range(2 * MAX_RANKS_PER_USER)
    ]
    history = NodeHistory()
    history.add(node(1, *ranks, gpus=200))
    kept = [r.uid for r in ranks if len(history.of_rank("GPU-0", r.id).times)]
    series = HistorySeries(("a", "b", "c", "d", "e"))
    for time in range(5000):
        series.add(time, [1.0] * 5)

    assert len(history.of_gpus().gpus) == MAX_GPUS
    assert len(kept) == MAX_SERIES - MAX_GPUS
    assert max(map(kept.count, set(kept))) == MAX_RANKS_PER_USER
    assert sum(map(sys.getsizeof, arrays(series))) <= 8 << 10


def arrays(series: HistorySeries) -> Iterator[object]:
    """Yield the columns of a series as they are kept."""
    columns = series.columns
    yield from (memory_of(columns.times), *map(memory_of, columns.values.values()))


def memory_of(column: object) -> bytes:
    """Return as many bytes as a column of float64 has."""
    return bytes(8 * len(column))  # type: ignore[arg-type]


def test_groups_are_all_memory_that_is_not_free() -> None:
    """The groups of a GPU's parts add up to its parts without the free ones."""
    parts = [PartBytes(entry.name, at + 1) for at, entry in enumerate(LEGEND)]
    free = sum(part.bytes for part in parts if part.name == "free")

    assert sum(group_bytes(parts)) == sum(part.bytes for part in parts) - free
    assert {entry.group for entry in LEGEND} == {"", *(group.name for group in GROUPS)}


def test_it_is_the_nodes(page: Page, tmp_path: Path) -> None:
    """Who opens the page after the end of a rank sees the minutes before it, as others did.

    A legend names the lines, each by its own color and stroke.
    """
    first = own_sample(uuid(0))
    with (
        node_of(tmp_path) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        publish(tmp_path, first)

        def points() -> list[float]:
            state = client.get("/api/v1/state").json()
            ranks = state["gpus"][0]["ranks"]
            query = {"id": ranks[0]["id"], "gpu": uuid(0)} if ranks else {"id": ""}
            answer = client.get("/api/v1/history", params=query)
            found: list[float] = answer.json()["times"] if ranks else []
            return found

        until(lambda: len(points()) == 1)
        publish(tmp_path, replace(first, timestamp=first.timestamp + 0.5, ended="oom"))
        until(lambda: len(points()) == 2)
        known = client.get("/api/v1/history").json()

        page.goto(server.url)
        page.wait("document.querySelector('.rank .row')")
        page.click(".rank .row")
        page.wait("document.querySelectorAll('.details .chart .uplot').length === 2")
        legend = page.evaluate(
            "[...document.querySelectorAll('.details .line-names:not([hidden]) span')].map((name)"
            " => [name.textContent, name.firstChild.style.borderTopColor])"
        )
        shown = page.evaluate(columns(page))

    *earlier, _ = known["gpus"][uuid(0)]["times"]  # the next point may replace the newest one
    assert earlier
    assert set(earlier) <= set(shown[0])
    assert [name for name, _ in legend] == ["tensors", "reserved", "headroom"]
    assert len({stroke for _, stroke in legend} - {""}) == 3


def columns(page: Page) -> str:
    """Return JavaScript for what the page knows of the past of its first GPU."""
    source = page.evaluate("document.querySelector('script[type=module]').src")
    history_js = source.replace("page.js", "history.js")
    return f"import('{history_js}').then(({{ ofGpu }}) => ofGpu({json.dumps({'uuid': uuid(0)})}))"


def test_the_past_of_a_lost_gpu_goes_on(page: Page, tmp_path: Path) -> None:
    """The chart of a GPU that is lost moves on with a gap, instead of standing still."""
    (gpu,) = SimulatedNode(1).gpus(60.0)
    exporter = Exporter(FakeNvml.of(gpu), RunDirectory(tmp_path))
    with closing(exporter), closing(serve(exporter, port=0)) as server:
        page.goto(server.url)
        page.wait("document.querySelector('.past .uplot')")
        gpu.error_code = NVML_ERROR_GPU_IS_LOST
        gap = "(columns) => columns[1].filter((each) => each === null).length > 1"
        page.wait(f"{columns(page)}.then({gap})")
        times, *groups = page.evaluate(columns(page))

    gaps = [all(group[at] is None for group in groups) for at in range(len(times))]
    assert gaps == sorted(gaps)
    assert not gaps[0]
    assert times == sorted(times)


@pytest.mark.parametrize(("ended", "seconds"), [(None, 20), ("exited", 120)])
def test_without_scrapes_a_running_rank_is_followed(
    tmp_path: Path, ended: Ending | None, seconds: float
) -> None:
    """Where nothing scrapes, the exporter makes points often while a rank runs, else rarely."""
    publish(tmp_path, replace(own_sample(uuid(0)), ended=ended))
    simulated = SimulatedNode(1)
    nvml = FakeNvml(lambda: simulated.gpus(60.0, [{}]))
    with closing(Exporter(nvml, RunDirectory(tmp_path))) as exporter:
        exporter.collect()
        states = States(partial(asyncio.to_thread, exporter.collect), exporter.found)

        assert states.max_history_age == seconds


def test_a_scrape_makes_a_point(tmp_path: Path) -> None:
    """A collection for a scrape adds to the history too, but not a second one soon after it."""
    publish(tmp_path, own_sample(uuid(0)))
    simulated = SimulatedNode(1)
    nvml = FakeNvml(lambda: simulated.gpus(60.0, [{}]))
    with closing(Exporter(nvml, RunDirectory(tmp_path))) as exporter:
        states = States(partial(asyncio.to_thread, exporter.collect), exporter.found)
        counts = []
        for _ in range(2):
            exporter.collect()
            states.note_collection()
            counts.append(len(states.history.of_gpus().gpus[uuid(0)].times))

    assert counts == [1, 1]


def test_an_unknown_rank_has_none(tmp_path: Path) -> None:
    """It is a 404, as in /api/v1/rank."""
    publish(tmp_path, own_sample(uuid(0), dead_process(1)))
    with node_of(tmp_path) as server:
        answer = httpx.get(
            f"{server.url}/api/v1/history",
            params={"id": "x", "gpu": "y"},
            trust_env=False,
            timeout=60,
        )

    assert answer.status_code == 404


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_it_can_be_compressed(tmp_path: Path, coding: str) -> None:
    """The answer is the same with and without gzip."""
    with node_of(tmp_path) as server:
        answer = httpx.get(
            f"{server.url}/api/v1/history",
            headers={"Accept-Encoding": coding},
            trust_env=False,
            timeout=60,
        )

    assert answer.headers.get("content-encoding", "identity") == coding
    assert answer.json()["seconds"] == SECONDS
    assert set(answer.json()["gpus"]) == {uuid(0), uuid(1)}


def test_the_legend_has_the_colors_of_the_past(page: Page, tmp_path: Path) -> None:
    """Each area of a GPU's last minutes is in the legend, also where the bar shows its parts.

    Pointing at tensors brings out what they consist of.
    """
    with node_of(tmp_path) as server:
        publish(tmp_path, own_sample(uuid(0)))
        page.goto(server.url)
        page.wait("document.querySelector('.past .uplot')")
        page.wait("document.querySelectorAll('.gpu-bar .segment').length > 1")
        tensors = "[...document.querySelectorAll('#legend button')].find((it) => "
        tensors += "it.textContent === 'tensors')"
        page.wait(tensors)
        state = httpx.get(f"{server.url}/api/v1/state", trust_env=False, timeout=60).json()
        shown = page.evaluate(
            "[...document.querySelectorAll('#legend .swatch')].map((it) => it.style.background)"
        )
        meaning = page.evaluate(f"{tensors}.title")
        page.evaluate(f"{tensors}.focus()")
        bright = page.evaluate(
            "[...document.querySelectorAll('.gpu-bar .segment:not(.dim)')].map((it) => "
            "it.dataset.part)"
        )
    parts = {part["name"] for part in state["gpus"][0]["parts"]}
    group = {entry["name"]: entry.get("group") for entry in state["legend"]}

    areas = {group[name] for name in parts if group[name]}
    assert {f"var(--part-{name.replace('_', '-')})" for name in areas} <= set(shown)
    assert "in_use" not in parts
    assert meaning.startswith("Over time: ")
    assert set(bright) == {name for name in parts if group[name] == "in_use"}
