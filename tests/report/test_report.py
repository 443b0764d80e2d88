"""`torchmem report` as a process: its text for a rank that is well, and for ranks in danger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support.publishing import own_process, own_sample, publish
from support.samples import full_sample, samples
from support.users import as_user, needs_root

from torchmem.allocator.sizes import GIB
from torchmem.capture.processes import ProcessFilter, find_process
from torchmem.report.text import WIDTH, page
from torchmem.sample.errors import UsageError
from torchmem.sample.sample import Sample

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_700_000_203.0
FULL = full_sample()
(DEVICE,) = FULL.devices


def report(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "report", *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def _changed(**changes: Any) -> Sample:
    """Return the sample with changes of its device."""
    return replace(FULL, devices=(replace(DEVICE, **changes),), settings_ignored={})


assert DEVICE.layout is not None
BY_NAME = {
    "full": FULL,
    "well": _changed(
        last_oom=None,
        counters=replace(DEVICE.counters, ooms={}, alloc_retries=0),
        layout=replace(DEVICE.layout, headroom_bytes=5 * GIB),
    ),
    "fragmented": _changed(layout=replace(DEVICE.layout, headroom_bytes=GIB)),
    "external": _changed(layout=replace(DEVICE.layout, headroom_flush_bytes=GIB)),
    "library": _changed(driver_free_bytes=GIB // 4),
    "asleep": _changed(
        last_oom=None,
        counters=replace(DEVICE.counters, ooms={}, alloc_retries=0),
        driver_free_bytes=70 * GIB,
        layout=replace(DEVICE.layout, headroom_bytes=70 * GIB, headroom_flush_bytes=70 * GIB),
    ),
    "bare": replace(
        FULL,
        devices=(replace(DEVICE, allocator=None, layout=None, last_oom=None, components={}),),
        allocator_settings={},
        settings_ignored={},
        host=None,
        pinned=None,
    ),
}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_text(name: str) -> None:
    """The text is the golden one, and no line but those to type is longer than 80 columns."""
    output, golden = page(BY_NAME[name], NOW), GOLDEN / f"{name}.txt"
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(output)

    assert golden.read_text() == output
    long = [line for line in output.splitlines() if len(line) > WIDTH]
    assert [line for line in long if not line.startswith(" " * 9)] == []


@given(samples)
def test_every_sample_has_a_report(sample: Sample) -> None:
    """Whatever a sample lacks, it can be shown."""
    assert sample.devices == () or page(sample, NOW)


def test_the_rank_of_a_directory(tmp_path: Path) -> None:
    """The command shows the only running rank, with the numbers that it published."""
    publish(tmp_path, own_sample())
    done = report("--run-dir", tmp_path)

    assert (0, "") == (done.returncode, done.stderr)
    assert "run night (train.py), rank 0 of 8: running" in done.stdout
    assert "50.00 GiB allocated, 62.00 GiB reserved" in done.stdout


def test_json(tmp_path: Path) -> None:
    """`--json` has the sample as published, the threats and the advice."""
    sample = own_sample(oom_pending=True)
    publish(tmp_path, sample)
    document = json.loads(report("--json", "--run-dir", tmp_path).stdout)

    assert sample.timestamp == document["sample"]["timestamp"]
    (device,) = document["devices"]
    assert "fragmentation" == device["threats"][0]["cause"]
    assert "model.py:88" in device["threats"][0]["text"]
    assert "expandable_segments" == device["advice"][0]["setting"]


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        (own_sample(), ["--rank", "5"], "matches; running processes: rank 0 of run night"),
        (own_sample(ended="exited"), [], "has ended; select a running process."),
        (own_sample(devices=()), [], "has not used a GPU yet."),
        (
            replace(own_sample(), steps=5),  # type: ignore[arg-type]
            [],
            "is not valid: use the torchmem version of its process.",
        ),
    ],
)
def test_an_error_is_one_sentence(
    tmp_path: Path, content: Sample, arguments: list[str], sentence: str
) -> None:
    """Without a usable sample, one line says why, and the exit code is 2."""
    publish(tmp_path, content)
    done = report("--run-dir", tmp_path, *arguments)

    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert sentence in done.stderr


def test_a_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    """The error names the directory."""
    done = report("--run-dir", tmp_path / "missing")

    assert 2 == done.returncode
    assert "cannot be read" in done.stderr


@needs_root
def test_ranks_of_other_users(shared_dir: Path) -> None:
    """A user sees the own ranks only."""
    publish(shared_dir, own_sample(process=own_process(run="root-run")))

    def look() -> str:
        with pytest.raises(UsageError) as caught:
            find_process(shared_dir, ProcessFilter())
        return str(caught.value)

    assert "running processes: none" in as_user(61001, look)
