"""`torchmem why FILE` knows a file by its content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.publishing import own_sample, publish
from support.reports import CAPACITY
from support.samples import full_sample

from torchmem.cli.main import main
from torchmem.explain import run_summary
from torchmem.explain.oom_report import encode
from torchmem.explain.parts import component_words
from torchmem.explain.run_summary import summarize
from torchmem.sample import sample as samples


def why(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run the command; return its exit code, and what it wrote to stdout and stderr."""
    code = main(["why", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("content", "beginning"),
    [
        (encode(CAPACITY), "The run needed more memory than the GPU has."),
        (run_summary.encode(summarize(full_sample(), "exited")), "Run night, rank "),
        (samples.encode(full_sample()), "Run night, rank "),
    ],
    ids=["report", "summary", "sample"],
)
def test_a_file_is_known_by_its_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, beginning: str
) -> None:
    """Its name does not matter, and `--json` prints one document."""
    path = tmp_path / "file"
    path.write_bytes(content)
    code, out, err = why(capsys, path)

    assert (code, err) == (0, "")
    assert out.startswith(beginning)
    assert isinstance(json.loads(why(capsys, path, "--json")[1]), dict)


def test_a_summary_tells_how_the_run_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the verdict, and each known number of the device, but no unknown one."""
    summary = summarize(full_sample(), "exited")
    (device,) = summary.devices
    path = tmp_path / "file"
    path.write_bytes(run_summary.encode(summary))
    _, out, _ = why(capsys, path)

    assert summary.verdict in " ".join(out.split())
    assert "peak reserved" in out
    assert ("left at the peak" in out) == (device.headroom_bytes is not None)
    assert all(component_words(name) in out for name in device.component_peaks)


def test_the_sample_of_a_running_process_is_that_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a run directory, its sample is explained as `--pid` explains it."""
    path = publish(tmp_path, own_sample())
    _, out, _ = why(capsys, path)

    assert "run night (train.py), rank 0 of 8: running" in out


def test_the_other_files_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be used is one sentence, and the exit code is 2."""
    good, page = tmp_path / "good", tmp_path / "page.html"
    good.write_bytes(encode(CAPACITY))
    page.write_text("<!doctype html>")
    code, out, err = why(capsys, page, good)

    assert (code, err.count("\n")) == (2, 1)
    assert "is an HTML page, not an OOM report" in err
    assert out.lstrip().startswith("The run needed more memory than the GPU has.")


def test_the_output_of_the_command_is_no_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON that `torchmem why` has printed is known, and the error says what to name instead."""
    publish(tmp_path / "run", own_sample())
    report, path = tmp_path / "report", tmp_path / "printed.json"
    report.write_bytes(encode(CAPACITY))
    for arguments, noun in (
        ((report,), "OOM report"),
        (("--run-dir", tmp_path / "run"), "process"),
    ):
        path.write_text(why(capsys, *arguments, "--json")[1])
        code, _, err = why(capsys, path)
        assert code == 2
        assert "is the JSON output of `torchmem why --json`, not an OOM report, " in err
        assert f"name the {noun} from which it was made" in err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--leaks",), "look into a memory snapshot"),
        (("--rank", "3"), "name files, or choose with"),
        (("--top", "0"), "--top must be at least 1"),
        (("--exporter", "http://127.0.0.1:1"), "an exporter shows no files"),
    ],
)
def test_flags_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str
) -> None:
    """A flag that has no meaning for the file is refused, never ignored."""
    path = tmp_path / "file"
    path.write_bytes(encode(CAPACITY))
    code, out, err = why(capsys, path, *flags)

    assert (code, out) == (2, "")
    assert sentence in err


def test_an_exporter_has_its_own_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    """Thresholds that would have no effect are refused before the exporter is asked."""
    code, out, err = why(capsys, "--exporter", "http://127.0.0.1:1", "--thresholds", "mine.yml")

    assert (code, out) == (2, "")
    assert "an exporter has thresholds of its own" in err
