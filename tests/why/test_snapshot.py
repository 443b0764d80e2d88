"""`torchmem why`: the groups add up; lines, moments, leaks and stranded memory are right."""

from __future__ import annotations

import copy
import html
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
from support.snapshot_versions import LATER_KEYS, as_20, older

from torchmem.allocator.sizes import GIB, MIB
from torchmem.cli.main import main
from torchmem.trace import StackedTrace, read_with_stacks
from torchmem.trace.holders import BEFORE_RECORDING, NO_LINE, holders
from torchmem.trace.leaks import PARTS, is_long_enough, leaks
from torchmem.trace.lifetimes import MOMENTS, Lifetimes
from torchmem.why.snapshot import MAX_REPLAYED_EVENTS

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


def stranding() -> dict[str, Any]:
    """Return a job whose last request fails, although enough is free beside blocks of line 2."""
    recorded = RecordedJob(gpu_bytes=2 * GIB)
    blocks = []
    for number in range(70):
        blocks.append(recorded.alloc((12, 8)[number % 2] * MIB))
        recorded.trace[-1]["frames"] = stack(1 + number % 2)
    for block in filter(None, blocks[::2]):
        recorded.free(block)
    while recorded.alloc(300 * MIB):
        pass
    recorded.trace[-1]["frames"] = stack(7)
    return recorded.snapshot()


def test_stranded_memory_is_named_with_the_lines_beside_it(tmp_path: Path, run: Run) -> None:
    """An OOM of fragmentation says so, what was free where, and what holds it in place."""
    path = write(stranding(), tmp_path / "oom.pickle")
    code, out, _ = run(path, "--json")
    memory = json.loads(out)["memory"]

    assert (code, memory["failed"]["cause"], memory["stranded_bytes"]) == (
        0,
        "fragmentation",
        35 * 12 * MIB,
    )
    assert [(row["line"], row["bytes"], row["gaps"]) for row in memory["beside"]] == [
        (2, 35 * 12 * MIB, 35)
    ]
    parts = ("in_use", "pending", "stranded", "releasable", "private_free")
    assert memory["reserved_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)


def test_the_memory_of_a_moment_is_that_of_a_snapshot_taken_then(tmp_path: Path, run: Run) -> None:
    """What followed an OOM is undone: the dump of a process that went on tells the same."""
    recorded = RecordedJob(gpu_bytes=2 * GIB)
    held = [*filter(None, [recorded.alloc(200 * MIB) for _ in range(6)])]
    recorded.free(held[0])
    assert recorded.alloc(GIB) is None
    at_once = copy.deepcopy(recorded.snapshot())
    for block in held[1:4]:
        recorded.free(block)
    recorded.alloc(40 * MIB)
    answers = [
        json.loads(run(write(content, tmp_path / f"{number}.pickle"), "--json")[1])
        for number, content in enumerate((at_once, recorded.snapshot()))
    ]

    assert answers[0]["memory"] == answers[1]["memory"]
    assert answers[0]["last_entries"] == answers[1]["last_entries"]


def test_the_last_entries_say_what_the_allocator_was_doing(tmp_path: Path, run: Run) -> None:
    """A free is one entry, with the line that had allocated; times count back from the moment."""
    _, out, _ = run(write(job(3 * MIB), tmp_path / "job.pickle"), "--json", "--top", "4")
    entries = json.loads(out)["last_entries"]

    assert [(entry["action"], entry["size_bytes"] // MIB) for entry in entries] == [
        ("alloc", 3),
        ("free", 64),
        ("free", 32),
        ("free", 8),
    ]
    assert entries[1]["line"] == "/job/model.py:2  forward"
    assert entries[-1]["seconds"] == 0 < entries[0]["seconds"]


def annotated() -> dict[str, Any]:
    """Return a job with ranges, metadata and a compiled region around some allocations."""
    snapshot = job(MIB)
    trace = snapshot["device_traces"][0]
    times = [entry["time_us"] for entry in trace]
    for entry in trace[len(trace) // 2 :]:
        entry.update(user_metadata="phase B", compile_context="Torch-Compiled Region: 0/0")
    marks = [
        ("START", "training", times[0] - 1),
        ("START", "forward", times[40]),
        ("END", "forward", times[-40]),
        ("END", "never started", times[-30]),
    ]
    snapshot["external_annotations"] = [
        {"stage": stage, "name": name, "device": device, "time_us": time}
        for stage, name, time in marks
        for device in range(2)
    ]
    return snapshot


def test_what_the_program_wrote_is_grouped(tmp_path: Path, run: Run) -> None:
    """Ranges are paths, each grouping accounts for all bytes, and unset ones have no table."""
    _, out, _ = run(write(annotated(), tmp_path / "job.pickle"), "--json")
    _, plain, _ = run(write(job(MIB), tmp_path / "plain.pickle"), "--json")
    answer = json.loads(out)

    tables = {name: answer[f"by_{name}"] for name in ("annotation", "metadata", "region")}
    assert {row["key"] for row in tables["annotation"]} == {"training", "training > forward"}
    assert {row["key"] for row in tables["metadata"]} == {"without metadata", "phase B"}
    assert {row["key"] for row in tables["region"]} == {
        "not compiled",
        "Torch-Compiled Region: 0/0",
    }
    for name, rows in tables.items():
        assert answer["bytes"] == sum(row["bytes"] for row in rows)
        assert json.loads(plain)[f"by_{name}"] == []


def test_what_autograd_allocates_has_the_line_of_the_forward_pass(tmp_path: Path) -> None:
    """PyTorch writes a traceback of it with detect_anomaly, and no frames."""
    snapshot = job(steps=2)
    entry = next(e for e in snapshot["device_traces"][0] if e["action"] == "alloc")
    entry["frames"] = []
    entry["forward_frames"] = [
        '  File "/job/train.py", line 5, in <module>\n    main()\n',
        '  File "/job/model.py", line 9, in forward\n    return self.a(x)\n',
        "Traceback of something else",
    ]
    found = holders(Lifetimes.of(only(write(snapshot, tmp_path / "job.pickle"))), "peak")

    assert found is not None
    assert found.by_line[0].key == "/job/model.py:9  forward"


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.11", "newest"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_snapshots_of_each_version_are_explained(
    tmp_path: Path, run: Run, version: str, protocol: int
) -> None:
    """Lines, stranded memory, growth and settings are the same; only times may be missing."""
    snapshot = stranding()
    removed = {"2.1": len(LATER_KEYS), "2.11": 1}.get(version, 0)
    written = as_20(snapshot) if version == "2.0" else older(snapshot, removed)
    answers = [
        json.loads(run(write(content, tmp_path / "job.pickle", protocol), "--json")[1])
        for content in (snapshot, written)
    ]
    for answer in answers:
        for name in ("seconds", "by_age", "last_entries"):
            del answer[name]

    assert answers[0] == answers[1]


def test_each_of_eight_devices_is_explained(tmp_path: Path, run: Run) -> None:
    """All have a page of their own, also those without a trace."""
    jobs = [RecordedJob(device=device) for device in range(8)]
    for device, recorded in enumerate(jobs):
        recorded.alloc((device + 1) * MIB)
    snapshot = jobs[0].snapshot() | {
        "segments": [segment for recorded in jobs for segment in recorded.segments()],
        "device_traces": [recorded.trace if n % 2 else [] for n, recorded in enumerate(jobs)],
    }
    _, out, _ = run(write(snapshot, tmp_path / "eight.pickle"), "--json")
    answers = list(map(json.loads, out.splitlines()))

    assert [(answer["device"], answer["bytes"]) for answer in answers] == [
        (device, (device + 1) * MIB) for device in range(8)
    ]
    assert [answer["settings"] is None for answer in answers] == [True, False] * 4


def test_a_long_trace_is_not_replayed_unasked(tmp_path: Path, run: Run) -> None:
    """The page ends with the command that replays it."""
    snapshot = job()
    trace = snapshot["device_traces"][0]
    snapshot["device_traces"][0] = [
        dict(entry) for _ in range(MAX_REPLAYED_EVENTS // len(trace) + 1) for entry in trace
    ]
    path = write(snapshot, tmp_path / "job.pickle")

    assert run(path)[1].endswith(f"\n    torchmem whatif {path}\n")


def test_the_page_is_complete(tmp_path: Path, run: Run) -> None:
    """--html writes the text under a headline that says why the request failed, escaped."""
    snapshot = stranding()
    snapshot["device_traces"][0][-1]["frames"] = [frame(7, "<script>")]
    path, page = write(snapshot, tmp_path / "oom.pickle"), tmp_path / "oom.html"
    code, out, _ = run(path, "--html", page)
    text = page.read_text()

    assert code == 0
    assert "<h1>Enough free memory, but not in one piece: 300.00 MiB was needed" in text
    assert html.escape(out) in text
    assert "<script>" not in text


@pytest.mark.parametrize("name", ["end", "peak", "oom", "leaks"])
def test_the_page_is_the_recorded_one(tmp_path: Path, run: Run, name: str) -> None:
    """The output is the recorded page; record it again with WRITE_GOLDEN=1."""
    first = write(job(3 * MIB, steps=20), tmp_path / "first.pickle")
    second = write(job(3 * MIB, steps=40), tmp_path / "second.pickle")
    third = write(stranding(), tmp_path / "theirs.pickle")
    arguments = {
        "end": (first, "--at", "end"),
        "peak": (first, "--at", "peak", "--top", 2),
        "oom": (third, "--top", 4),
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
