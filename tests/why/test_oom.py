"""`torchmem why` as a process: its text for every kind of OOM, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from support.publishing import user_directory
from support.reports import BY_NAME, CAPACITY, LEAK, LIMIT, STRANDED, reports
from support.users import as_user, needs_root
from support.words import oom_text

from torchmem.explain.oom_report import OomReport, decode, encode
from torchmem.node.reports import load_all
from torchmem.sample.run_directory import MAX_REPORT_BYTES, REPORT_SUFFIX

GOLDEN = Path(__file__).parent / "golden" / "oom"
Put = Callable[..., Path]


def oom(*arguments: str | Path, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """Run the command in UTC."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "why", *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "TZ": "UTC", "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
        timeout=60,
        check=False,
    )


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Return a function that writes a report of process `pid` with the given mtime."""

    def put_report(report: OomReport, pid: int = 1, written: float = 1.0) -> Path:
        path = user_directory(tmp_path) / f"1-{pid}-3-1{REPORT_SUFFIX}"
        path.write_bytes(encode(report))
        os.utime(path, (written, written))
        return path

    return put_report


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_text_for_each_kind(tmp_path: Path, name: str) -> None:
    """The output is the golden one and fits 100 columns."""
    path = tmp_path / "report"
    path.write_bytes(encode(BY_NAME[name]))
    done = oom(path)
    output = done.stdout.replace(str(path), "FILE")
    golden = GOLDEN / f"{name}.txt"
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(output)

    assert (done.returncode, done.stderr) == (0, "")
    assert golden.read_text() == output
    assert [line for line in output.splitlines() if len(line) > 100] == []


@given(reports)
def test_every_report_has_a_page(report: OomReport) -> None:
    """Any report that can be read has a page, without characters that control a terminal."""
    shown = oom_text(decode(encode(report)), Path("report"))

    assert all(line.isprintable() for line in shown.splitlines())


def test_the_default_is_the_newest_report(tmp_path: Path, put: Put) -> None:
    """Without FILE, the report with the newest modification time is shown."""
    put(CAPACITY, pid=9, written=1.0)
    newest = put(LIMIT, pid=2, written=2.0)

    assert oom("--run-dir", tmp_path).stdout == oom(newest).stdout


def test_the_list_is_newest_first_and_skips_junk(tmp_path: Path, put: Put) -> None:
    """`--list` has one entry per valid report and skips everything else in the directory."""
    put(CAPACITY, pid=9, written=1.0)
    put(STRANDED, pid=2, written=2.0)
    folder = user_directory(tmp_path)
    (folder / f"1-5-3-1{REPORT_SUFFIX}").write_text("junk")
    os.mkfifo(folder / f"1-6-3-1{REPORT_SUFFIX}")
    (folder / f"1-7-3-1{REPORT_SUFFIX}").mkdir()
    (folder / f"evil\n{REPORT_SUFFIX}").write_bytes(encode(LIMIT))
    lines = oom("--list", "--run-dir", tmp_path).stdout.splitlines()
    files = [Path(line.strip()).name for line in lines if line.endswith(REPORT_SUFFIX)]

    assert files == [f"1-{pid}-3-1{REPORT_SUFFIX}" for pid in (2, 9)]


def test_json_has_the_verdict_and_the_words(tmp_path: Path, put: Put) -> None:
    """`--json` prints cause and onset, the headline, and what each change would have freed."""
    path = put(LEAK)
    printed = json.loads(oom("--json", path).stdout)
    listed = json.loads(oom("--json", "--list", "--run-dir", tmp_path).stdout)["reports"]

    assert (printed["cause"], printed["onset"]) == ("capacity", "leak")
    assert oom(path).stdout.replace("\n", " ").startswith(f"{printed['headline']}. ")
    assert printed["oom"]["gains"][0]["change"] == "compaction"
    assert [(each["headline"], each["file"]) for each in listed] == [
        (printed["headline"], str(path))
    ]


def test_an_encoding_without_bars(put: Put) -> None:
    """Characters that the encoding of stdout lacks are replaced, without an error."""
    done = oom(put(STRANDED), encoding="latin-1")

    assert (done.returncode, done.stderr) == (0, "")
    assert "expandable_segments:True" in done.stdout


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: run `torchmem why --list` for a list of reports."),
        (b"", "is empty: name an OOM report, a memory snapshot, the summary or sample of a run, "),
        (b"\0hello", "is a binary file of an unknown kind: name an OOM report, "),
        (b'{"schema": 1, "process": 5}', "is not a valid OOM report (timestamp is missing): run "),
        (b'{"schema": 9}', "was written by a newer torchmem: run pip install --upgrade torchmem."),
        (b" " * (MAX_REPORT_BYTES + 1), f"is larger than {MAX_REPORT_BYTES} bytes"),
    ],
)
def test_an_unusable_file_is_one_sentence(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    """The error is one line with the file and the reason, and the exit code is 2."""
    path = tmp_path / ("report" if content == b"\0hello" else "report.oom.json")
    if content is not None:
        path.write_bytes(content)
    done = oom(path)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"{path} " in done.stderr
    assert sentence in done.stderr


@needs_root
def test_reports_of_other_users(shared_dir: Path) -> None:
    """A user finds the own reports in the own directory, root those of all users."""

    def write() -> Path:
        folder = shared_dir / str(os.geteuid())
        folder.mkdir()
        (folder / f"1-2-3-1{REPORT_SUFFIX}").write_bytes(encode(CAPACITY))
        return folder / f"1-2-3-1{REPORT_SUFFIX}"

    def find() -> list[Path]:
        return [path for path, _ in load_all(shared_dir)]

    paths = [as_user(user, write) for user in (61001, 61002)]
    paths[1].parent.chmod(0o755)

    assert [paths[0]] == as_user(61001, find)
    assert set(paths) == set(find())


def test_a_directory_in_place_of_a_report_is_one_sentence(tmp_path: Path) -> None:
    """A directory is refused like any other file that is not a report."""
    done = oom(tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith(
        f"torchmem: {tmp_path} is a directory: pass a run directory with --run-dir, or name an OOM "
    )


@pytest.mark.parametrize("directory", [".", "missing"])
def test_a_directory_without_a_report_is_named(tmp_path: Path, directory: str) -> None:
    """The error names an empty or missing run directory and what to do."""
    done = oom("--list", "--run-dir", tmp_path / directory)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith(f"torchmem: the run directory {tmp_path}")
    assert "a process with " in done.stderr
    assert "another directory with --run-dir" in done.stderr


def test_the_sparkline_of_a_run_is_even_in_steps() -> None:
    """A leak that grows evenly looks so, although its first steps were read more often."""
    rows = oom_text(LEAK).splitlines()
    row = next(row for row in rows if row.startswith("  allocated"))

    assert row.split()[1][:15].count("▄") >= 2
    assert row.split()[1][-1] == "█"
