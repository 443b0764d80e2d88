"""The setting `history`: when stacks are recorded, and whose recording is left alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.set_clock import SetClock

from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.explain.growth import SOON_SECONDS, SUSPICION
from torchmem.explain.lines import Lines, lines
from torchmem.sample.capture_messages import (
    ANSWER_SUFFIX,
    REQUEST_SUFFIX,
    CaptureRequest,
    decode_answer,
)
from torchmem.sample.process_messages import encode, sibling_path
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import OomRecord
from torchmem.sdk.capture.capture import Capture
from torchmem.sdk.capture.line_history import (
    GROWTH_LINGER_SECONDS,
    LINGER_SECONDS,
    LineHistory,
)
from torchmem.sdk.capture.pressure import LOW_MARGIN
from torchmem.sdk.capture.recorded_history import RecordedHistory
from torchmem.sdk.observation import OomObservation
from torchmem.sdk.reading.growth import GrowthJudge
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import HISTORY_RESERVE_SECONDS, CpuMeter
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.settings import resolve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

MIB = 1 << 20
TOTAL = 1000 * MIB


class Training:
    """A recording over a simulated GPU of 1,000 MiB, and a script that allocates on it."""

    def __init__(self, setting: object) -> None:
        self.allocator = DeviceCachingAllocator(SimulatedGpu(TOTAL, context_bytes=0))
        self.backend = StackBackend([self.allocator])
        self.clock, self.errors, self.meter = SetClock(), Errors(), CpuMeter()
        settings = resolve({"history": setting, "snapshot_interval": 1e-9}, {})
        recorder = Recorder(self.backend)
        self.growth = GrowthJudge(recorder)
        history = LineHistory(
            settings, recorder, self.errors, self.meter, self.growth.judged, self.clock
        )
        self.recorder, self.history = recorder, history
        self.steps = 0

    @property
    def is_recording(self) -> bool:
        return self.backend.history_enabled() is True

    def read(self, seconds: float = 1.0, step: int | None = None) -> None:
        """Read the statistics after some seconds."""
        self.clock.now += seconds
        self.recorder.read_stats()
        if step is not None:
            self.recorder.add_points(step)
        self.history.after_read(step)

    def read_early(self, step: int) -> None:
        """Take a point of the run's history at a step's end."""
        self.clock.now += 0.005
        self.recorder.read_early(step)
        self.history.after_read(step)

    def hold(self, mib: int) -> None:
        """Allocate a tensor that stays."""
        self.allocator.malloc(mib * MIB)


class StackBackend(SimulatedBackend):
    """A simulated allocator in which each block has a stack.

    `more_allocations` are added to its count of allocations.
    """

    more_allocations = 0

    def memory_stats(self, device: int) -> NestedStats | None:
        """Return the statistics with more allocations."""
        stats: Any = super().memory_stats(device)
        stats["allocation"]["all"]["allocated"] += self.more_allocations
        return dict(stats)

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Return the segments, with one frame in each block."""
        segments: Any = super().memory_snapshot()
        for segment in segments:
            for block in segment["blocks"]:
                block["frames"] = [{"filename": "/t.py", "line": 7, "name": "f"}]
        return list(segments)


def test_nothing_is_recorded_while_there_is_room() -> None:
    """A run that keeps its margin is never recorded, however long it lasts."""
    training = Training("oom")
    training.hold(800)
    for _ in range(1000):
        training.read(10.0)
        assert not training.is_recording


def test_a_low_margin_starts_the_recording() -> None:
    """It starts when little is left at the peak, and ends some minutes after that."""
    training = Training("oom")
    training.hold(int(1000 * (1 - LOW_MARGIN)) + 20)
    training.read()
    assert training.is_recording
    assert sum(training.errors.counts.values()) == 0


def test_a_retry_starts_the_recording_for_some_minutes() -> None:
    """A flush of the whole cache starts it; without another it ends."""
    training = Training("oom")
    training.allocator.free(training.allocator.malloc(600 * MIB))
    training.read()
    training.allocator.free(training.allocator.malloc(600 * MIB, stream=7))
    training.read()
    assert training.is_recording

    training.read(LINGER_SECONDS - 1)
    assert training.is_recording
    training.read(2)
    assert not training.is_recording


def test_a_fast_fall_starts_the_recording() -> None:
    """A margin that would be gone within an hour at its pace starts it, although much is left."""
    training = Training("oom")
    for _ in range(SUSPICION.points):
        training.hold(4)
        training.read(10.0)

    assert training.is_recording


def test_a_slow_fall_does_not() -> None:
    """A margin that lasts for hours at its pace starts nothing."""
    training = Training("oom")
    training.hold(100)
    for _ in range(20):
        training.hold(4)
        training.read(SOON_SECONDS / 20)
        assert not training.is_recording


def test_growth_from_step_to_step_starts_it_at_once() -> None:
    """A leak that fills the device within seconds is recorded after a few steps."""
    training = Training("oom")
    for step in range(1, 9):
        training.hold(10)
        training.read(0.005, step)

    assert training.is_recording
    training.read(GROWTH_LINGER_SECONDS - 1)
    assert training.is_recording
    training.read(2)
    assert not training.is_recording


def test_growth_between_early_points_starts_it() -> None:
    """Where only the points of the run's history are read, they start it too."""
    training = Training("oom")
    training.read(1.0, 1)
    for step in range(2, 10):
        training.hold(10)
        training.read_early(step)

    assert training.is_recording


def test_growth_by_the_history_of_the_run_starts_it() -> None:
    """A leak that batches of random sizes hide from a few steps is recorded once it is certain."""
    training, generator = Training("oom"), random.Random(3)
    for step in range(1, 61):
        training.hold(5)
        passing = training.allocator.malloc(generator.randint(1, 60) * MIB)
        training.read(30.0, step)
        training.growth.judge()
        training.allocator.free(passing)

    assert training.is_recording


def test_the_looks_come_with_the_steps() -> None:
    """In a job of seconds the lines are compared after 2, 4, 8 … recorded steps."""
    training = Training("oom")
    training.history = LineHistory(
        resolve({"history": "oom"}, {}),
        training.recorder,
        training.errors,
        training.meter,
        clock=training.clock,
    )
    training.hold(950)
    training.read(1.0, 100)
    looks = []
    for step in range(101, 135):
        if step >= training.history.due_step:
            looks.append(step)
        training.read(0.0, step)

    assert looks == [102, 104, 108, 116, 132]


@pytest.mark.parametrize("setting", ["oom", True])
def test_a_recording_of_the_script_is_left_alone(setting: object) -> None:
    """While the script records, nothing is started and nothing is stopped."""
    training = Training(setting)
    training.backend.start_history(100)
    training.hold(950)
    training.history.begin()
    training.read()
    training.history.stop()

    assert training.is_recording


def test_always_begins_at_once() -> None:
    """With true it starts before the first read, and a script that stops it starts it again."""
    training = Training(True)
    training.history.begin()
    assert training.is_recording
    training.backend.stop_history()
    training.read()

    assert training.is_recording


def test_a_capture_takes_over_and_gives_back() -> None:
    """After `stop` another recording may run; it is followed by this one."""
    training = Training("oom")
    training.hold(950)
    training.read()
    training.history.stop()
    assert not training.is_recording
    training.backend.start_history(100)
    training.read()
    training.history.stop()
    assert training.is_recording
    training.backend.stop_history()
    training.read()

    assert training.is_recording


def test_a_capture_is_granted_while_stacks_are_recorded(tmp_path: Path) -> None:
    """`torchmem capture` is not refused: it interrupts the SDK's own recording."""
    training, sample = Training(True), tmp_path / f"0-1-2{SAMPLE_SUFFIX}"
    training.history.begin()
    capture = Capture(
        RecordedHistory(training.backend, dict),
        sample,
        training.errors,
        training.clock,
        training.history.stop,
    )
    sibling_path(sample, REQUEST_SUFFIX).write_bytes(encode(CaptureRequest(10)))
    capture.at_tick()
    capture.at_step()
    training.read(10.0)
    capture.at_step()
    answer = decode_answer(sibling_path(sample, ANSWER_SUFFIX).read_bytes())
    assert (answer.state, training.is_recording) == ("done", False)
    training.read()

    assert training.is_recording
    assert sum(training.errors.counts.values()) == 0


@given(st.lists(st.integers(0, 300_000), min_size=20, max_size=60))
def test_the_cost_is_bounded(allocations: list[int]) -> None:
    """What is accounted never exceeds the reserve and the share of time by more than a second's."""
    training = Training("oom")
    training.hold(950)
    for count in allocations:
        training.backend.more_allocations += count
        training.read()
    allowed = HISTORY_RESERVE_SECONDS + 0.005 * len(allocations)

    assert training.meter.seconds <= allowed + 300_000 * 0.000002


def test_a_spent_allowance_stops_the_recording() -> None:
    """A script with too many allocations is not recorded until a part is saved again."""
    training = Training("oom")
    training.hold(950)
    training.read()
    training.backend.more_allocations += 10_000_000
    training.read()
    assert not training.is_recording
    training.read(100.0)
    assert not training.is_recording
    training.read(5000.0)

    assert training.is_recording


def test_growth_between_steps() -> None:
    """A report names the line whose bytes grew between the looks, and the steps between them."""
    training = Training(True)
    training.history.begin()
    training.read()
    training.hold(10)
    training.read(0.0, 3)
    training.hold(30)
    while not _compared(training).grown:
        training.read(0.0, 8)
    found = _compared(training)

    assert ([use.bytes for use in found.grown], found.grown_steps) == ([30 * MIB], 5)


def _compared(training: Training) -> Lines:
    segments = training.backend.memory_snapshot()
    assert segments is not None
    oom = OomRecord(1.0, 1, "capacity")
    observation = OomObservation(0, oom, 0, None, None, None, None, lines(segments, 0))
    found = training.history.compared(observation).lines
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("value", "setting"),
    [("oom", "oom"), ("OOM", "oom"), (True, True), ("1", True), (False, False)],
)
def test_values_of_the_setting(value: object, setting: object) -> None:
    """`history` is "oom", true or false, also in the environment."""
    assert setting == resolve({"history": value}, {}).history
    assert setting == resolve({}, {"TORCHMEM_HISTORY": str(value)}).history
