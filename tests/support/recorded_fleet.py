"""A small fleet, played in seconds, in which most that rules and boards know happens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from docs.generate.pictures.history import History, Scrapes
from docs.generate.pictures.nodes import GIB, Labels, Node, NodePlan, OtherProcess
from docs.generate.pictures.recordings import END, Job, ago
from docs.generate.pictures.rules import evaluate
from docs.generate.pictures.serving import EngineLife
from prometheus_client.parser import text_string_to_metric_families
from support.golden_scrapes import GOLDEN

from torchmem.metrics.catalog import NVML_PROCESS_INFO

START = ago(45)
INTERVAL = 30
TICKS = range(int(START) * 1000, int(END) * 1000 + 1, INTERVAL * 1000)
# Together, these nodes report everything: NVLink and GPM, MIG instances, fans, retired pages.
RECORDED_NODES = ("h100_busy", "mig", "rtx_4090", "v100_old_driver")
OWNER = {
    "uid": "1007",
    "user": "eve",
    "namespace": "research",
    "pod": "notebook-0",
    "pod_uid": "6c1d",
}


def nodes() -> Sequence[NodePlan]:
    """Return nodes that are well, wasteful, sick, without GPU, and out of reach."""
    job = partial(Job, step_seconds=15.0, snapshot_seconds=60.0)
    pretrain = job("pretrain", "healthy-slack", 2, ago(44), steps=170, user="mia", team="language")
    leak = job("vision", "leak", 1, ago(40), steps=120, first_pid=8800, user="ada", team="vision")
    stranded = job("tune", "fragmentation", 1, ago(30), steps=100, first_pid=9300)
    again = job("tune", "healthy-slack", 1, ago(8), steps=100, first_pid=9500)
    tune = [
        *replace(stranded, user="leo", team="language").lives(),
        *replace(again, user="leo", team="language").lives(),
    ]
    probe = job("probe", "healthy-slack", 2, ago(40), end=ago(7), endings={1: "killed"}, steps=130)
    engine = EngineLife(
        "",
        "Qwen3-8B",
        0,
        1,
        pid=5200,
        start=ago(44),
        end=END + 1,
        step_seconds=15.0,
        snapshot_seconds=60.0,
        leaks=True,
    )
    idle = OtherProcess(1, 5101, 24 * GIB, ago(45), END + 1)
    busy = OtherProcess(0, 6100, 12 * GIB, ago(45), END + 1, level=0.4)
    return [
        NodePlan("node1:9847", 2, pretrain.lives(), healthy=True),
        NodePlan("node2:9847", 3, leak.lives(), [idle], host=1, lost=(2, ago(12))),
        NodePlan("node3:9847", 2, tune, host=2, mig=True),
        NodePlan("node4:9847", 1, [(0, engine)], [busy], host=3, lean=True),
        NodePlan("node5:9847", 1, host=4, healthy=True, lean=True, gone=ago(9)),
        NodePlan("node6:9847", 0, down="library_not_found"),
        NodePlan("node7:9847", 2, probe.lives(), host=6, lean=True),
    ]


def record(history: History) -> None:
    """Store what Prometheus would have scraped of the fleet, and what its rules had made of it."""
    played = [(Node(plan, START), Scrapes(history)) for plan in nodes()]
    pages = [(dict(_page(name)), Scrapes(history)) for name in RECORDED_NODES]
    for tick in TICKS:
        for node, scrapes in played:
            node.play(tick / 1000)
            scrapes.add(tick, node.scrape())
        for page, scrapes in pages:
            scrapes.add(tick, page)
    history.flush()
    for node, _ in played:
        node.exporter.close()
    evaluate(history, TICKS)


def _page(name: str) -> Iterator[tuple[Labels, float]]:
    """Yield a recorded scrape, with what no two scrapes have in common: launch, and times."""
    text = (GOLDEN / f"{name}.metrics").read_text()
    families = text_string_to_metric_families(text.replace("UID-", f"{len(name)}-"))
    samples = (sample for family in families for sample in family.samples)
    yield (*_target(name), ("__name__", "up")), 1.0
    for number, sample in enumerate(samples):
        labels = {key: text for key, text in sample.labels.items() if text}
        labels |= OWNER if sample.name == NVML_PROCESS_INFO.name else {}
        value = sample.value + number * sample.name.endswith("_timestamp_seconds")
        if not math.isnan(value):
            yield (*labels.items(), *_target(name), ("__name__", sample.name)), value


def _target(name: str) -> Labels:
    return (("instance", f"{name}:9847"), ("job", "torchmem"))
