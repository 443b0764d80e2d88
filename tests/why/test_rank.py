"""`torchmem why` as a process: its text for a rank that is well, and for ranks in danger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support.publishing import own_process, own_sample, publish
from support.reports import STRANDED
from support.samples import full_sample, samples
from support.users import as_user, needs_root
from support.words import rank_html, rank_text

from torchmem.allocator.sizes import GIB
from torchmem.explain.oom_report import encode
from torchmem.explain.thresholds import THRESHOLDS_VARIABLE
from torchmem.node.ranks import ProcessFilter, find_process
from torchmem.node.words import WIDTH
from torchmem.pages.page import MAX_PAGE_BYTES
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import REPORT_SUFFIX, SAMPLE_SUFFIX, report_name
from torchmem.sample.sample import Sample, Steps

GOLDEN = Path(__file__).parent / "golden" / "rank"
NOW = 1_700_000_203.0
UUID = "GPU-3a7c03e1-5f42-9d08-b3c6-3d41e80f2a93"
FULL = full_sample()
(DEVICE,) = FULL.devices


def report(
    *arguments: str | Path, path: str | Path = "/nowhere", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command; `path` has its nvidia-smi."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "why", *map(str, arguments)],
        env={"PATH": f"{path}:/usr/bin:/bin", "PYTHONIOENCODING": "utf-8", **environment},
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
        growth=None,
        last_oom=None,
        counters=replace(DEVICE.counters, ooms={}, alloc_retries=0),
        layout=replace(DEVICE.layout, headroom_bytes=5 * GIB),
    ),
    "fragmented": _changed(layout=replace(DEVICE.layout, headroom_bytes=GIB)),
    "external": _changed(layout=replace(DEVICE.layout, headroom_flush_bytes=GIB)),
    "library": _changed(driver_free_bytes=GIB // 4),
    "asleep": _changed(
        growth=None,
        last_oom=None,
        counters=replace(DEVICE.counters, ooms={}, alloc_retries=0),
        driver_free_bytes=70 * GIB,
        layout=replace(DEVICE.layout, headroom_bytes=70 * GIB, headroom_flush_bytes=70 * GIB),
    ),
    "uncounted": replace(FULL, steps=Steps()),
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
    """The text is the golden one, and no line but those to type is longer than 88 columns."""
    output, golden = rank_text(BY_NAME[name], NOW), GOLDEN / f"{name}.txt"
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(output)

    assert golden.read_text() == output
    long = [line for line in output.splitlines() if len(line) > WIDTH]
    assert [line for line in long if not line.startswith(" " * 9)] == []


@given(samples)
def test_every_sample_has_a_report(sample: Sample) -> None:
    """Whatever a sample lacks, it can be shown."""
    assert sample.devices == () or rank_text(sample, NOW)


def test_the_rank_of_a_directory(tmp_path: Path) -> None:
    """The command shows the only running rank, with the numbers that it published."""
    publish(tmp_path, own_sample())
    done = report("--run-dir", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert "run night (train.py), rank 0 of 8: running" in done.stdout
    assert "50.00 GiB allocated, 62.00 GiB reserved" in done.stdout


@pytest.mark.parametrize(
    ("listed", "name"), [(f"2, GPU-2\\n3, {UUID}", "GPU 3  "), ("No devices", "cuda:0  ")]
)
def test_the_gpu_has_nvmls_index(tmp_path: Path, listed: str, name: str) -> None:
    """A process's only GPU is GPU 3 for nvidia-smi; without it, it has PyTorch's name."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{listed}\\n'\n")
    command.chmod(0o755)
    publish(tmp_path / "run", own_sample(devices=(replace(DEVICE, uuid=UUID),)))
    done = report("--run-dir", tmp_path / "run", path=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].startswith(name)


def test_json(tmp_path: Path) -> None:
    """`--json` has the numbers, the threats and the advice for each device."""
    sample = own_sample(oom_pending=True)
    publish(tmp_path, sample)
    document = json.loads(report("--json", "--run-dir", tmp_path).stdout)

    (device,) = document["devices"]
    assert sample.timestamp == device["sample_time"]
    assert device["why"]["threats"][0]["cause"] == "fragmentation"
    assert "model.py:88" in device["why"]["threats"][0]["text"]
    assert "expandable_segments:True" in str(device["why"]["advice"][0]["lines"])


def test_a_rank_that_has_ended_is_shown_if_none_is_running(tmp_path: Path) -> None:
    """Its last state stays in the directory, and the first line says that it has ended."""
    publish(tmp_path, own_sample(ended="exited"))
    done = report("--run-dir", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert "run night (train.py), rank 0 of 8: exited" in done.stdout


def test_the_thresholds_of_the_user(tmp_path: Path) -> None:
    """A file given by flag or by environment changes the threats; a wrong one exits with 2."""
    publish(tmp_path / "run", own_sample())
    file = tmp_path / "thresholds.yml"
    file.write_text("stranded_bytes: 70GiB\n")
    where = ("--run-dir", tmp_path / "run")
    by_flag = report(*where, "--thresholds", file)
    by_environment = report(*where, **{THRESHOLDS_VARIABLE: str(file)})

    assert "Fragmentation: " in report(*where).stdout
    assert "Fragmentation: " not in by_flag.stdout
    assert by_environment.stdout.split("Threats")[1] == by_flag.stdout.split("Threats")[1]
    assert "Threats" in by_flag.stdout
    file.write_text("stranded_byte: 1GiB\n")
    wrong = report(*where, "--thresholds", file)
    assert (wrong.returncode, "did you mean 'stranded_bytes'?" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        (own_sample(), ["--rank", "5"], "matches; ranks: rank 0 of run night"),
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

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert sentence in done.stderr


def test_a_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    """The error names the directory."""
    done = report("--run-dir", tmp_path / "missing")

    assert done.returncode == 2
    assert f"{tmp_path / 'missing'} does not exist: start a process with" in done.stderr


@needs_root
def test_ranks_of_other_users(shared_dir: Path) -> None:
    """A user sees the own ranks only."""
    publish(shared_dir, own_sample(process=own_process(run="root-run")))

    def look() -> str:
        with pytest.raises(UsageError) as caught:
            find_process(shared_dir, ProcessFilter())
        return str(caught.value)

    assert "no process of yours runs in" in as_user(61001, look)


def test_the_page(tmp_path: Path) -> None:
    """`--html FILE` writes a page with the same text, and `-` prints the page alone."""
    publish(tmp_path / "run", own_sample())
    where, file = ("--run-dir", tmp_path / "run"), tmp_path / "rank.html"
    done = report(*where, "--html", file)
    content = file.read_text()
    device = json.loads(content.split('id="document">')[1].split("</script>")[0])["devices"][0]

    assert (done.returncode, done.stderr) == (0, f"torchmem: {file} written.\n")
    assert escape(done.stdout) in content
    assert "Enable expandable segments" in str(device["advice"])
    assert "fragmentation" in [threat["cause"] for threat in device["threats"]]
    assert report(*where, "--html", "-").stdout.startswith("<!doctype html>")
    wrong = report(*where, "--html", tmp_path / "rank.txt")
    assert (2, "name a file that ends in .html" in wrong.stderr) == (wrong.returncode, True)


@given(samples)
def test_every_sample_has_a_page(sample: Sample) -> None:
    """Whatever a sample lacks, its page is below the limit."""
    assert len(rank_html(sample, NOW)) < MAX_PAGE_BYTES


def test_a_page_of_many_devices_stays_small() -> None:
    """More devices than a node has are cut, and the page says so."""
    sample = replace(FULL, devices=(DEVICE,) * 64)
    content = rank_html(sample, NOW)

    assert len(content) < MAX_PAGE_BYTES
    assert b"<li>16 of 64 devices are shown</li>" in content


def ended_at(seconds: float, run: str, pid: int) -> Sample:
    """Return the last sample of a process that died of an OOM, started at a time."""
    process = own_process(run=run, pid=pid, start_ticks=1, start_timestamp=seconds)
    return own_sample(process=process, ended="oom")


def write_oom(folder: Path, sample: Sample, seconds: float) -> Path:
    """Publish the OOM report of a process."""
    report = replace(STRANDED, process=sample.process, timestamp=seconds)
    return publish(folder, encode(report), f"1-{sample.process.pid}-1-1{REPORT_SUFFIX}")


def test_the_newest_oom_is_explained(tmp_path: Path) -> None:
    """Without arguments, the newest OOM is explained; a flag chooses the run or the process."""
    older, newer = ended_at(NOW, "aaa", 7), ended_at(NOW + 60, "bbb", 8)
    first = write_oom(tmp_path, older, NOW + 50)
    os.utime(first, (NOW, NOW))
    last = write_oom(tmp_path, newer, NOW + 90)
    publish(tmp_path, older)
    publish(tmp_path, newer)
    where = ("--run-dir", tmp_path)

    assert report(*where).stdout == report(last).stdout
    assert report(*where, "--run", "aaa").stdout == report(first).stdout
    assert report(*where, "--pid", "8").stdout == report(last).stdout


def test_a_process_that_runs_leads_to_its_oom(tmp_path: Path) -> None:
    """The OOM that it caught is a part of its report; that of an earlier process is none."""
    running = own_sample()
    path = publish(tmp_path, running)
    write_oom(tmp_path, ended_at(NOW, "aaa", 7), NOW)
    where = ("--run-dir", tmp_path, "--rank", "0", "--run", "night")
    assert "Verdict: " not in report(*where).stdout
    caught = replace(STRANDED, process=running.process, survived=True)
    path.with_name(report_name(path.name, 1)).write_bytes(encode(caught))
    shown = report(*where).stdout
    assert shown.startswith("run night (train.py), rank 0 of 8: running")
    assert "Verdict: Fragmentation: 14.00 GiB" in shown


def test_a_process_that_left_only_a_report(tmp_path: Path) -> None:
    """Once the sample is gone, the flags still find the OOM."""
    path = write_oom(tmp_path, ended_at(NOW, "night", 7), NOW)

    assert report("--run-dir", tmp_path, "--run", "night").stdout == report(path).stdout


def test_the_rank_that_is_worst_off(tmp_path: Path) -> None:
    """Of several running ranks, the one with a threat and the least memory left is shown."""
    layout = DEVICE.layout
    assert layout is not None
    tight = replace(layout, headroom_bytes=0, headroom_flush_bytes=GIB)
    for rank, shown in ((0, layout), (1, tight), (2, layout)):
        sample = own_sample(
            process=own_process(rank=rank), devices=(replace(DEVICE, layout=shown),)
        )
        publish(tmp_path, sample, f"{rank}-1-1{SAMPLE_SUFFIX}")
    done = report("--run-dir", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Of the 3 running ranks, rank 1 of run night (pid ")
    assert "run night (train.py), rank 1 of 8: running" in done.stdout


def test_nothing_to_explain(tmp_path: Path) -> None:
    """An empty run directory is named, with what to do."""
    done = report("--run-dir", tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"torchmem: the run directory {tmp_path} has no OOM report and no rank: start a process"
    )
