"""`torchmem oom` as a process: its words for every kind of OOM, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.reports import BY_NAME, CAPACITY, LIMIT, STRANDED

from torchmem.allocator.oom_report import OomReport, encode
from torchmem.sample.run_directory import MAX_REPORT_BYTES, REPORT_SUFFIX

GOLDEN = Path(__file__).parent / "golden"
Put = Callable[..., Path]


def oom(*arguments: str | Path, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "oom", *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "TZ": "UTC", "PYTHONIOENCODING": encoding},
        capture_output=True, encoding=encoding, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Writes a report into the run directory, as the process `pid` did at Unix time `written`."""

    def put_one(report: OomReport, pid: int = 1, written: float = 1.0) -> Path:
        path = tmp_path / f"1-{pid}-3-1{REPORT_SUFFIX}"
        path.write_bytes(encode(report))
        os.utime(path, (written, written))
        return path

    return put_one


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_words_for_each_kind(tmp_path: Path, name: str) -> None:
    """The page is the one on file, and fits 100 columns."""
    path = tmp_path / "report"
    path.write_bytes(encode(BY_NAME[name]))
    done = oom(path)
    shown = done.stdout.replace(str(path), "FILE")
    golden = GOLDEN / f"{name}.txt"
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(shown)

    assert (0, "") == (done.returncode, done.stderr)
    assert golden.read_text() == shown
    assert [line for line in shown.splitlines() if len(line) > 100] == []


def test_without_a_file_it_is_the_newest(tmp_path: Path, put: Put) -> None:
    """The report written last is shown, whatever its process."""
    put(CAPACITY, pid=9, written=1.0)
    newest = put(LIMIT, pid=2, written=2.0)

    assert oom("--run-dir", tmp_path).stdout == oom(newest).stdout


def test_the_list_is_newest_first_and_leaves_out_junk(tmp_path: Path, put: Put) -> None:
    """`--list` has one row for each sound report; other files of strangers are passed over."""
    put(CAPACITY, pid=9, written=1.0)
    put(STRANDED, pid=2, written=2.0)
    (tmp_path / f"1-5-3-1{REPORT_SUFFIX}").write_text("junk")
    os.mkfifo(tmp_path / f"1-6-3-1{REPORT_SUFFIX}")
    (tmp_path / f"evil\n{REPORT_SUFFIX}").write_bytes(encode(LIMIT))
    shown = oom("--list", "--run-dir", tmp_path).stdout.splitlines()

    assert ["fragmentation (stranded)", "capacity"] == [row.split("  ")[-1] for row in shown[::2]]


def test_json_is_the_report_itself(tmp_path: Path, put: Put) -> None:
    """`--json` gives what the SDK wrote, one line for each report."""
    path = put(STRANDED)

    assert json.loads(path.read_bytes()) == json.loads(oom("--json", path).stdout)
    assert 1 == len(oom("--json", "--list", "--run-dir", tmp_path).stdout.splitlines())


def test_a_terminal_that_draws_no_bars_still_gets_the_words(put: Put) -> None:
    """Under a narrow character set the page comes without an error."""
    done = oom(put(STRANDED), encoding="latin-1")

    assert (0, "") == (done.returncode, done.stderr)
    assert "expandable_segments:True" in done.stdout


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: `torchmem oom --list` shows the reports there are."),
        (b"", "is not an OOM report: it holds no JSON."),
        (b'{"schema": 1, "process": 5}', "is not a sound OOM report"),
        (b'{"schema": 9}', "was written by a newer torchmem: run pip install --upgrade torchmem."),
        (b" " * (MAX_REPORT_BYTES + 1), f"is larger than {MAX_REPORT_BYTES} bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    """The sentence names the file and the reason, and the exit code is 2."""
    path = tmp_path / "report"
    if content is not None:
        path.write_bytes(content)
    done = oom(path)

    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert f"{path} " in done.stderr
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("directory", "sentence"),
    [(".", "no OOM report in"), ("missing", "name another with --run-dir")],
)
def test_no_report_says_where_it_looked(tmp_path: Path, directory: str, sentence: str) -> None:
    """An empty or missing run directory is named, with what to do."""
    done = oom("--run-dir", tmp_path / directory)

    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert sentence in done.stderr
    assert str(tmp_path) in done.stderr
