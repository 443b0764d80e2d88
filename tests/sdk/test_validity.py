"""What the SDK writes the exporter accepts, and one impossible number costs that number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import full_sample

from torchmem.allocator.snapshot import NestedStats
from torchmem.exporter.rejections import RejectedSampleError
from torchmem.exporter.sample_files import RunDirectory, decode_possible
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import (
    MAX_COMPONENTS,
    DeviceSample,
    PinnedMemory,
    Sample,
    decode,
    encode,
    possible,
)
from torchmem.sdk.session import Session
from torchmem.sdk.settings import resolve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend, SimulatedOptimizer
from torchmem.simulator.gpu import SimulatedGpu

numbers = st.integers(-(1 << 70), 1 << 70) | st.integers(-5, 1 << 40)
STATS = (
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
    "requested_bytes",
    "inactive_split_bytes",
    "allocation",
)
leaves = st.tuples(
    st.sampled_from(STATS),
    st.sampled_from(["all", "small_pool", "large_pool"]),
    st.sampled_from(["current", "peak", "allocated", "freed"]),
)
counters = st.sampled_from(["num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"])


class Impossible(SimulatedBackend):
    """A backend whose statistics say whatever a test wants."""

    def __init__(self, wrong: dict[Any, int]) -> None:
        gpu = SimulatedGpu(1 << 30, context_bytes=0, uuid="GPU-1")
        self.allocator = DeviceCachingAllocator(gpu)
        super().__init__([self.allocator])
        self.wrong = wrong

    def memory_stats(self, device: int) -> NestedStats | None:
        """Return the simulator's statistics with the wrong values."""
        stats: Any = super().memory_stats(device)
        for leaf, value in self.wrong.items():
            if isinstance(leaf, str):
                stats[leaf] = self.wrong.get(leaf, value)
            else:
                name, pool, kind = leaf
                stats[name][pool][kind] = value
        return stats  # type: ignore[no-any-return]

    def free_bytes(self, device: int) -> int | None:
        """Return the driver's free bytes."""
        return self.wrong.get("free_bytes", super().free_bytes(device))

    def limit_bytes(self, device: int) -> int | None:
        """Return the limit."""
        return self.wrong.get("limit_bytes", super().limit_bytes(device))

    def pinned_memory(self) -> PinnedMemory | None:
        """Return the pinned bytes."""
        return PinnedMemory(self.wrong.get("pinned", 7), 9)


@given(
    st.dictionaries(
        leaves | counters | st.sampled_from(["free_bytes", "limit_bytes", "pinned"]),
        numbers,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_what_the_sdk_writes_the_exporter_accepts(wrong: dict[Any, int]) -> None:
    """Whatever the allocator reports, the exporter leaves nothing out of what the SDK wrote."""
    with TemporaryDirectory() as folder:
        backend = Impossible(wrong)
        given_settings = resolve({"run_dir": Path(folder), "interval": 1e-6}, {})
        with closing(Session(given_settings, backend, {})) as session:
            optimizer = SimulatedOptimizer([backend.allocator.malloc(3000)])
            for _ in range(3):
                backend.step(optimizer)
        (path,) = Path(folder).rglob(f"*{SAMPLE_SUFFIX}")
        sample, faults = decode_possible(path.read_bytes())
        directory = RunDirectory(Path(folder))
        served = directory.read(sample.timestamp + 1)

    assert faults == ()
    assert [item.sample.steps.count for item in served] == [3]
    assert not any(directory.rejections.values())
    pinned = served[0].sample.pinned
    assert pinned is None or pinned.timestamp is not None
    assert "stats" not in {name for name, count in session.errors.counts.items() if count}
    _check_values(served[0].sample)


def _check_values(sample: Sample) -> None:
    """Check that no series is negative."""
    view = ProcessView(sample, sample.process.pid, "running", {})
    for family in families([view]):
        assert all(row.value >= 0 for row in family.samples), family.name


def _numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each number in JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, (*path, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


FULL = json.loads(encode(full_sample()))
PATHS = list(_numbers(FULL))


def _changed(path: tuple[Any, ...], value: float) -> bytes:
    """Return the full sample with one other number."""
    changed = json.loads(json.dumps(FULL))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(changed).encode()


@pytest.mark.parametrize("value", [-1, -(1 << 40), 1 << 63 | 1, 1 << 70, 1e300])
@pytest.mark.parametrize("read", [lambda data: decode_possible(data)[0], decode])
def test_one_impossible_number_costs_that_number(
    value: float, read: Callable[[bytes], Sample]
) -> None:
    """Every number of a sample but its time and process may be impossible; the rest is served."""
    whole = read(json.dumps(FULL).encode())
    for path in PATHS:
        if path[0] in {"timestamp", "process", "schema"}:
            continue
        sample = read(_changed(path, value))
        _check_values(sample)
        assert {path[0]} == _differing(sample, whole)
        if path[0] == "devices" and len(path) > 3:
            assert {path[2]} == _differing(sample.devices[0], whole.devices[0])


def _differing(value: Any, other: Any) -> set[str]:
    return {
        field.name
        for field in fields(value)
        if getattr(value, field.name) != getattr(other, field.name)
    }


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("devices", 0, "components", "rounding"), -5_988_656, ("components", "negative")),
        (("devices", 0, "driver_free_bytes"), 1 << 70, ("driver_free_bytes", "too_large")),
        (
            ("devices", 0, "layout", "largest_free_block_bytes"),
            1 << 60,
            ("layout", "contradictory"),
        ),
    ],
)
def test_what_is_left_out_is_known(path: Any, value: int, fault: tuple[str, str]) -> None:
    """The exporter knows each value that it leaves out, and why."""
    _, faults = decode_possible(_changed(path, value))

    assert [fault] == [(found.field, found.reason) for found in faults]


def test_too_many_components_are_left_out() -> None:
    """They cost the components of that device."""
    names = {f"part {number}": 1 for number in range(MAX_COMPONENTS + 1)}
    sample = full_sample()
    device: DeviceSample = replace(sample.devices[0], components=names)

    found, faults = decode_possible(encode(replace(sample, devices=(device,))))

    assert found.devices[0].components == {}
    assert sample.devices[0].component_peaks == found.devices[0].component_peaks
    assert [fault.field for fault in faults] == ["components"]


def test_a_sample_without_a_possible_time_is_refused() -> None:
    """Nothing can be told of a sample whose time or process is impossible."""
    for path in [("timestamp",), ("process", "pid"), ("process", "rank")]:
        with pytest.raises(RejectedSampleError):
            decode_possible(_changed(path, -1))
        with pytest.raises(ValueError, match="impossible"):
            decode(_changed(path, -1))


@pytest.mark.parametrize("column", ["steps", "seconds", "peak_bytes", "outside_bytes"])
def test_an_impossible_point_costs_the_history_of_the_run(column: str) -> None:
    """A negative value in any column drops the history; the exporter reads what the SDK writes."""
    sample = full_sample()
    (device,) = sample.devices
    assert device.run_history is not None
    length = len(device.run_history.steps)
    changes: dict[str, Any] = {column: (-1,) * length}
    wrong = replace(device.run_history, **changes)
    left, faults = possible(replace(sample, devices=(replace(device, run_history=wrong),)))

    assert left is not None
    assert [(column, "negative")] == [(fault.field, fault.reason) for fault in faults]
    read, _ = decode_possible(encode(left))
    assert read == left
    assert read.devices[0].run_history is None
    assert read.devices[0].allocator == device.allocator
