"""`torchmem why`: the groups add up, and lines, moments and leaks are right."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recordings import RecordedJob, write

from torchmem.allocator.sizes import GIB, MIB
from torchmem.cli.main import main
from torchmem.trace import StackedTrace, read_with_stacks
from torchmem.trace.holders import BEFORE_RECORDING, NO_LINE, holders
from torchmem.trace.leaks import PARTS, is_long_enough, leaks
from torchmem.trace.lifetimes import MOMENTS, Lifetimes

Run = Callable[..., tuple[int, str, str]]
GOLDEN = Path(__file__).resolve().parent / "golden" / "snapshot"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `torchmem why` and return the exit code, stdout and stderr."""

    def run_once(*arguments: object) -> tuple[int, str, str]:
        code = main(["why", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_once


def only(path: Path) -> StackedTrace:
    """Return the only device of a snapshot."""
    [trace] = read_with_stacks(path)
    return trace


def frame(line: int, function: str = "train", file: str = "/job/train.py") -> dict[str, Any]:
    """Return a frame as PyTorch writes it."""
    return {"filename": file, "line": line, "name": function}


def stack(line: int) -> list[dict[str, Any]]:
    """Return a stack whose innermost frames are PyTorch's."""
    installed = "/venv/lib/python3.11/site-packages/torch"
    return [
        frame(134, "forward", f"{installed}/nn/modules/linear.py"),
        frame(1800, "_call_impl", f"{installed}/nn/modules/module.py"),
        frame(line, "forward", "/job/model.py"),
        frame(line + 100),
    ]


def job(leak: int = 0, steps: int = 40, kept_steps: int = 0) -> dict[str, Any]:
    """Return a snapshot of steps that allocate and free, and keep `leak` bytes each.

    The parameters come from line 1, activations from line 2, and what is kept from line 3.
    """
    recorded = RecordedJob()

    def allocate(size: int, line: int) -> Any:
        block = recorded.alloc(size)
        entry = next(e for e in reversed(recorded.trace) if e["action"] == "alloc")
        entry["frames"] = stack(line)
        return block

    allocate(512 * MIB, 1)
    for step in range(steps):
        activations = [allocate(size * MIB, 2) for size in (64, 32, 8)]
        if leak and step >= kept_steps:
            allocate(leak, 3)
        for block in activations:
            recorded.free(block)
    return recorded.snapshot()


@given(st.integers(0, 1 << 32), st.integers(0, 60))
@settings(max_examples=30, deadline=None)
def test_every_grouping_adds_up(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cut: int
) -> None:
    """At the end, at the peak and at an OOM, each table has all bytes and blocks in use.

    It holds too when the oldest events are missing. At the end they are the snapshot's blocks.
    """
    rng, recorded = random.Random(seed), RecordedJob(gpu_bytes=GIB)
    live: list[Any] = []
    for _ in range(120):
        if live and rng.random() < 0.45:
            recorded.free(live.pop(rng.randrange(len(live))))
        else:
            block = recorded.alloc(rng.choice((300, 40_000, 3 * MIB, 90 * MIB)))
            live += [block] if block else []
    snapshot = recorded.snapshot()
    snapshot["device_traces"][0] = recorded.trace[cut:]
    path = write(snapshot, tmp_path_factory.mktemp("job") / "job.pickle")
    lifetimes = Lifetimes.of(only(path))
    for at in MOMENTS:
        found = holders(lifetimes, at)
        if found is None:
            assert at == "oom"
            continue
        for groups in (found.by_line, found.by_size, found.by_age, found.by_pool):
            assert found.size_bytes == sum(group.size_bytes for group in groups)
            assert found.blocks == sum(group.blocks for group in groups)

    blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] != "inactive"]
    end = holders(lifetimes, "end")
    assert end is not None
    assert (sum(block["requested_size"] for block in blocks), len(blocks)) == (
        end.size_bytes,
        end.blocks,
    )
    peak = holders(lifetimes, "peak")
    assert peak is not None
    assert peak.size_bytes == max(lifetimes.totals())


def test_the_line_is_the_users_own(tmp_path: Path) -> None:
    """A block belongs to the innermost line outside of PyTorch, and to the path of its modules."""
    found = holders(Lifetimes.of(only(write(job(), tmp_path / "job.pickle"))), "peak")

    assert found is not None
    assert [(group.key, group.size_bytes) for group in found.by_line] == [
        ("/job/model.py:1  forward", 512 * MIB),
        ("/job/model.py:2  forward", 104 * MIB),
    ]
    assert found.by_module[0].key == "model.py:1 > linear.py:134"


def test_memory_from_before_the_recording_is_named_so(tmp_path: Path) -> None:
    """A block that has neither an event nor a stack was allocated before the recording."""
    snapshot = job(steps=2)
    snapshot["device_traces"][0] = snapshot["device_traces"][0][2:]
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    found = holders(Lifetimes.of(only(write(snapshot, tmp_path / "job.pickle"))), "end")

    assert found is not None
    assert [group.key for group in found.by_line] == [BEFORE_RECORDING]
    assert [group.key for group in found.by_age] == [BEFORE_RECORDING]


def test_a_leak_is_a_line_that_keeps_memory_throughout(tmp_path: Path) -> None:
    """Parameters and activations are not leaks; a line that keeps some bytes of every step is."""
    steady = Lifetimes.of(only(write(job(), tmp_path / "steady.pickle")))
    leaking = Lifetimes.of(only(write(job(leak=5 * MIB, kept_steps=4), tmp_path / "leak.pickle")))
    [leak] = leaks(leaking)

    assert leaks(steady) == ()
    assert (
        leak.line.file,
        leak.line.line,
        leak.size_bytes,
        leak.blocks,
    ) == ("/job/model.py", 3, 36 * 5 * MIB, 36)
    assert len(leak.parts) == PARTS
    assert not is_long_enough(Lifetimes.of(only(write(job(steps=2), tmp_path / "short.pickle"))))


def test_the_request_that_failed_is_named(tmp_path: Path, run: Run) -> None:
    """By default a snapshot with an OOM shows the moment of the OOM and who asked."""
    recorded = RecordedJob(gpu_bytes=4 * GIB)
    recorded.alloc(600 * MIB)
    recorded.alloc(4 * GIB)
    recorded.trace[-1]["frames"] = stack(7)
    code, out, _ = run(write(recorded.snapshot(), tmp_path / "oom.pickle"), "--json")
    answer = json.loads(out)

    assert (code, answer["at"], answer["bytes"]) == (0, "oom", 600 * MIB)
    assert {"file": "/job/model.py", "line": 7, "function": "forward"}.items() <= answer[
        "request"
    ].items()


@pytest.mark.parametrize("name", ["end", "peak", "leaks"])
def test_the_page_is_the_recorded_one(tmp_path: Path, run: Run, name: str) -> None:
    """The output is the recorded page; record it again with WRITE_GOLDEN=1."""
    first = write(job(3 * MIB, steps=20), tmp_path / "first.pickle")
    second = write(job(3 * MIB, steps=40), tmp_path / "second.pickle")
    arguments = {
        "end": (first, "--at", "end"),
        "peak": (first, "--at", "peak", "--top", 2),
        "leaks": (second, "--leaks"),
    }
    code, out, error = run(*arguments[name])

    assert (code, error) == (0, "")
    golden(GOLDEN / f"{name}.txt", out)


def golden(path: Path, text: str) -> None:
    """Compare a text with the recorded one."""
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def test_segments_without_a_trace_are_enough(tmp_path: Path, run: Run) -> None:
    """A snapshot without history, and the list of memory_snapshot(), show what is in use."""
    snapshot = job()
    for number, content in enumerate((snapshot | {"device_traces": [[]]}, snapshot["segments"])):
        code, out, _ = run(write(content, tmp_path / f"{number}.pickle"), "--json")
        answer = json.loads(out)
        assert (code, answer["bytes"], answer["seconds"]) == (0, 512 * MIB, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["device_traces"][0][1].update(frames=7), "a stack is not a list"),
        (lambda s: s["device_traces"][0][1].update(frames=[7]), "a frame is not a dict"),
        (lambda s: s["device_traces"][0][1].update(frames=[{"name": 7}]), "no file"),
        (lambda s: s["device_traces"][0][1].update(time_us="now"), "invalid time_us"),
        (lambda s: s.update(segments=[], device_traces=[]), "no GPU memory"),
    ],
)
def test_odd_content_is_one_sentence(
    tmp_path: Path, run: Run, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    """A damaged snapshot ends with exit code 2 and one sentence that names the problem."""
    snapshot = job(steps=2)
    change(snapshot)
    code, out, error = run(write(snapshot, tmp_path / "odd.pickle"))

    assert (code, out) == (2, "")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{0}", "--gpu", "3"), "pass --gpu with one of 0"),
        (("{0}", "--at", "oom"), "no OutOfMemoryError"),
        (("{0}", "--top", "0"), "at least 1"),
        (("{0}", "{0}", "--html", "x.html"), "name only one"),
        (("missing.pickle",), "does not exist"),
    ],
)
def test_a_flag_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, run: Run, arguments: tuple[str, ...], words: str
) -> None:
    """The sentence says what to pass instead, and the exit code is 2."""
    path = write(job(steps=2), tmp_path / "job.pickle")
    code, out, error = run(*(argument.format(path) for argument in arguments))

    assert (code, out) == (2, "")
    assert words in error


def test_a_line_with_control_characters_is_printed_safely(tmp_path: Path, run: Run) -> None:
    """File names of a stranger's snapshot cannot control the terminal."""
    snapshot = job(steps=2)
    for entry in snapshot["device_traces"][0]:
        entry["frames"] = [frame(1, "f\x1b[2J", "/job/\x1b]0;x\x07.py")]
    _, out, _ = run(write(snapshot, tmp_path / "job.pickle"))

    assert "\x1b" not in out
    assert NO_LINE not in out
