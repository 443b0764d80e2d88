"""`torchmem whatif` as a process: its page, JSON, and one sentence per error."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.recordings import RecordedJob, varying_lengths, write
from support.whatif_results import CHANGE, KEEP, MID_RUN, NONE

from torchmem.allocator.sizes import MIB
from torchmem.commands.whatif import add_arguments, run
from torchmem.phantom.gpus import CATALOG
from torchmem.whatif.page import Progress, page
from torchmem.whatif.result import WhatIf, document

GOLDEN = Path(__file__).parent / "golden"
BY_NAME = {"change": CHANGE, "keep": KEEP, "none": NONE, "mid_run": MID_RUN}


def whatif(*arguments: str | Path, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "whatif", *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": encoding, "COLUMNS": "100"},
        capture_output=True,
        encoding=encoding,
        timeout=120,
        check=False,
    )


def check_golden(name: str, shown: str) -> None:
    golden = GOLDEN / name
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(shown)
    assert golden.read_text() == shown


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a job with varying sizes that fits on a GPU of 1 GiB with retries."""
    return write(
        varying_lengths(steps=30).snapshot(), tmp_path_factory.mktemp("snapshot") / "rank0.pickle"
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_the_page_of_each_decision(name: str) -> None:
    """The page equals the golden file, and fits in 100 columns."""
    shown = page(BY_NAME[name])

    check_golden(f"{name}.txt", shown)
    assert [line for line in shown.splitlines() if len(line) > 100] == []


def test_the_page_of_a_real_replay(snapshot: Path) -> None:
    """The page of a recorded job equals the golden file, with exit code 0."""
    done = whatif(snapshot, "--gpu-model", "1.5GiB")

    assert (done.returncode, done.stderr) == (0, "")
    check_golden("replay.txt", done.stdout)


def test_the_json_of_a_real_replay(snapshot: Path) -> None:
    """The JSON equals the golden file; the columns of each timeline have equal lengths."""
    done = whatif(snapshot, "--gpu-model", "1.5GiB", "--json")
    answer = json.loads(done.stdout)
    for outcome in answer["outcomes"]:
        timeline = outcome.pop("timeline")
        assert timeline.keys() == {"event", "reserved", "allocated", "stranded"}
        assert len({len(column) for column in timeline.values()}) == 1

    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    check_golden("replay.json", json.dumps(answer, indent=1) + "\n")


@pytest.mark.parametrize("result", BY_NAME.values(), ids=BY_NAME)
def test_the_json_has_what_the_page_shows(result: WhatIf) -> None:
    """The JSON includes derived values: share, trusted, and sufficient."""
    answer = json.loads(document(result))

    assert (1, result.name) == (answer["schema"], answer["name"])
    assert result.verdict.line == answer["verdict"]["line"]
    assert result.fidelity.share == answer["fidelity"]["share"]
    assert result.fidelity.trusted == answer["fidelity"]["trusted"]
    for outcome, shown in zip(result.outcomes, answer["outcomes"], strict=True):
        if outcome.refused is not None:
            assert {"name": outcome.name, "conf": outcome.conf, "refused": outcome.refused} == shown
        else:
            assert (outcome.sufficient, outcome.retries) == (shown["sufficient"], shown["retries"])


def test_given_settings_replace_the_usual_ones(snapshot: Path) -> None:
    """Each `--setting` is one row after that of the recording."""
    mine = "max_split_size_mb:333", "expandable_segments:True,roundup_power2_divisions:[256:1,>:4]"
    done = whatif(snapshot, "--json", "--setting", mine[0], "--setting", mine[1])

    assert ["", *mine] == [outcome["conf"] for outcome in json.loads(done.stdout)["outcomes"]]


def test_several_snapshots_are_answered_in_order(snapshot: Path, tmp_path: Path) -> None:
    """An unusable file is one sentence on stderr and exit code 2; the others are answered."""
    missing = tmp_path / "missing.pickle"
    done = whatif(snapshot, missing, snapshot, "--json")

    assert (done.returncode, len(done.stdout.splitlines())) == (2, 2)
    assert f"torchmem: {missing} does not exist: name a file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_device_is_chosen(tmp_path: Path) -> None:
    """With `--gpu`, only that GPU is answered; otherwise all that have a trace."""
    jobs = [RecordedJob(device=0), RecordedJob(device=1)]
    for job in jobs:
        job.alloc(5 * MIB)
    both = jobs[1].snapshot() | {
        "device_traces": [job.trace for job in jobs],
        "segments": [segment for job in jobs for segment in job.segments()],
    }
    path = write(both, tmp_path / "node.pickle")
    devices = [
        [
            json.loads(line)["device"]
            for line in whatif(path, "--json", *arguments).stdout.splitlines()
        ]
        for arguments in ((), ("--gpu", "1"))
    ]
    refused = whatif(path, "--gpu", "7")

    assert devices == [[0, 1], [1]]
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        f"{path} has no allocation trace of cuda:7: pass --gpu with one of 0, 1." in refused.stderr
    )


def test_no_recommendation_without_fidelity(snapshot: Path, tmp_path: Path) -> None:
    """A trace that is not reproduced gets a reason, and exit code 1."""
    content = varying_lengths(steps=6).snapshot()
    for entry in content["device_traces"][0]:
        if entry["action"] in {"alloc", "free_requested", "free_completed"}:
            entry["addr"] ^= 1 << 40
    done = whatif(write(content, tmp_path / "odd.pickle"))

    assert (done.returncode, done.stderr) == (1, "")
    assert "No recommendation" in done.stdout
    assert "ALLOC_CONF" not in done.stdout


def test_the_gpus_of_a_preflight_are_known(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--gpu-model` takes the names of `torchmem preflight`, with the same memory and context."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    obtainable = []
    for gpu in CATALOG[::7]:
        flags = ["--gpu-model", gpu.name, "--json", "--setting", "expandable_segments:True"]
        run(parser.parse_args([str(snapshot), *flags]))
        obtainable.append(json.loads(capsys.readouterr().out)["gpu_bytes"])

    assert [gpu.memory_bytes - gpu.context_bytes for gpu in CATALOG[::7]] == obtainable


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpu-model", "lots"), "--gpu-model: 'lots' is not a known GPU: the closest are"),
        (("--gpu-model", "0.5GiB"), "has no memory left besides a CUDA context of 512.00 MiB"),
        (
            ("--setting", "expandable_segments=True"),
            "--setting: 'expandable_segments=True' is not a list of key:value",
        ),
        (
            ("--setting", "max_split_size_mb:many"),
            "--setting: max_split_size_mb must be a whole number, 20 or more.",
        ),
    ],
)
def test_an_invalid_flag_is_one_sentence(
    snapshot: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    """It is reported before anything is replayed, and the exit code is 2."""
    done = whatif(snapshot, *arguments)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert sentence in done.stderr


def test_a_terminal_without_unicode_gets_the_page(snapshot: Path) -> None:
    """With the ASCII character set, the page is printed without an error."""
    done = whatif(snapshot, encoding="ascii")

    assert (done.returncode, done.stderr) == (0, "")


class Terminal(io.StringIO):
    """A stream that is a terminal, or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(("seconds", "drawn"), [(5.0, True), (0.5, False)])
def test_progress_appears_on_a_terminal_after_a_second(seconds: float, drawn: bool) -> None:
    """On a terminal, a bar appears after a second, and is erased at the end."""
    stream, now = Terminal(is_terminal=True), [0.0]
    with Progress("replaying rank0.pickle", stream, lambda: now[0]) as progress:
        now[0] = seconds
        progress(1, 2)
        shown = stream.getvalue()
    assert drawn == ("replaying rank0.pickle [===============               ]  50%" in shown)
    assert stream.getvalue().split("\r")[-1].strip() == ""


def test_progress_without_a_terminal_is_a_few_lines() -> None:
    """A line every ten seconds says what is done, how much of it, and how long the rest takes."""
    stream, now = Terminal(is_terminal=False), [0.0]
    with Progress("replaying rank0.pickle", stream, lambda: now[0]) as progress:
        for tenth in range(1, 360):
            now[0] = tenth / 10
            progress(tenth, 400)

    assert stream.getvalue().splitlines() == [
        "torchmem: replaying rank0.pickle: 25% after 10 s, about 30 s left",
        "torchmem: replaying rank0.pickle: 50% after 20 s, about 20 s left",
        "torchmem: replaying rank0.pickle: 75% after 30 s, about 10 s left",
    ]
