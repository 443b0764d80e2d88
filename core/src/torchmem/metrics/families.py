"""Convert samples to Prometheus metric families.

One pure function serves the exporter, the in-process endpoint and the textfile output. A value that
is unknown (None) has no row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample as Series

from torchmem.metrics import catalog
from torchmem.metrics.catalog import CATALOG, MetricSpec
from torchmem.metrics.row_family import RowFamily
from torchmem.sample.engine import Engine
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.sample import (
    COUNTED,
    FREE_BLOCK_BOUNDS,
    OOM_CAUSES,
    STATES,
    STEP_DURATION_BOUNDS,
    Allocator,
    BlockCounts,
    ByPool,
    Counters,
    DeviceSample,
    Layout,
    OomRecord,
    Releases,
    Sample,
    State,
)

FREE_BLOCK_PAGE_BOUNDS = (1 << 20, 1 << 25, 1 << 30)
STEP_DURATION_PAGE_BOUNDS = (0.25, 1, 5, 30)
"""The buckets that the exporter serves; with all series it serves all that the sample has."""

Labels = tuple[str, ...]
Row = tuple[Labels, float | None]
T = TypeVar("T")

# Prometheus' data model; names that begin with two underscores are reserved.
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process to export: its sample, label `pid`, state, and NVML's indices by GPU UUID."""

    sample: Sample
    pid: int | str
    state: State
    gpus: Mapping[str, str]

    @property
    def labels(self) -> Labels:
        """Values of the labels rank, pid, run, launch."""
        process = self.sample.process
        return str(process.rank), str(self.pid), process.run, process.launch or ""

    def device_labels(self, device: DeviceSample) -> Labels:
        """Return the values of the labels gpu, uuid, rank, pid, run, launch.

        gpu, uuid and launch are empty, which Prometheus treats as absent, when unknown.
        """
        uuid = device.uuid or ""
        return self.gpus.get(uuid, ""), uuid, *self.labels

    def devices(self) -> Iterator[tuple[Labels, DeviceSample]]:
        """Yield each device with its labels."""
        for device in self.sample.devices:
            yield self.device_labels(device), device


_TYPES: Mapping[str, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "gaugehistogram": GaugeHistogramMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


@cache
def _head(name: str) -> Metric:
    """Return a metric of the catalog without samples."""
    spec = CATALOG[name]
    return _TYPES[spec.kind](name.removesuffix("_info"), spec.help, labels=spec.labels)


def family(spec: MetricSpec, rows: Iterable[Row]) -> Metric:
    """Return a gauge or counter family of the catalog, without the rows whose value is None.

    Each row holds the label values in the catalog's order.
    """
    return _family(spec, [row for row in rows if row[1] is not None])


def _family(spec: MetricSpec, known: Sequence[Row]) -> Metric:
    head, expand = _plain_form(spec.name)
    return RowFamily(head, known, expand)  # type: ignore[arg-type]


@cache
def _plain_form(name: str) -> tuple[Metric, Callable[[Labels, float], Iterator[Series]]]:
    return _head(name), partial(_plain, CATALOG[name])


def _plain(spec: MetricSpec, labels: Labels, value: float) -> Iterator[Series]:
    yield Series(spec.name, dict(zip(spec.labels, labels, strict=True)), value)


def info(spec: MetricSpec, rows: Iterable[tuple[Labels, Mapping[str, str]]]) -> Metric:
    """Return an info family: the catalog's labels name the object, the mapping holds its facts."""
    known = [((labels, tuple(facts.items())), 1.0) for labels, facts in rows]
    return RowFamily(_head(spec.name), known, partial(_facts, spec))


def _facts(
    spec: MetricSpec, key: tuple[Labels, tuple[tuple[str, str], ...]], value: float
) -> Iterator[Series]:
    labels, facts = key
    allowed = {name: text for name, text in facts if _is_free_label(spec, name)}
    yield Series(spec.name, dict(zip(spec.labels, labels, strict=True)) | allowed, value)


def _is_free_label(spec: MetricSpec, name: str) -> bool:
    return _LABEL_NAME.fullmatch(name) is not None and name not in spec.labels


def by_last_label(rows: Iterable[tuple[Labels, Mapping[Any, T]]]) -> Iterator[tuple[Labels, T]]:
    """Yield a row for each entry of each mapping, with the key as the last label value."""
    for labels, values in rows:
        for key, value in values.items():
            yield (*labels, str(key)), value


def value_family(
    spec: MetricSpec, rows: Iterable[tuple[Labels, T]], read: Callable[[T], float | None]
) -> Metric:
    """Return a family with one row per object: the value that `read` takes from it."""
    return _family(
        spec, [row for labels, value in rows if (row := (labels, read(value)))[1] is not None]
    )


def keyed_family(
    spec: MetricSpec,
    rows: Iterable[tuple[Labels, T]],
    read: Callable[[T], Mapping[Any, float | None]],
) -> Metric:
    """Return a family with one row per object and key of the mapping that `read` takes from it."""
    known: list[Row] = []
    for labels, value in rows:
        for key, number in read(value).items():
            if number is not None:
                known.append(((*labels, str(key)), number))
    return _family(spec, known)


def _pooled(
    spec: MetricSpec, rows: Iterable[tuple[Labels, T]], read: Callable[[T], ByPool | None]
) -> Metric:
    pools = ((labels, read(value)) for labels, value in rows)
    return keyed_family(spec, [(labels, pool) for labels, pool in pools if pool], ByPool.by_label)


@cache
def _details() -> frozenset[str]:
    """Return the names of the families that only all series include."""
    return frozenset(_head(spec.name).name for spec in CATALOG.values() if spec.is_detail)


def families(views: Sequence[ProcessView], *, all_series: bool = True) -> Iterator[Metric]:
    """Yield the families of the given processes.

    No two of `views` may have the same rank, pid and run. Without `all_series`, leave out what no
    rule and no panel reads: families that are details, the pools of the active bytes, the
    components of the peak but step, and most buckets of histograms.
    """
    for found in _families(views, all_series=all_series):
        if all_series or found.name not in _details():
            yield found


def _families(views: Sequence[ProcessView], *, all_series: bool) -> Iterator[Metric]:
    devices = list(chain.from_iterable(view.devices() for view in views))
    allocators = [(labels, d.allocator) for labels, d in devices if d.allocator]
    yield from _allocator_families(allocators, all_series=all_series)
    yield keyed_family(catalog.COMPONENT, devices, lambda d: d.components)
    yield keyed_family(
        catalog.COMPONENT_PEAK,
        devices,
        lambda d: {
            name: size for name, size in d.component_peaks.items() if all_series or name == "step"
        },
    )
    yield value_family(
        catalog.COMPONENT_PEAK_TIMESTAMP, devices, lambda d: d.component_peak_timestamp
    )
    yield value_family(catalog.DEVICE_TOTAL, devices, lambda d: d.total_bytes)
    own = [(labels, device) for labels, device in devices if not device.shares_host_memory]
    yield value_family(catalog.DRIVER_FREE, own, lambda d: d.driver_free_bytes)
    yield value_family(catalog.MANAGED, devices, lambda d: d.managed_bytes)
    yield value_family(catalog.MEMORY_LIMIT, devices, lambda d: d.limit_bytes)
    yield value_family(catalog.STATS_TIMESTAMP, devices, lambda d: d.stats_timestamp)
    yield value_family(catalog.PLANNED_PEAK, devices, lambda d: d.planned_peak_bytes)
    yield keyed_family(catalog.PHASE_PEAK, devices, lambda d: d.phase_peaks)
    layouts = [(labels, d.layout) for labels, d in devices if d.layout]
    yield from _layout_families(layouts, all_series=all_series)
    yield from _counter_families([(labels, d.counters) for labels, d in devices])
    yield from _release_families([(labels, d.releases) for labels, d in devices])
    ooms = [(labels, d.last_oom) for labels, d in devices if d.last_oom]
    yield value_family(catalog.LAST_OOM_TIMESTAMP, ooms, lambda oom: oom.timestamp)
    yield value_family(catalog.LAST_OOM_REQUESTED, ooms, lambda oom: oom.requested_bytes)
    yield info(catalog.LAST_OOM_INFO, [(labels, _about(oom)) for labels, oom in ooms])
    growths = [(labels, d.growth) for labels, d in devices if d.growth]
    yield keyed_family(catalog.GROWTH, growths, lambda growth: {growth.kind: growth.bytes_per_step})
    yield from _engine_families([(labels, d.engine) for labels, d in devices if d.engine])
    yield from _library_families(devices)
    yield keyed_family(
        catalog.GROWTH_START, growths, lambda growth: {growth.kind: growth.since_step}
    )
    yield from _process_families(views, all_series=all_series)
    yield from _host_families(views)


def _engine_families(rows: Sequence[tuple[Labels, Engine]]) -> Iterator[Metric]:
    states = ((labels, {"resident": e.resident, "asleep": e.asleep}) for labels, e in rows)
    memory = [
        ((*labels, part, state), size)
        for labels, parts in states
        for state, sizes in parts.items()
        for part, size in sizes.items()
    ]
    yield family(catalog.ENGINE_MEMORY, memory)
    yield keyed_family(catalog.ENGINE_PLANNED, rows, lambda e: e.planned)
    yield keyed_family(catalog.ENGINE_PEAK, rows, lambda e: e.peaks)
    yield value_family(catalog.ENGINE_KV_CACHE_ADVICE, rows, lambda e: e.kv_cache_advice_bytes)
    yield value_family(catalog.ENGINE_SLEEPS, rows, lambda e: e.sleeps)
    slept = [(labels, engine) for labels, engine in rows if engine.residual_bytes]
    yield value_family(catalog.ENGINE_SLEEP_RESIDUAL, slept, lambda e: e.residual_bytes[-1])
    growth = [(labels, engine.residual_growth_bytes) for labels, engine in slept]
    yield value_family(catalog.ENGINE_SLEEP_RESIDUAL_GROWTH, growth, lambda known: known)


def _library_families(rows: Sequence[tuple[Labels, DeviceSample]]) -> Iterator[Metric]:
    communicators = [
        ((*labels, group, state), size)
        for labels, device in rows
        for group, communicator in device.communicators.items()
        for state, size in communicator.by_state().items()
    ]
    yield family(catalog.COMMUNICATOR, communicators)
    rmm = [(labels, d.rmm) for labels, d in rows if d.rmm]
    yield value_family(catalog.RMM_POOL, rmm, lambda memory: memory.pool_bytes)
    yield value_family(catalog.RMM_USED, rmm, lambda memory: memory.used_bytes)
    yield value_family(catalog.RMM_PEAK, rmm, lambda memory: memory.peak_bytes)


def _about(oom: OomRecord) -> dict[str, str]:
    remedy = REMEDY_WORDS[oom.remedy] if oom.remedy else None
    known = {"line": oom.line, "function": oom.function, "onset": oom.onset, "remedy": remedy}
    return {"cause": oom.cause} | {name: text for name, text in known.items() if text}


def _allocator_families(
    rows: Sequence[tuple[Labels, Allocator]], *, all_series: bool
) -> Iterator[Metric]:
    yield _pooled(catalog.ALLOCATED, rows, lambda a: a.allocated_bytes)
    yield _pooled(
        catalog.ACTIVE,
        rows,
        lambda a: a.active_bytes if all_series else ByPool(None, None, a.active_bytes.total),
    )
    yield _pooled(catalog.RESERVED, rows, lambda a: a.reserved_bytes)
    yield _pooled(catalog.REQUESTED, rows, lambda a: a.requested_bytes)
    yield _pooled(catalog.INACTIVE_SPLIT, rows, lambda a: a.inactive_split_bytes)
    yield value_family(catalog.ALLOCATED_PEAK, rows, lambda a: a.allocated_peak_bytes)
    yield value_family(catalog.ACTIVE_PEAK, rows, lambda a: a.active_peak_bytes)
    yield value_family(catalog.RESERVED_PEAK, rows, lambda a: a.reserved_peak_bytes)


def _layout_families(
    rows: Sequence[tuple[Labels, Layout]], *, all_series: bool
) -> Iterator[Metric]:
    yield value_family(catalog.SNAPSHOT_TIMESTAMP, rows, lambda layout: layout.timestamp)
    yield _pooled(catalog.SEGMENTS, rows, lambda layout: layout.segments)
    blocks = [(labels, layout.blocks) for labels, layout in rows if layout.blocks]
    yield family(catalog.BLOCKS, chain.from_iterable(_blocks(*row) for row in blocks))
    yield keyed_family(catalog.FREE, rows, _free)
    yield value_family(catalog.SNAPSHOT_IN_USE, rows, lambda layout: layout.in_use_bytes)
    yield value_family(catalog.PENDING_FREE, rows, lambda layout: layout.pending_free_bytes)
    yield value_family(
        catalog.LARGEST_FREE_BLOCK, rows, lambda layout: layout.largest_free_block_bytes
    )
    yield value_family(
        catalog.LARGEST_ALLOCATED_BLOCK, rows, lambda layout: layout.largest_allocated_block_bytes
    )
    yield value_family(catalog.FRAGMENTATION, rows, lambda layout: layout.fragmentation_ratio)
    yield _free_block_sizes(rows, all_series=all_series)
    yield keyed_family(catalog.HEADROOM, rows, _headroom)
    yield keyed_family(catalog.PRIVATE_POOL, rows, _private_pools)


def _blocks(labels: Labels, counts: BlockCounts) -> Iterator[Row]:
    for state in ("active_allocated", "active_pending_free", "inactive"):
        by_pool: ByPool = getattr(counts, state)
        yield from (((*labels, pool, state), n) for pool, n in by_pool.by_label().items())


def _free(layout: Layout) -> dict[str, float]:
    return {"releasable": layout.releasable_bytes, "stranded": layout.stranded_bytes}


def _headroom(layout: Layout) -> dict[str, float | None]:
    return {"false": layout.headroom_bytes, "true": layout.headroom_flush_bytes}


def _private_pools(layout: Layout) -> dict[str, float]:
    return {"used": layout.private_used_bytes, "free": layout.private_free_bytes}


def _free_block_sizes(rows: Sequence[tuple[Labels, Layout]], *, all_series: bool) -> Metric:
    """Return the histogram; its count and sum, which other families tell, only with all series."""
    known = [
        (labels, layout.free_block_counts, float(layout.free_bytes))
        for labels, layout in rows
        if layout.free_block_counts is not None
    ]
    bounds = FREE_BLOCK_BOUNDS if all_series else FREE_BLOCK_PAGE_BOUNDS
    return _histogram(catalog.FREE_BLOCK_SIZE, FREE_BLOCK_BOUNDS, bounds, known, all_series)


def _histogram(
    spec: MetricSpec,
    bounds: Sequence[float],
    shown: Sequence[float],
    rows: Iterable[tuple[Labels, Sequence[int], float]],
    has_sum: bool = True,
) -> Metric:
    """Return a histogram with the `shown` of its bounds; each row has its counts and its sum."""
    places = [*map(bounds.index, shown), len(bounds)]
    upper = [*(f"{bound:g}" if bound < 1e6 else str(float(bound)) for bound in shown), "+Inf"]
    known = []
    for labels, counts, total in rows:
        up_to = list(accumulate(counts))
        known.append((labels, (*(up_to[place] for place in places), total)))
    return RowFamily(_head(spec.name), known, partial(_buckets, spec, upper, has_sum))


def _buckets(
    spec: MetricSpec,
    upper: Sequence[str],
    has_sum: bool,
    labels: Labels,
    values: Sequence[float],
) -> list[Series]:
    *counts, total = values
    metric: Any = _TYPES[spec.kind](spec.name, spec.help, labels=spec.labels)
    metric.add_metric(labels, list(zip(upper, counts, strict=True)), total)
    return [row for row in metric.samples if has_sum or row.name.endswith("_bucket")]


def _counter_families(rows: Sequence[tuple[Labels, Counters]]) -> Iterator[Metric]:
    for name in COUNTED.values():
        yield value_family(CATALOG[f"torchmem_{name}_total"], rows, attrgetter(name))
    yield value_family(catalog.NEIGHBOR_REQUESTS, rows, lambda c: c.neighbor_requests)
    yield value_family(catalog.MEMORY_WAIT, rows, lambda c: c.wait_seconds)
    ooms = [(labels, c.ooms) for labels, c in rows if c.ooms is not None]
    yield keyed_family(
        catalog.OOMS, ooms, lambda o: {cause: o.get(cause, 0) for cause in OOM_CAUSES}
    )


def _release_families(rows: Sequence[tuple[Labels, Mapping[Any, Releases]]]) -> Iterator[Metric]:
    tiers = list(by_last_label(rows))
    yield value_family(catalog.RELEASES, tiers, lambda r: r.times)
    yield value_family(catalog.RELEASED, tiers, lambda r: r.released_bytes)
    yield value_family(catalog.RELEASE_SECONDS, tiers, lambda r: r.seconds)
    yield value_family(catalog.RELEASE_ENABLED, tiers, lambda r: not r.given_up)


def _process_families(views: Sequence[ProcessView], *, all_series: bool) -> Iterator[Metric]:
    rows = [(view.labels, view.sample) for view in views]
    yield info(catalog.PROCESS_INFO, [(labels, _process_facts(s)) for labels, s in rows])
    settings = [(labels, s.allocator_settings) for labels, s in rows if s.allocator_settings]
    yield info(catalog.ALLOCATOR_INFO, settings)
    yield keyed_family(catalog.SETTING_IGNORED, rows, lambda s: _floats(s.settings_ignored))
    states = [(view.labels, view.state) for view in views]
    yield keyed_family(catalog.PROCESS_STATE, states, _state_set)
    yield value_family(catalog.PROCESS_START, rows, lambda s: s.process.start_timestamp)
    yield value_family(catalog.STEPS, rows, lambda s: s.steps.count or None)
    yield _step_durations(rows, all_series=all_series)
    yield value_family(catalog.SAMPLES, rows, lambda s: s.steps.samples)
    yield value_family(catalog.SAMPLE_TIMESTAMP, rows, lambda s: s.timestamp)
    durations = partial(_read_durations, all_series=all_series)
    yield keyed_family(catalog.SAMPLE_DURATION, rows, durations)
    yield value_family(catalog.SDK_CPU, rows, lambda s: s.cost.cpu_seconds)
    yield value_family(catalog.SDK_ERRORS, rows, lambda s: sum(s.cost.errors.values()))
    yield keyed_family(catalog.SDK_STAGE_ERRORS, rows, lambda s: _floats(s.cost.errors))
    yield keyed_family(catalog.HOOKS_DROPPED, rows, lambda s: {**s.hooks_dropped})


def _host_families(views: Sequence[ProcessView]) -> Iterator[Metric]:
    hosts = [(view.labels, view.sample.host) for view in views if view.sample.host]
    yield value_family(catalog.HOST_RSS, hosts, lambda host: host.rss_bytes)
    yield value_family(catalog.HOST_LIMIT, hosts, lambda host: host.limit_bytes)
    yield value_family(catalog.HOST_AVAILABLE, hosts, lambda host: host.available_bytes)
    pinned = [(view.labels, view.sample.pinned) for view in views if view.sample.pinned]
    yield keyed_family(
        catalog.HOST_PINNED, pinned, lambda p: {"used": p.used_bytes, "cached": p.cached_bytes}
    )
    yield value_family(catalog.HOST_PINNED_TIMESTAMP, pinned, lambda p: p.timestamp)


def _state_set(current: State) -> dict[str, float]:
    return {state: float(state == current) for state in STATES}


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items()}


_PROCESS_FACTS = ("hostname", "local_rank", "world_size", "script")


def _process_facts(sample: Sample) -> dict[str, str]:
    process = sample.process
    values = {key: getattr(process, key) for key in _PROCESS_FACTS}
    facts = {key: str(value) for key, value in values.items() if value is not None}
    facts |= {f"{name}_version": version for name, version in process.versions.items()}
    return process.labels | facts


def _step_durations(rows: Sequence[tuple[Labels, Sample]], *, all_series: bool) -> Metric:
    steps = [(labels, sample.steps) for labels, sample in rows if sample.steps.count]
    known = [(labels, s.duration_counts, s.duration_sum_seconds) for labels, s in steps]
    bounds = STEP_DURATION_BOUNDS if all_series else STEP_DURATION_PAGE_BOUNDS
    return _histogram(catalog.STEP_DURATION, STEP_DURATION_BOUNDS, bounds, known)


def _read_durations(sample: Sample, *, all_series: bool) -> dict[str, float | None]:
    cost = sample.cost
    known = {"stats": cost.stats_duration_seconds, "snapshot": cost.snapshot_duration_seconds}
    return known | ({"oom": cost.oom_duration_seconds} if all_series else {})
