"""Capture on demand in the process: for its own user, between two steps, and without harm."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.descriptors import open_descriptors
from support.snapshots import load_snapshot
from support.waiting import until

from torchmem.allocator.backend import T, TraceEntry
from torchmem.sample.capture_messages import (
    ANSWER_SUFFIX,
    FACTS_KEY,
    MAX_CAPTURE_ENTRIES,
    OOM_RECORDING_SUFFIX,
    OOM_SNAPSHOT_SUFFIX,
    REQUEST_SUFFIX,
    SNAPSHOT_SUFFIX,
    START_GRACE_SECONDS,
    STOP_GRACE_SECONDS,
    CaptureAnswer,
    CaptureRequest,
    decode_answer,
)
from torchmem.sample.process_messages import MAX_MESSAGE_BYTES, encode, sibling_path
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sdk.capture.capture import Capture, Job, next_action
from torchmem.sdk.capture.oom_trace import MAX_RECORDINGS_PER_USER, OomTrace
from torchmem.sdk.capture.recorded_history import OOM_TRACE_ENTRIES, RecordedHistory, kept_seconds
from torchmem.sdk.publish.request_files import STALE_SECONDS
from torchmem.sdk.safety.cost import OOM_TRACE_BUDGET, OOM_TRACE_RESERVE_SECONDS
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu

MIB = 1 << 20
seconds_ = st.floats(0, 1000)


class Rank:
    """A capture with a clock that the test sets, and the files that the command uses."""

    def __init__(
        self,
        directory: Path,
        backend: SimulatedBackend,
        peaks: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self.now = 0.0
        self.errors = Errors()
        sample = directory / f"0-1-2{SAMPLE_SUFFIX}"
        self.request_path, self._answer = (
            sibling_path(sample, REQUEST_SUFFIX),
            sibling_path(sample, ANSWER_SUFFIX),
        )
        self.snapshot = sibling_path(sample, SNAPSHOT_SUFFIX)
        self.capture = Capture(
            RecordedHistory(backend, peaks), sample, self.errors, lambda: self.now
        )

    def request(self, content: bytes | None = None) -> None:
        """Write a request, for ten seconds by default, and run a tick."""
        self.request_path.write_bytes(encode(CaptureRequest(10)) if content is None else content)
        self.capture.at_tick()

    @property
    def answer(self) -> CaptureAnswer:
        """The process's latest answer."""
        return decode_answer(self._answer.read_bytes())


@pytest.fixture
def rank(tmp_path: Path, backend: SimulatedBackend) -> Rank:
    """A process on a simulated GPU."""
    return Rank(tmp_path, backend)


@given(seconds_, seconds_, seconds_, seconds_)
def test_recording_begins_and_ends_between_two_steps(
    granted: float, wait: float, seconds: float, later: float
) -> None:
    """Elsewhere nothing happens before the grace period ends; at a step nothing is delayed."""
    waiting = Job(CaptureRequest(seconds), granted)
    assert next_action(waiting, granted + wait, at_step=True) == "start"
    assert ("wait" if granted + wait < granted + START_GRACE_SECONDS else "give_up") == next_action(
        waiting, granted + wait, at_step=False
    )

    recording = Job(CaptureRequest(seconds), granted, started := granted + wait)
    over = started + later >= started + seconds
    assert ("finish" if over else "wait") == next_action(recording, started + later, at_step=True)
    if next_action(recording, started + later, at_step=False) == "finish":
        assert over
        assert later >= STOP_GRACE_SECONDS - 1e-6


def test_a_directory_in_place_of_a_request_is_refused(rank: Rank) -> None:
    """It is refused once, and leaves no descriptor open however often it is looked at."""
    rank.request_path.mkdir()
    rank.capture.at_tick()
    opened = open_descriptors()
    for number in range(20):
        os.utime(rank.request_path, (number, number))
        rank.capture.at_tick()

    assert (
        rank.answer.state,
        rank.answer.reason,
    ) == ("refused", "the request is a directory.")
    assert opened == open_descriptors()


def test_a_capture_from_request_to_snapshot(rank: Rank, backend: SimulatedBackend) -> None:
    """It starts and ends at a step, lasts as long as requested, and leaves a private file."""
    rank.request()
    assert (rank.answer.state, backend.history_enabled()) == ("waiting", False)

    rank.capture.at_step()
    rank.now = 9.9
    rank.capture.at_step()
    assert (rank.answer.state, backend.history_enabled()) == ("recording", True)

    rank.now = 10.0
    rank.capture.at_step()
    assert (rank.answer.state, backend.history_enabled()) == ("done", False)
    assert rank.request_path.stat().st_mtime_ns == rank.answer.request_ns
    assert stat.S_IMODE(rank.snapshot.stat().st_mode) == 0o600
    assert load_snapshot(rank.snapshot).keys() == {
        "segments",
        "device_traces",
        "allocator_settings",
        FACTS_KEY,
    }
    assert sum(rank.errors.counts.values()) == 0


@given(st.lists(st.integers(1, 200), max_size=8), st.integers(1, 200))
def test_what_was_overwritten_is_told(lengths: list[int], most: int) -> None:
    """A GPU whose trace is full has lost entries; the shortest of these spans is told."""
    traces = [[{"time_us": 10 * index} for index in range(length)] for length in lengths]
    full = [length for length in lengths if length >= most]
    kept = kept_seconds({"device_traces": traces}, most)

    assert kept == (bool(full), (min(full) - 1) / 1e5 if full else None)
    assert kept_seconds({"device_traces": [[{}] * 3]}, 3) == (True, None)


def test_a_request_decides_how_many_entries_are_kept(rank: Rank) -> None:
    """The facts name the number, and the answer says whether older entries were lost."""
    rank.request(encode(CaptureRequest(10, max_entries=1)))
    rank.capture.at_step()
    rank.now = 10.0
    rank.capture.at_step()

    assert load_snapshot(rank.snapshot)[FACTS_KEY]["max_entries"] == 1
    assert (rank.answer.state, rank.answer.overwritten) == ("done", False)


@pytest.mark.parametrize("entries", [0, -1, MAX_CAPTURE_ENTRIES + 1])
def test_an_impossible_number_of_entries_is_refused(rank: Rank, entries: int) -> None:
    """A process is not asked for more memory than a capture may take."""
    rank.request(encode(CaptureRequest(10, entries)))

    assert rank.answer.state == "refused"


def test_a_capture_has_the_memory_at_its_begin(
    tmp_path: Path, allocator: DeviceCachingAllocator, backend: SimulatedBackend
) -> None:
    """The file has segments, limits, the peak and the version as they were at the first step."""
    peaks = {0: 700 * MIB}
    rank = Rank(tmp_path, backend, lambda: peaks)
    allocator.set_memory_fraction(0.75)
    held = allocator.malloc(3 * MIB)
    rank.request()
    rank.capture.at_step()
    allocator.malloc(400 * MIB)
    peaks[0] = 900 * MIB
    rank.now = 10.0
    rank.capture.at_step()
    facts = load_snapshot(rank.snapshot)[FACTS_KEY]

    assert facts["versions"] == {"torch": "simulated"}
    (segment,) = facts["segments"]
    assert [(held.address, held.size), (held.address + held.size, 17 * MIB)] == [
        (block["address"], block["size"]) for block in segment["blocks"]
    ]
    assert facts["devices"][0] == {
        "total_bytes": 1024 * MIB,
        "limit_bytes": 768 * MIB,
        "free_bytes": 1004 * MIB,
        "reserved_bytes": 20 * MIB,
        "allocated_peak_bytes": 700 * MIB,
    }


def test_history_is_off_if_its_begin_cannot_be_read(tmp_path: Path) -> None:
    """If the memory cannot be read, the request is refused and nothing goes on recording."""

    class Unreadable(SimulatedBackend):
        def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:
            raise RuntimeError("CUDA error")

    backend = Unreadable([DeviceCachingAllocator(SimulatedGpu(1024 * MIB))])
    rank = Rank(tmp_path, backend)
    rank.request()
    rank.capture.at_step()

    assert (rank.answer.state, backend.history_enabled()) == ("refused", False)
    assert "CUDA error" in str(rank.answer.reason)


def test_without_a_step_it_gives_up(rank: Rank, backend: SimulatedBackend) -> None:
    """A process that never steps is not recorded, and the answer says what to do."""
    rank.request()
    rank.now = START_GRACE_SECONDS
    rank.capture.at_tick()

    assert (rank.answer.state, "session.step()" in str(rank.answer.reason)) == ("refused", True)
    assert not backend.history_enabled()


def test_when_steps_stop_the_background_thread_ends_it(
    rank: Rank, backend: SimulatedBackend
) -> None:
    """A recording ends even in a process whose training hangs."""
    rank.request()
    rank.capture.at_step()
    rank.now = 10 + STOP_GRACE_SECONDS
    rank.capture.at_tick()

    assert (
        rank.answer.state,
        backend.history_enabled(),
        rank.snapshot.exists(),
    ) == ("done", False, True)


def test_the_users_own_recording_is_left_alone(rank: Rank, backend: SimulatedBackend) -> None:
    """If memory history is on, the request is refused with that reason and history stays on."""
    backend.start_history(1)
    rank.request()
    rank.capture.at_step()

    assert (
        rank.answer.state,
        "_record_memory_history" in str(rank.answer.reason),
    ) == ("refused", True)
    assert backend.history_enabled()


def test_a_recording_that_the_script_ended_is_no_snapshot(
    rank: Rank, backend: SimulatedBackend
) -> None:
    """If the script turns history off, the request is refused and no snapshot is written."""
    rank.request()
    rank.capture.at_step()
    backend.stop_history()
    rank.now = 10.0
    rank.capture.at_step()

    assert (rank.answer.state, rank.snapshot.exists()) == ("refused", False)


def test_a_withdrawn_request_ends_the_recording(rank: Rank, backend: SimulatedBackend) -> None:
    """If the command is interrupted, recording stops at the next tick and nothing is written."""
    rank.request()
    rank.capture.at_step()
    rank.request_path.unlink()
    rank.capture.at_tick()
    rank.now = 10.0
    rank.capture.at_step()

    assert (backend.history_enabled(), rank.snapshot.exists()) == (False, False)


def test_the_end_of_the_process_writes_what_was_recorded(
    rank: Rank, backend: SimulatedBackend
) -> None:
    """A training that ends early still writes its snapshot."""
    rank.request()
    rank.capture.at_step()
    rank.capture.end(may_read=True)

    assert (
        rank.answer.state,
        backend.history_enabled(),
        rank.snapshot.exists(),
    ) == ("done", False, True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not json", "not written by torchmem"),
        (b"[" * 4000, "not written by torchmem"),
        (b'{"seconds": 301}', "between 0 and 300"),
        (b'{"seconds": -1}', "between 0 and 300"),
        (b'{"seconds": NaN}', "between 0 and 300"),
        (b'{"seconds": "5"}', "not written by torchmem"),
        (b" " * (MAX_MESSAGE_BYTES + 1), "larger than"),
    ],
)
def test_an_invalid_request_is_refused(rank: Rank, content: bytes, reason: str) -> None:
    """Any invalid content is refused with a reason; no error is counted, nothing is recorded."""
    rank.request(content)
    rank.capture.at_step()

    assert (rank.answer.state, reason in str(rank.answer.reason)) == ("refused", True), rank.answer
    assert sum(rank.errors.counts.values()) == 0


def test_links_and_pipes_are_refused(rank: Rank, tmp_path: Path) -> None:
    """A request that is a link to a good one, or a pipe that would block, is refused."""
    (tmp_path / "elsewhere").write_bytes(encode(CaptureRequest(10)))
    rank.request_path.symlink_to(tmp_path / "elsewhere")
    rank.capture.at_tick()
    assert (
        rank.answer.state,
        rank.answer.reason,
    ) == ("refused", "the request is not a regular file.")

    rank.request_path.unlink()
    os.mkfifo(rank.request_path)
    rank.capture.at_tick()
    assert (
        rank.answer.state,
        rank.answer.reason,
    ) == ("refused", "the request is not a regular file.")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_request_is_refused(rank: Rank, backend: SimulatedBackend) -> None:
    """A request by neither the process's own user nor root is refused without parsing it."""
    rank.request_path.write_bytes(b"not json")
    os.chown(rank.request_path, 4321, 4321)
    rank.capture.at_tick()
    rank.capture.at_step()

    assert (rank.answer.state, "user 4321's" in str(rank.answer.reason)) == ("refused", True)
    assert not backend.history_enabled()


def test_a_stale_request_is_refused(rank: Rank) -> None:
    """A request that a killed command left behind starts nothing."""
    rank.request_path.write_bytes(encode(CaptureRequest(10)))
    old = rank.request_path.stat().st_mtime - STALE_SECONDS - 1
    os.utime(rank.request_path, (old, old))
    rank.capture.at_tick()

    assert rank.answer.state == "refused"


class BrokenBackend(SimulatedBackend):
    """An allocator that can start a recording and then fails."""

    def full_snapshot(self, *, traces: bool) -> None:
        raise RuntimeError("broken snapshot")


def test_a_failure_is_counted_and_answered(
    tmp_path: Path, allocator: DeviceCachingAllocator
) -> None:
    """If the snapshot fails, training goes on, recording stops, and the answer says why."""
    backend = BrokenBackend([allocator])
    rank = Rank(tmp_path, backend)
    rank.request()
    rank.capture.at_step()
    rank.now = 10.0
    rank.capture.at_step()

    assert (rank.answer.state, "broken snapshot" in str(rank.answer.reason)) == ("refused", True)
    assert (rank.errors.counts["capture"], backend.history_enabled()) == (1, False)


def test_a_session_serves_requests(
    backend: SimulatedBackend, open_session: Callable[..., Session], tmp_path: Path
) -> None:
    """A session sees a request and serves it while the script steps."""
    session = open_session(backend, interval=0.01)
    backend.step()
    sample = until(lambda: list(tmp_path.rglob(f"*{SAMPLE_SUFFIX}")))[0]
    answer = sibling_path(sample, ANSWER_SUFFIX)
    sibling_path(sample, REQUEST_SUFFIX).write_bytes(encode(CaptureRequest(0.001)))

    def done() -> bool:
        backend.step()
        return answer.exists() and decode_answer(answer.read_bytes()).state == "done"

    until(done)
    assert session.errors.counts["capture"] == 0
    assert load_snapshot(sibling_path(sample, SNAPSHOT_SUFFIX))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_snapshot_at_an_oom_only_if_enabled(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Callable[..., Session],
    tmp_path: Path,
    enabled: bool,
) -> None:
    """Only `capture_on_oom` keeps the newest OOM's state, in one private file."""
    session = open_session(backend, capture_on_oom=enabled)
    allocator.malloc(100 * MIB)
    for _ in range(3):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(2048 * MIB)

    paths = list(tmp_path.rglob(f"*{OOM_SNAPSHOT_SUFFIX}"))
    assert [0o600] * enabled == [stat.S_IMODE(path.stat().st_mode) for path in paths]
    assert [100 * MIB] * enabled == [
        load_snapshot(path)["segments"][0]["total_size"] for path in paths
    ]
    assert session.errors.counts["capture"] == 0


class TracingBackend(SimulatedBackend):
    """A backend whose allocations leave a trace; `script_records` says whose recording it is."""

    script_records = False
    ended = 0

    def start_trace(self, max_entries: int, *, complete: bool = False) -> bool:
        """Start, unless the script records."""
        assert complete
        assert max_entries == OOM_TRACE_ENTRIES
        self.start_history(max_entries)
        return not self.script_records

    def end_trace(self, use: Callable[[Sequence[Sequence[TraceEntry]]], T]) -> T | None:
        """Count the call."""
        self.ended += 1
        return use([[]])


def test_a_trace_is_kept_at_an_oom(
    allocator: DeviceCachingAllocator, open_session: Callable[..., Session], tmp_path: Path
) -> None:
    """The recording has the facts of a capture, is private, and ends with the session."""
    backend = TracingBackend([allocator])
    session = open_session(backend, capture_on_oom="trace")
    allocator.malloc(100 * MIB)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(2048 * MIB)
    (path,) = tmp_path.rglob(f"*{OOM_RECORDING_SUFFIX}")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    facts = load_snapshot(path)[FACTS_KEY]
    assert (facts["max_entries"], facts["segments"]) == (OOM_TRACE_ENTRIES, [])
    assert not [*tmp_path.rglob(f"*{OOM_SNAPSHOT_SUFFIX}")]
    session.close()
    assert (backend.ended, session.errors.counts["capture"]) == (1, 0)


def test_without_a_trace_the_snapshot_is_kept(
    allocator: DeviceCachingAllocator,
    open_session: Callable[..., Session],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the script records, or the allocator cannot, one warning says so."""
    backend = TracingBackend([allocator])
    backend.script_records = True
    session = open_session(backend, capture_on_oom="trace")
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)
    session.close()

    assert len([*tmp_path.rglob(f"*{OOM_SNAPSHOT_SUFFIX}")]) == 1
    assert not [*tmp_path.rglob(f"*{OOM_RECORDING_SUFFIX}")]
    assert caplog.text.count("capture_on_oom") == 1
    assert backend.ended == 0


def test_frequent_ooms_leave_no_recording_of_another_one(
    tmp_path: Path, backend: SimulatedBackend
) -> None:
    """When writing has taken its share of the time, the file of an older OOM is removed."""
    now = 0.0

    class Slow(RecordedHistory):
        def trace(self) -> Mapping[str, Any] | None:
            nonlocal now
            now += OOM_TRACE_RESERVE_SECONDS / 2
            return super().trace()

    trace = OomTrace(Slow(backend, dict), tmp_path / f"0-1-2{SAMPLE_SUFFIX}", clock=lambda: now)
    kept = []
    for _ in range(3):
        trace.keep()
        kept.append(len([*tmp_path.iterdir()]))
    now += OOM_TRACE_RESERVE_SECONDS / OOM_TRACE_BUDGET
    trace.keep()

    assert (kept, len([*tmp_path.iterdir()])) == ([1, 1, 0], 1)


def test_a_user_keeps_a_bounded_number_of_recordings(
    tmp_path: Path, backend: SimulatedBackend
) -> None:
    """The oldest ones of all processes are removed."""
    for number in range(MAX_RECORDINGS_PER_USER + 2):
        sample = tmp_path / f"0-{number}-2{SAMPLE_SUFFIX}"
        OomTrace(RecordedHistory(backend, dict), sample).keep()

    assert len([*tmp_path.iterdir()]) == MAX_RECORDINGS_PER_USER


def test_a_failing_snapshot_does_not_replace_the_oom(
    allocator: DeviceCachingAllocator, open_session: Callable[..., Session]
) -> None:
    """If the snapshot fails, the user's error is still raised."""
    session = open_session(BrokenBackend([allocator]), capture_on_oom=True)

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    assert session.errors.counts["capture"] == 1
