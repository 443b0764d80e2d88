"""From samples to Prometheus metric families: one pure function for exporter, in-process endpoint and textfile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from torchmem.sample import catalog
from torchmem.sample.catalog import MetricSpec
from torchmem.sample.sample import (
    FREE_BLOCK_BOUNDS,
    OOM_CAUSES,
    STATES,
    STEP_DURATION_BOUNDS,
    Allocator,
    ByPool,
    Counters,
    DeviceSample,
    Layout,
    Sample,
    State,
)

Labels = tuple[str, ...]
Row = tuple[Labels, float]

# Prometheus' data model; names that begin with two underscores are its own.
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class View:
    """One process as it is shown: its sample, its pid on the host, its state, and NVML's index by GPU UUID."""

    sample: Sample
    pid: int
    state: State
    gpus: Mapping[str, str]

    @property
    def labels(self) -> Labels:
        """Values of the labels rank, pid, run."""
        process = self.sample.process
        return str(process.rank), str(self.pid), process.run

    def device_labels(self, device: DeviceSample) -> Labels:
        """Values of the labels gpu, uuid, rank, pid, run; gpu and uuid are empty, that is absent, when unknown."""
        uuid = device.uuid or ""
        return self.gpus.get(uuid, ""), uuid, *self.labels


def families(views: Sequence[View]) -> Iterator[Metric]:
    """All series of the given processes; `views` must not hold two processes with the same rank, pid and run."""
    devices = [
        (view.device_labels(device), device) for view in views for device in view.sample.devices
    ]
    yield from _allocator_families([(labels, d.allocator) for labels, d in devices if d.allocator])
    yield family(catalog.DEVICE_TOTAL, known((labels, d.total_bytes) for labels, d in devices))
    phases = [
        ((*labels, name), peak) for labels, d in devices for name, peak in d.phase_peaks.items()
    ]
    yield family(catalog.PHASE_PEAK, phases)
    yield from _layout_families([(labels, d.layout) for labels, d in devices if d.layout])
    yield from _counter_families([(labels, d.counters) for labels, d in devices])
    ooms = [(labels, d.last_oom) for labels, d in devices if d.last_oom]
    yield family(catalog.LAST_OOM_TIMESTAMP, [(labels, oom.timestamp) for labels, oom in ooms])
    yield family(
        catalog.LAST_OOM_REQUESTED, [(labels, oom.requested_bytes) for labels, oom in ooms]
    )
    yield from _process_families(views)


def family(spec: MetricSpec, rows: Iterable[Row]) -> Metric:
    """A gauge or counter family of the catalogue; each row holds the label values in the catalogue's order."""
    counter = spec.kind == "counter"
    metric: Metric = (CounterMetricFamily if counter else GaugeMetricFamily)(
        spec.name, spec.help, labels=spec.labels
    )
    for labels, value in rows:
        metric.add_sample(spec.name, dict(zip(spec.labels, labels, strict=True)), value)
    return metric


def info(spec: MetricSpec, rows: Iterable[tuple[Labels, Mapping[str, str]]]) -> Metric:
    """An info family: the catalogue's labels name the object, the mapping holds its facts."""
    metric = InfoMetricFamily(spec.name.removesuffix("_info"), spec.help, labels=spec.labels)
    for labels, facts in rows:
        metric.add_metric(
            labels, {name: text for name, text in facts.items() if _is_free_label(spec, name)}
        )
    return metric


def _is_free_label(spec: MetricSpec, name: str) -> bool:
    return _LABEL_NAME.fullmatch(name) is not None and name not in spec.labels


def known(rows: Iterable[tuple[Labels, float | None]]) -> list[Row]:
    """Rows without those whose value is unknown: they are left out of the exposition."""
    return [(labels, value) for labels, value in rows if value is not None]


def _allocator_families(rows: Sequence[tuple[Labels, Allocator]]) -> Iterator[Metric]:
    pooled: list[tuple[MetricSpec, Callable[[Allocator], ByPool | None]]] = [
        (catalog.ALLOCATED, lambda a: a.allocated_bytes),
        (catalog.ACTIVE, lambda a: a.active_bytes),
        (catalog.RESERVED, lambda a: a.reserved_bytes),
        (catalog.REQUESTED, lambda a: a.requested_bytes),
        (catalog.INACTIVE_SPLIT, lambda a: a.inactive_split_bytes),
    ]
    for spec, read in pooled:
        yield family(spec, _by_pool((labels, read(allocator)) for labels, allocator in rows))
    yield family(catalog.ALLOCATED_PEAK, [(labels, a.allocated_peak_bytes) for labels, a in rows])
    yield family(catalog.ACTIVE_PEAK, [(labels, a.active_peak_bytes) for labels, a in rows])
    yield family(catalog.RESERVED_PEAK, [(labels, a.reserved_peak_bytes) for labels, a in rows])


def _by_pool(rows: Iterable[tuple[Labels, ByPool | None]]) -> Iterator[Row]:
    for labels, value in rows:
        if value is not None:
            yield from (((*labels, pool), part) for pool, part in value.parts())


def _layout_families(rows: Sequence[tuple[Labels, Layout]]) -> Iterator[Metric]:
    yield family(
        catalog.SNAPSHOT_TIMESTAMP, [(labels, layout.timestamp) for labels, layout in rows]
    )
    yield family(catalog.SEGMENTS, _by_pool((labels, layout.segments) for labels, layout in rows))
    yield family(
        catalog.BLOCKS, (row for labels, layout in rows for row in _blocks(labels, layout))
    )
    yield family(catalog.FREE, (row for labels, layout in rows for row in _free(labels, layout)))
    yield family(
        catalog.LARGEST_FREE_BLOCK,
        [(labels, layout.largest_free_block_bytes) for labels, layout in rows],
    )
    yield family(
        catalog.FRAGMENTATION,
        known((labels, layout.fragmentation_ratio) for labels, layout in rows),
    )
    yield _free_block_sizes(rows)
    yield family(
        catalog.HEADROOM, known(row for labels, layout in rows for row in _headroom(labels, layout))
    )
    yield family(
        catalog.PRIVATE_POOL, (row for labels, layout in rows for row in _private(labels, layout))
    )


def _blocks(labels: Labels, layout: Layout) -> Iterator[Row]:
    for state in ("active_allocated", "active_pending_free", "inactive"):
        count: ByPool = getattr(layout.blocks, state)
        yield from (((*labels, pool, state), part) for pool, part in count.parts())


def _free(labels: Labels, layout: Layout) -> Iterator[Row]:
    yield (*labels, "releasable"), layout.releasable_bytes
    yield (*labels, "stranded"), layout.stranded_bytes


def _headroom(labels: Labels, layout: Layout) -> Iterator[tuple[Labels, float | None]]:
    yield (*labels, "false"), layout.headroom_bytes
    yield (*labels, "true"), layout.headroom_flush_bytes


def _private(labels: Labels, layout: Layout) -> Iterator[Row]:
    yield (*labels, "used"), layout.private_used_bytes
    yield (*labels, "free"), layout.private_free_bytes


def _free_block_sizes(rows: Sequence[tuple[Labels, Layout]]) -> Metric:
    spec = catalog.FREE_BLOCK_SIZE
    metric = GaugeHistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, layout in rows:
        metric.add_metric(
            labels, _buckets(FREE_BLOCK_BOUNDS, layout.free_block_counts), layout.free_bytes
        )
    return metric


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    upper = [*(f"{bound:g}" if bound < 1e6 else str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(upper, accumulate(counts), strict=True))


def _counter_families(rows: Sequence[tuple[Labels, Counters]]) -> Iterator[Metric]:
    plain: list[tuple[MetricSpec, Callable[[Counters], int | None]]] = [
        (catalog.ALLOC_RETRIES, lambda c: c.alloc_retries),
        (catalog.OOM_REJECTIONS, lambda c: c.oom_rejections),
        (catalog.DEVICE_ALLOCS, lambda c: c.device_allocs),
        (catalog.DEVICE_FREES, lambda c: c.device_frees),
        (catalog.STREAM_SYNCS, lambda c: c.stream_syncs),
        (catalog.RELEASES, lambda c: c.releases),
        (catalog.RELEASED, lambda c: c.released_bytes),
    ]
    for spec, read in plain:
        yield family(spec, known((labels, read(counters)) for labels, counters in rows))
    told = [(labels, counters.ooms) for labels, counters in rows if counters.ooms is not None]
    ooms = [
        ((*labels, cause), found.get(cause, 0)) for labels, found in told for cause in OOM_CAUSES
    ]
    yield family(catalog.OOMS, ooms)


def _process_families(views: Sequence[View]) -> Iterator[Metric]:
    yield info(catalog.PROCESS_INFO, [(view.labels, _process_facts(view.sample)) for view in views])
    settings = [(view.labels, view.sample.allocator_settings) for view in views]
    yield info(catalog.ALLOCATOR_INFO, [row for row in settings if row[1]])
    ignored = [
        ((*v.labels, name), float(is_so))
        for v in views
        for name, is_so in v.sample.settings_ignored.items()
    ]
    yield family(catalog.SETTING_IGNORED, ignored)
    states = [
        ((*view.labels, state), float(state == view.state)) for view in views for state in STATES
    ]
    yield family(catalog.PROCESS_STATE, states)
    yield family(catalog.STEPS, [(view.labels, view.sample.steps.count) for view in views])
    yield _step_durations(views)
    yield family(catalog.SAMPLES, known((view.labels, view.sample.steps.samples) for view in views))
    yield family(catalog.SAMPLE_TIMESTAMP, [(view.labels, view.sample.timestamp) for view in views])
    yield family(
        catalog.SAMPLE_DURATION, known(row for view in views for row in _read_durations(view))
    )
    yield family(catalog.SDK_CPU, [(view.labels, view.sample.cost.cpu_seconds) for view in views])
    errors = [
        ((*v.labels, stage), float(n)) for v in views for stage, n in v.sample.cost.errors.items()
    ]
    yield family(catalog.SDK_ERRORS, errors)


def _process_facts(sample: Sample) -> dict[str, str]:
    process = sample.process
    named = asdict(process)
    facts = {
        key: str(named[key])
        for key in ("hostname", "local_rank", "world_size", "script")
        if named[key] is not None
    }
    facts |= {f"{name}_version": version for name, version in process.versions.items()}
    return process.labels | facts


def _step_durations(views: Sequence[View]) -> Metric:
    spec = catalog.STEP_DURATION
    metric = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    for view in views:
        steps = view.sample.steps
        buckets = _buckets(STEP_DURATION_BOUNDS, steps.duration_counts)
        metric.add_metric(view.labels, buckets, steps.duration_sum_seconds)
    return metric


def _read_durations(view: View) -> Iterator[tuple[Labels, float | None]]:
    cost = view.sample.cost
    yield (*view.labels, "stats"), cost.stats_duration_seconds
    yield (*view.labels, "snapshot"), cost.snapshot_duration_seconds
    yield (*view.labels, "oom"), cost.oom_duration_seconds
