"""What threatens a living rank is a series: the first thing that its page says of its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from prometheus_client.core import Metric
from support.exposition import Exposition, scrape
from support.publishing import own_process, own_sample, publish
from support.samples import full_sample, samples

from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.threat_series import (
    OTHER_KINDS,
    Judgment,
    judged_families,
    judgment,
)
from torchmem.explain.threats import ThreatKind
from torchmem.explain.thresholds import Limits, changed, defaults
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.state import node_state
from torchmem.exporter.subjects.threats import RankThreats
from torchmem.metrics.families import ProcessView
from torchmem.node.published import Published
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import (
    LIVE_STATES,
    STATES,
    DeviceSample,
    Ending,
    HostMemory,
    OomRecord,
    Process,
    Sample,
    possible,
)

OpenExporter = Callable[..., Exporter]
LIMITS: Limits = defaults().limits("night", "node1")
(FULL,) = full_sample().devices
LEAK = Growth("kept", 8 * MIB, 40, GIB, "held", is_leak=True)


def device(headroom: int, flushed: int, stranded: int, **changes: Any) -> DeviceSample:
    """Return a device of 80 GiB on which nothing has grown and nothing was retried."""
    assert FULL.layout is not None
    layout = replace(
        FULL.layout,
        headroom_bytes=headroom,
        headroom_flush_bytes=flushed,
        stranded_bytes=stranded,
    )
    counters = replace(FULL.counters, alloc_retries=0)
    return replace(FULL, layout=layout, counters=counters, **{"growth": None, **changes})


FREE = FULL.layout.releasable_bytes if FULL.layout else 0
CALM = device(10 * GIB, 12 * GIB, 0)
CASES: dict[ThreatKind, tuple[DeviceSample, int | None]] = {
    "leak": (replace(CALM, growth=LEAK), GIB),
    "kept": (replace(CALM, growth=replace(LEAK, is_leak=False)), GIB),
    "larger_step": (replace(CALM, growth=replace(LEAK, kind="larger_step", is_leak=False)), GIB),
    "outside": (replace(CALM, growth=replace(LEAK, kind="outside", is_leak=False)), GIB),
    "fragmentation": (device(2 * GIB, 9 * GIB, 12 * GIB), 12 * GIB),
    "capacity": (device(GIB, GIB, 0, driver_free_bytes=20 * GIB), GIB),
    "external": (device(GIB, GIB, 0, driver_free_bytes=GIB), GIB),
    "library": (device(9 * GIB, 9 * GIB, 0, driver_free_bytes=GIB // 4), FREE),
    "failed": (replace(CALM, last_oom=OomRecord(0.0, GIB, "capacity")), None),
}
"""A device by what threatens its rank first, and the bytes that it is about."""


def sample_of(found: DeviceSample, **changes: Any) -> Sample:
    """Return a sample of this process with one device, and nothing else to tell."""
    failed = found.last_oom is not None and found.growth is None and found.layout == CALM.layout
    plain = {"settings_ignored": {}, "oom_pending": failed, "host": None, "devices": (found,)}
    return own_sample(**{**plain, **changes})


def published_threat(shown: Exposition) -> tuple[dict[str, float], dict[str, float]]:
    """Return torchmem_threat_info and torchmem_threat_bytes by their label threat."""
    return shown.by("threat", "torchmem_threat_info"), shown.by("threat", "torchmem_threat_bytes")


@pytest.mark.parametrize("kind", CASES)
def test_the_series_is_what_the_page_says_first(
    open_exporter: OpenExporter, run_dir: Path, kind: ThreatKind
) -> None:
    """Kind and bytes are those of the first threat on the page; what has no bytes has its kind."""
    found, size = CASES[kind]
    publish(run_dir, sample_of(found))
    exporter = open_exporter()
    infos, sizes = published_threat(scrape(exporter))
    (rank,) = node_state(exporter.found()).gpus[0].ranks

    assert infos == {rank.why[0].kind: 1} == {kind: 1}
    assert sizes == ({} if size is None else {kind: size})
    assert rank.why[0].bytes == size


def test_every_kind_that_concerns_memory_has_a_case() -> None:
    """How a process ended is told by torchmem_process_state."""
    assert {*CASES, *OTHER_KINDS, "ended"} == {*get_args(ThreatKind)}


@pytest.mark.parametrize("ended", ["oom", "failed", "exited"])
def test_a_rank_that_has_ended_has_no_threat(
    open_exporter: OpenExporter, run_dir: Path, ended: Ending
) -> None:
    """What threatened it is over."""
    publish(run_dir, sample_of(CASES["leak"][0], ended=ended))

    assert published_threat(scrape(open_exporter())) == ({}, {})


def test_a_rank_without_a_threat_has_no_series(open_exporter: OpenExporter, run_dir: Path) -> None:
    """Nor has one that has only retried, whose host is full, or whose settings are ignored."""
    retried = replace(CALM, counters=replace(CALM.counters, alloc_retries=3))
    publish(run_dir, own_sample(devices=(retried,), settings_ignored={"a": True}))

    assert published_threat(scrape(open_exporter())) == ({}, {})


def test_the_component_that_grows_is_named(open_exporter: OpenExporter, run_dir: Path) -> None:
    """It is a label of what grows, and of nothing else."""
    exporter = open_exporter()

    def component(kind: ThreatKind) -> set[str]:
        publish(run_dir, sample_of(CASES[kind][0]))
        return {*scrape(exporter).by("component", "torchmem_threat_info")}

    assert component("leak") == {"held"}
    assert component("fragmentation") == {""}


def test_the_thresholds_are_those_of_the_exporter(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """An override applies to its runs, and other thresholds to the next collection."""
    found = CASES["capacity"][0]
    for run in ("llm-a", "gpt"):
        process = own_process(run=run, pid=os.getpid(), rank=len(run))
        publish(run_dir, sample_of(found, process=process), f"{run}{SAMPLE_SUFFIX}")
    override = {"match": {"run": "llm-.*"}, "near_capacity_ratio": 0.001}
    exporter = open_exporter(thresholds=changed({"overrides": [override]}, "a file"))
    first = scrape(exporter).by("run", "torchmem_threat_bytes")
    exporter.configure(5.0, processes_per_gpu=8, pcie_throughput=False, thresholds=defaults())

    assert {*first} == {"gpt"}
    assert {*scrape(exporter).by("run", "torchmem_threat_bytes")} == {"gpt", "llm-a"}


def test_a_sample_is_judged_once() -> None:
    """A scrape judges only what is new: what the exporter adds of the host changes nothing."""
    times: list[DeviceSample] = []

    def judge(sample: Sample, found: DeviceSample, limits: Limits) -> Judgment | None:
        times.append(found)
        return judgment(sample, found, limits)

    judging = RankThreats(judge)
    samples_in_turn = [sample_of(CASES["leak"][0]), sample_of(CALM), sample_of(CALM)]
    for sample in samples_in_turn:
        for scraped in (sample, replace(sample, host=HostMemory(GIB))):
            item = Published(scraped, os.getpid(), "running", attributed=True)
            list(judging.families([item], {}, defaults()))

    assert len(times) == len(samples_in_turn)


@given(samples)
def test_any_possible_sample_has_at_most_one_threat_of_each_device(given_sample: Sample) -> None:
    """In any state: two series at most, of one kind, and none of a rank that has ended."""
    sample, _ = possible(given_sample)
    for state in STATES:
        views = [ProcessView(sample, 1, state, {})] if sample else []
        rows = {metric.name: metric.samples for metric in _judged(views)}
        infos, sizes = rows["torchmem_threat"], rows["torchmem_threat_bytes"]
        kinds = [(row.labels["uuid"], row.labels["threat"]) for row in infos]
        assert not infos or state in LIVE_STATES
        assert {(row.labels["uuid"], row.labels["threat"]) for row in sizes} <= {*kinds}
        assert len(kinds) <= len(sample.devices if sample else ())


def _judged(views: list[ProcessView]) -> Iterator[Metric]:
    def limits(_: Process) -> Limits:
        return LIMITS

    return judged_families(views, limits)


@pytest.mark.parametrize("pace", [0.0, 0.5, -1.0, 5e-324])
def test_a_growth_that_cannot_be_is_left_out(
    open_exporter: OpenExporter, run_dir: Path, pace: float
) -> None:
    """A growth of less than a byte a step is none, and the rank keeps its other series."""
    publish(run_dir, sample_of(replace(CALM, growth=replace(LEAK, bytes_per_step=pace))))
    shown = scrape(open_exporter())

    assert published_threat(shown) == ({}, {})
    assert shown.value("torchmem_steps_total") is not None
