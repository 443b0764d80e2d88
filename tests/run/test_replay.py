"""Replays of an attempt's recording: which setting would have saved it, if they show one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from support.recordings import RecordedJob, in_small_pieces, write

from torchmem.allocator.sizes import GIB, MIB
from torchmem.run.replay import SETTINGS, Question, Replayed, answers, replay
from torchmem.simulator.gpu import CONTEXT_BYTES

EXPANDABLE = "expandable_segments:True"


def phases() -> RecordedJob:
    """Return a job whose large buffers are split before the last request."""
    job = RecordedJob(gpu_bytes=CONTEXT_BYTES + 700 * MIB)
    buffer = job.alloc(400 * MIB)
    assert buffer
    job.free(buffer)
    blocks = [job.alloc(size * MIB) for _ in range(4) for size in (20, 60)]
    for block in filter(None, blocks[1::2]):
        job.free(block)
    assert job.alloc(400 * MIB) is None
    return job


JOBS = {
    "phases": (phases(), EXPANDABLE, ()),
    "pages": (in_small_pieces(), "large_segment_size_mb:16", (EXPANDABLE,)),
    "full": (in_small_pieces(35, 9, 11), None, SETTINGS),
}


def asked(path: Path, *settings: str) -> list[tuple[str, str]]:
    """Return the answers for a recording of GPU 0, in this process."""
    return list(answers(job(path, settings)))


def job(path: Path, settings: tuple[str, ...], room: int = 0) -> dict[str, Any]:
    """Return what the child process gets."""
    fixed = {"recording": str(path), "device": 0, "present": {}}
    return {**fixed, "settings": settings, "room": room}


@pytest.mark.parametrize("name", JOBS)
def test_the_first_setting_that_suffices_wins(tmp_path: Path, name: str) -> None:
    """Settings are replayed in their order, until memory suffices or none is left."""
    recorded, enough, failed = JOBS[name]
    path = write(recorded.snapshot(), tmp_path / "rank0.pickle")
    expected = [("not enough", setting) for setting in failed if "max_split" not in setting]
    found = [answer for answer in asked(path, *SETTINGS) if "max_split" not in answer[1]]

    assert expected + [("enough", enough)] * (enough is not None) == found


def test_a_child_process_answers(tmp_path: Path) -> None:
    """The answer is that of the replays, with what the user has set."""
    path = write(JOBS["pages"][0].snapshot(), tmp_path / "rank0.pickle")
    settings = (EXPANDABLE, "large_segment_size_mb:16")

    other = Question(0, {"backend": "native"}, settings[:1])

    assert Replayed(settings[1], settings[:1]) == replay(path, Question(0, {}, settings))
    assert Replayed(failed=settings[:1]) == replay(path, other)


def test_the_room_that_must_be_left_counts(tmp_path: Path) -> None:
    """A setting under which the recording just ends is not enough for the steps that follow."""
    path = write(JOBS["phases"][0].snapshot(), tmp_path / "rank0.pickle")
    little, much = (next(answers(job(path, (EXPANDABLE,), room)))[0] for room in (MIB, GIB))

    assert (little, much) == ("enough", "not enough")


def test_a_replay_that_takes_too_long_shows_nothing(tmp_path: Path) -> None:
    """It ends, and the problem is one sentence."""
    path = write(JOBS["pages"][0].snapshot(), tmp_path / "rank0.pickle")
    found = replay(path, Question(0, {}, SETTINGS), seconds=0.001)

    assert Replayed(problem="its replay took too much time or memory.") == found


def test_what_cannot_be_replayed_is_a_problem(tmp_path: Path) -> None:
    """Damaged and hostile files, and traces without an OOM or a begin, are a problem."""
    whole = pickle.dumps(JOBS["pages"][0].snapshot())
    other = in_small_pieces()
    fits = {**other.snapshot(), "device_traces": [other.trace[:-1]]}
    contents = {
        "cut": whole[: len(whole) // 2],
        "code": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        "empty": b"",
        "fits": pickle.dumps(fits),
        "late": pickle.dumps({**fits, "device_traces": [other.trace[10:]]}),
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        [(verdict, text)] = asked(path, EXPANDABLE)
        assert (verdict, text.endswith(".")) == ("problem", True), name


def test_another_gpu_shows_nothing(tmp_path: Path) -> None:
    """A recording without a trace of the GPU that ran out of memory has no answer."""
    path = write(JOBS["pages"][0].snapshot(), tmp_path / "rank0.pickle")
    job = {"recording": str(path), "device": 1, "present": {}, "settings": [EXPANDABLE]}

    assert list(answers(job)) == []
