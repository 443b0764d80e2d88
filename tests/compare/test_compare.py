"""`torchmem compare`: what it reads, its verdicts, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.played_script import PlayedScript
from support.publishing import own_process, own_sample, publish
from support.recordings import RecordedJob, varying_lengths, write
from support.reports import CAPACITY
from support.samples import full_sample

from torchmem.cli.main import command_line, main
from torchmem.commands.preflight import run as run_preflight
from torchmem.compare.baseline import BaselineEntry, document
from torchmem.compare.measured import Measured, Side
from torchmem.compare.peak_memory import PeakMemory
from torchmem.compare.reading import read_side
from torchmem.compare.verdict import compare
from torchmem.explain import oom_report
from torchmem.explain.run_summary import (
    SUMMARY_SUFFIX,
    DeviceSummary,
    RunSummary,
    decode,
    encode,
    summarize,
    summary_name,
)
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import State

GIB = 1 << 30
Page = tuple[int, str, str]


@pytest.fixture
def torchmem(capfd: pytest.CaptureFixture[str]) -> Callable[..., Page]:
    """Return a function that runs `torchmem compare` and returns its code, stdout and stderr."""

    def run(*words: str | Path) -> Page:
        code = main(["compare", *map(str, words)])
        return code, *capfd.readouterr()

    return run


def summary(peak: int = 50 * GIB, state: State = "exited", **changes: Any) -> RunSummary:
    """Return the summary of a run on an 80 GB GPU."""
    found = summarize(full_sample(), state)
    device = replace(
        found.devices[0], allocated_peak_bytes=peak, reserved_peak_bytes=peak + GIB, growth=None
    )
    return replace(replace(found, devices=(device,)), **changes)


def saved(folder: Path, name: str, content: RunSummary) -> Path:
    """Write a summary and return its path."""
    path = folder / f"{name}{SUMMARY_SUFFIX}"
    path.write_bytes(encode(content))
    return path


def preflight(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, *flags: str, leak: int = 0
) -> Path:
    """Write the JSON of a preflight of a simulated script."""
    words = ["preflight", "--beside-gpu", *flags, "--json", "--", "sh", "train.sh"]
    script = PlayedScript(leak=leak)
    run_preflight(command_line().parse_args(words), script, count(0.0, 1.0).__next__)
    path = folder / name
    path.write_text(capfd.readouterr().out)
    return path


def test_a_higher_peak_is_a_regression(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """The first line says by how much, and the exit code is 1; more may be allowed."""
    before, after = saved(tmp_path, "a", summary()), saved(tmp_path, "b", summary(55 * GIB))
    code, stdout, _ = torchmem(before, after)
    allowed, _, _ = torchmem(before, after, "--max-peak-increase", "12%")

    assert (code, allowed) == (1, 0)
    assert " ".join(stdout.splitlines()[:2]) == (
        "Regression: peak allocated 55.00 GiB instead of 50.00 GiB (+10.0%), more than the 2% "
        "allowed. "
    )
    assert "  peak allocated  50.00 GiB  55.00 GiB  +5.00 GiB (+10.0%)" in stdout.splitlines()


def test_markdown_for_a_pull_request(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """The comment has the sentence, a table, what changed, what else differs, and the notes."""
    paths = [tmp_path / name for name in ("before.summary.json", "after.summary.json")]
    paths[0].write_bytes(encode(summary()))
    paths[1].write_bytes(encode(summary(60 * GIB, "oom")))
    comment = tmp_path / "comment.md"
    code, stdout, stderr = torchmem(*paths, "--markdown", comment)
    page = comment.read_text()

    assert (code, stderr) == (1, "")
    assert page.startswith("### GPU memory: Regression\n\nIt runs out of memory now, and did not")
    assert "| 🔴 more | <code>cuda:0</code> | 50.00 GiB | 60.00 GiB | +10.00 GiB |" in page
    assert page.endswith("After: the run ran out of memory, so the peak is that up to then.\n")
    assert stdout.startswith("Regression: ")


def test_a_comment_that_cannot_be_written(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """One sentence says so, and the exit code is 2."""
    path = tmp_path / "some.summary.json"
    path.write_bytes(encode(summary()))
    code, _, stderr = torchmem(path, path, "--markdown", tmp_path / "no" / "comment.md")

    assert (code, len(stderr.splitlines())) == (2, 1)
    assert f"there is no directory {tmp_path / 'no'}: create it first." in stderr


def test_what_changed_is_said_by_component(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """The components of the peak are compared, and settings and versions that differ are listed."""
    before = summary()
    device = before.devices[0]
    parts = device.component_peaks | {"step": 23 * GIB}
    after = replace(
        summary(55 * GIB),
        devices=(replace(device, component_peaks=parts, allocated_peak_bytes=55 * GIB),),
        process=replace(before.process, versions={"torch": "2.14.0"}),
        allocator_settings={"backend": "native", "expandable_segments": "True"},
    )
    _, stdout, _ = torchmem(saved(tmp_path, "a", before), saved(tmp_path, "b", after))

    assert [line.split() for line in stdout.splitlines() if "GiB  step" in line] == [
        ["+5.00", "GiB", "step"]
    ]
    assert "  PyTorch                                2.13.0 before, 2.14.0 after" in stdout
    assert "expandable_segments  False before, True after" in stdout


@pytest.mark.parametrize("state", ["exited", "killed", "oom", "failed", "running"])
def test_a_peak_that_fell_is_never_in_doubt(
    state: State, tmp_path: Path, torchmem: Callable[..., Page]
) -> None:
    """However the older run ended, a peak that fell by 80% is an improvement."""
    before = saved(tmp_path, "a", summary(50 * GIB, state))
    code, stdout, _ = torchmem(before, saved(tmp_path, "b", summary(10 * GIB)))

    assert code == 0
    assert stdout.startswith("Improvement: ")
    assert "10.00 GiB instead of 50.00 GiB (-80.0%)" in " ".join(stdout.split())


def test_a_run_without_a_step_is_no_baseline(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """Its peak is that of an import, unless memory ran out in the first step."""
    before, after = saved(tmp_path, "a", summary(4096, steps=0)), saved(tmp_path, "b", summary())
    oom = saved(tmp_path, "c", summary(state="oom", steps=0))
    alone = saved(tmp_path, "d", summary(5000, steps=0))
    code, _, stderr = torchmem(before, after)

    assert (code, torchmem(after, before)[0]) == (2, 2)
    assert "a.summary.json is of a run that ended before its first step" in stderr
    assert (torchmem(after, oom)[0], torchmem(before, alone)[0]) == (1, 1)


def test_another_model_of_gpu_is_no_baseline(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """The sentence names both models; a phantom GPU stands for any."""

    def on(gpu: str) -> RunSummary:
        return summary(devices=(replace(summary().devices[0], name=gpu),))

    old, new = saved(tmp_path, "a", on("NVIDIA A100")), saved(tmp_path, "b", on("NVIDIA H100"))
    phantom = saved(tmp_path, "c", on("NVIDIA H100 (phantom)"))
    code, _, stderr = torchmem(old, new)

    assert code == 2
    assert "is of NVIDIA A100 and " in stderr
    assert torchmem(old, phantom)[0] == 0


def test_a_run_that_dies_of_memory_is_a_regression(
    tmp_path: Path, torchmem: Callable[..., Page]
) -> None:
    """Its peak was cut off by the error, so a lower one does not count."""
    before = saved(tmp_path, "a", summary(50 * GIB))
    code, stdout, _ = torchmem(before, saved(tmp_path, "b", summary(40 * GIB, "oom")))

    assert code == 1
    assert stdout.startswith("Regression: it runs out of memory now, and did not before.")
    assert "After: the run ran out of memory, so the peak is that up to then." in stdout
    assert "After, the summary of a run: It ran out of memory after 10 steps. Frag" in stdout


def test_the_older_run_died_of_memory(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """A run that reaches its end is an improvement, also with a higher peak."""
    before = saved(tmp_path, "a", summary(50 * GIB, "oom"))
    code, stdout, _ = torchmem(before, saved(tmp_path, "b", summary(60 * GIB)))

    assert code == 0
    assert stdout.startswith("Improvement: it ran out of memory before, and does not now.")


def test_fragmentation_is_a_regression() -> None:
    """More reserved memory for the same tensors counts, but not a segment more."""

    def one(reserved: int) -> Side:
        memory = PeakMemory(30 * GIB, reserved)
        return Side("x", "a run", "run", {"": Measured(memory)})

    assert compare(one(31 * GIB), one(40 * GIB), 0.02).outcome == "regression"
    assert compare(one(40 * GIB), one(31 * GIB), 0.02).outcome == "improvement"
    few = PeakMemory(30 << 20, 40 << 20), PeakMemory(30 << 20, 60 << 20)
    sides = [Side("x", "a run", "run", {"": Measured(memory)}) for memory in few]
    assert compare(sides[0], sides[1], 0.02).outcome == "unchanged"


def test_files_of_different_kinds_are_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], torchmem: Callable[..., Page]
) -> None:
    """A summary, a sample, an OOM report, a preflight and a snapshot compare with each other."""
    report = tmp_path / "some.oom.json"
    device = replace(CAPACITY.device, name=full_sample().devices[0].name)
    report.write_bytes(oom_report.encode(replace(CAPACITY, device=device)))
    files = [
        saved(tmp_path, "a", summary()),
        publish(tmp_path, own_sample()),
        report,
        preflight(tmp_path, capfd, "run.json", "--gpu-model", "2GB"),
        write(varying_lengths(steps=3).snapshot(), tmp_path / "trace.pickle"),
    ]
    for before in files:
        for after in files:
            code, stdout, stderr = torchmem(before, after, "--json")
            assert (code in {0, 1}, stderr) == (True, ""), (before, after)
            assert len(json.loads(stdout)["parts"]) == 1
            assert code == 0 or before != after


def leaking(steps: int) -> dict[str, Any]:
    """Return the snapshot of a job that keeps 3 MiB from train.py:2 in each step."""
    recorded = RecordedJob()
    recorded.alloc(1 * GIB)
    recorded.trace[-1]["frames"] = [{"filename": "train.py", "line": 1, "name": "build"}]
    for _ in range(steps):
        activation = recorded.alloc(64 << 20)
        recorded.alloc(3 << 20)
        recorded.trace[-1]["frames"] = [{"filename": "train.py", "line": 2, "name": "step"}]
        assert activation is not None
        recorded.free(activation)
    return recorded.snapshot()


@pytest.mark.parametrize("later", [21, 60])
def test_two_snapshots_of_a_process_show_what_grew(
    later: int, tmp_path: Path, torchmem: Callable[..., Page]
) -> None:
    """Only the line that holds more is listed, with its growth, however small it is."""
    first = write(leaking(20), tmp_path / "first.pickle")
    second = write(leaking(later), tmp_path / "second.pickle")
    _, stdout, _ = torchmem(first, second)
    grown = f"+{3 * (later - 20):.2f} MiB".split()
    table = stdout.partition("What changed")[2].splitlines()[1:]

    assert [line.split() for line in table if line] == [[*grown, "allocated", "train.py:2"]]


def test_a_preflight_that_does_not_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], torchmem: Callable[..., Page]
) -> None:
    """Its peak is that of the run with more memory."""
    large = preflight(tmp_path, capfd, "a.json", "--gpu-model", "8GB")
    small = preflight(tmp_path, capfd, "b.json", "--gpu-model", "0.86GB")
    code, stdout, _ = torchmem(large, small, "--json")
    document = json.loads(stdout)
    (part,) = document["parts"]

    assert (code, part["after"]["fits"], part["after"]["ending"]) == (1, False, "oom")
    assert part["before"]["peak_allocated"] == part["after"]["peak_allocated"]
    assert document["notes"] == []


def test_tables_are_compared_by_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], torchmem: Callable[..., Page]
) -> None:
    """Ranks and batch sizes compare by label; those that only one side has are named."""
    flags = "--gpu-model", "80GB", "--world-size", "8", "--matrix"
    before = preflight(tmp_path, capfd, "a.json", *flags, "rank=0,1,2")
    after = preflight(tmp_path, capfd, "b.json", *flags, "rank=1,2,3", leak=8 << 20)
    code, stdout, _ = torchmem(before, after)
    rows = [line.split() for line in stdout.splitlines() if line.startswith("  rank=")]

    assert code == 1
    assert [(row[0], row[-1]) for row in rows] == [("rank=1", "worse"), ("rank=2", "worse")]
    assert stdout.startswith("Regression: of 2 parts, 2 worse. rank=1: peak allocated")
    assert "  - Only before: rank=0." in stdout
    assert "  - Only after: rank=3." in stdout


def test_the_worst_part_comes_first() -> None:
    """One that does not fit any more is worse than a peak that doubled."""

    def side(peaks: dict[str, int], missing: str = "") -> Side:
        parts = {
            label: Measured(PeakMemory(peak * GIB), fits=label != missing)
            for label, peak in peaks.items()
        }
        return Side("m.json", "a matrix of preflights", "matrix", parts)

    before = side({"batch=8": 1, "batch=16": 2, "batch=32": 3})
    found = compare(before, side({"batch=8": 1, "batch=16": 4, "batch=32": 3}, "batch=32"), 0.02)

    assert [(part.label, part.outcome) for part in found.parts] == [
        ("batch=32", "regression"),
        ("batch=16", "regression"),
        ("batch=8", "unchanged"),
    ]


def test_directories_compare_rank_by_rank(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """The newest process of each rank counts, also one that has left only its sample."""
    for name, peak in (("before", 50), ("after", 60)):
        folder = tmp_path / name
        folder.mkdir()
        for rank in range(2):
            process = replace(full_sample().process, rank=rank)
            old = summary(70 * GIB, process=process, timestamp=1.0)
            saved(folder, f"1-{rank}-1", old)
            saved(folder, f"1-{rank}-2", summary(peak * GIB, process=process))
        publish(folder, full_sample(rank=2, pid=4), f"1-4-9{SAMPLE_SUFFIX}")
    code, stdout, _ = torchmem(tmp_path / "before", tmp_path / "after", "--json")
    found = json.loads(stdout)

    assert code == 1
    assert [(part["label"], part["outcome"]) for part in found["parts"]] == [
        ("rank 0", "regression"),
        ("rank 1", "regression"),
        ("rank 2", "unchanged"),
    ]


def test_baselines_are_compared_by_test(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """Two versions of a baseline file compare entry by entry."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, peak in zip(paths, (GIB, 2 * GIB), strict=True):
        entries = {
            name: BaselineEntry(PeakMemory(peak, peak), "t4-16gb", "2.13")
            for name in ("one", "two")
        }
        path.write_text(
            document(entries | {"same": BaselineEntry(PeakMemory(GIB, GIB), "t4-16gb", "2.13")})
        )
    code, stdout, _ = torchmem(*paths)

    assert code == 1
    assert stdout.startswith("Regression: of 3 parts, 2 worse, 1 same. one: peak allocated 2.00")


def test_the_list_has_dead_processes_too(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """One that was killed is summarized from its sample; one with a summary is listed once."""
    dead = replace(own_sample(process=own_process(start_ticks=1, run="dead")), ended=None)
    sample = publish(tmp_path, dead)
    done = replace(own_sample(process=own_process(start_ticks=2, run="done")), ended="exited")
    path = publish(tmp_path, done)
    path.with_name(summary_name(path.name)).write_bytes(encode(summarize(done, "exited")))
    _, stdout, _ = torchmem("--list", "--run-dir", tmp_path)
    rows = {row[2]: row for row in map(str.split, stdout.splitlines()[1:])}

    assert {name: row[4] for name, row in rows.items()} == {"dead": "killed", "done": "exited"}
    assert rows["dead"][-1] == str(sample)
    assert rows["done"][-1].endswith(SUMMARY_SUFFIX)


def test_a_summary_is_read_as_it_was_written() -> None:
    """All fields survive, and the verdict is one or two sentences."""
    found = summarize(full_sample(), "oom")

    assert decode(encode(found)) == found
    assert found.verdict == (
        "It ran out of memory after 10 steps. Fragmentation: enough free memory, but not in one "
        "piece, and more free memory was stranded than before."
    )
    assert found.devices[0].headroom_bytes == 3 * GIB + (2 << 20)


def test_unknown_figures_are_left_out(tmp_path: Path, torchmem: Callable[..., Page]) -> None:
    """A row that neither side knows is absent, and reserved memory counts alone."""
    devices = [(DeviceSummary(0, reserved_peak_bytes=size * GIB),) for size in (4, 5)]
    files = [
        saved(tmp_path, str(number), summary(devices=found)) for number, found in enumerate(devices)
    ]
    code, stdout, _ = torchmem(*files)

    assert code == 1
    assert "peak allocated" not in stdout
    assert "Regression: peak reserved 5.00 GiB instead of 4.00 GiB (+25.0%)" in stdout


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: run `torchmem compare --list`"),
        (b"", "is not a summary, an OOM report"),
        (b"hello", "is not a summary, an OOM report"),
        (b"\x89PNG\r\n\x1a\n", "is a picture, not a summary"),
        (b'{"traceEvents": []}', "is a trace of torch.profiler, not a summary"),
        (b'{"process": 1, "devices": 2, "verdict": 3, "state": 4}', "is not the summary of a run"),
        (b'{"process": 1, "devices": 2, "timestamp": 3}', "is not a valid sample of a process"),
        (b'{"process": 1, "device": 2, "oom": 3}', "is not an OOM report"),
        (b'{"phantom": true, "gpu_model": 1, "command": 2', "is cut off"),
        (b'{"phantom": true, "gpu_model": 1, "command": 2}', "is not a document of schema 1"),
        (b'{"schema": 9, "entries": {"torch": 1}}', "is not a baseline of schema 1"),
    ],
)
def test_a_file_that_cannot_be_used(
    content: bytes | None, sentence: str, tmp_path: Path, torchmem: Callable[..., Page]
) -> None:
    """One sentence says what it is and what to do, and the exit code is 2."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    code, stdout, stderr = torchmem(path, saved(tmp_path, "a", summary()))

    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert sentence in stderr


def test_kinds_that_cannot_be_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], torchmem: Callable[..., Page]
) -> None:
    """A table and a single run, or tables without a common part, are one sentence."""
    flags = "--gpu-model", "8GB", "--world-size", "8", "--matrix"
    ranks = [preflight(tmp_path, capfd, f"{rank}.json", *flags, f"rank={rank}") for rank in (0, 1)]
    one = saved(tmp_path, "a", summary())
    idle = saved(tmp_path, "b", summary(devices=()))

    for files, sentence in (
        ((one, ranks[0]), "is a matrix of preflights: compare two of one kind"),
        (tuple(ranks), "have no part in common (rank=0; rank=1)"),
        ((one, idle), "has no peak of GPU memory: name a run that used a GPU"),
        ((one,), "two files are needed, the older one first"),
        ((one, one, "--max-peak-increase", "1GB"), "'1GB' is not a tolerance"),
        (("--list", "--run-dir", tmp_path / "x"), "cannot be read"),
        (("--list", one), "--list takes no files"),
    ):
        code, stdout, stderr = torchmem(*files)
        assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
        assert sentence in stderr


def test_several_runs_in_a_directory(tmp_path: Path) -> None:
    """A directory with two runs is refused, because it is not clear which one is meant."""
    for run in ("a", "b"):
        process = replace(full_sample().process, run=run)
        saved(tmp_path, run, summary(process=process))
    with pytest.raises(Exception, match=r"has summaries of several runs \(a, b\): name one of"):
        read_side(tmp_path)


def test_every_field_of_the_json_is_documented(
    tmp_path: Path, root: Path, torchmem: Callable[..., Page]
) -> None:
    """docs/compare.md has the fields of the document and of a summary."""
    page = (root / "docs" / "compare.md").read_text()
    device = replace(summary().devices[0], component_peaks={"step": GIB})
    files = [saved(tmp_path, "a", summary()), saved(tmp_path, "b", summary(devices=(device,)))]
    found = json.loads(torchmem(*files, "--json")[1])
    written = json.loads(encode(summary()))
    part = found["parts"][0]
    objects = [
        found,
        found["before"],
        part,
        part["before"],
        part["changes"][0],
        written,
        written["devices"][0],
    ]

    assert sorted({name for each in objects for name in each if f"`{name}`" not in page}) == []
