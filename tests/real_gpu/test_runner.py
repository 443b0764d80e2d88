"""The run of `make test-gpu`: time is shared, failures do not end it, and the report says all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from docs.generate import real_gpu as page
from experiments.real_gpu.figures import SECONDS, Figure, Figures, read
from experiments.real_gpu.machine import ROOT, Machine
from experiments.real_gpu.registry import SUBJECTS, TOTAL_SECONDS, Subject
from experiments.real_gpu.report import Report, markdown
from experiments.real_gpu.runner import Result, run

CODE = """
import sys, time
from pathlib import Path
from experiments.real_gpu.figures import Figures
figures, name = Figures(Path(sys.argv[1])), sys.argv[2]
if name == "missing": figures.missing("x", "not here")
if name in ("right", "slow", "raises"): figures.close("x", 100.0, 104.0, relative=0.05)
if name == "wrong": figures.close("x", 100.0, None)
if name == "slow": time.sleep(60)
if name == "raises": raise SystemExit("broken")
"""
MACHINE = Machine("3.12", "2.13", "13.0", "NVIDIA H200", 150 << 30, "580.1")


def ran(names: list[str], seconds: float = 60.0) -> dict[str, Result]:
    """Run CODE in place of subjects of these names, each of the same share."""
    results: dict[str, Result] = {}
    run(
        [Subject(name, name, 1.0) for name in names],
        seconds,
        os.environ | {"PYTHONPATH": str(ROOT)},
        lambda command, _: [sys.executable, "-c", CODE, *command[-2:]],
        lambda result: results.update({result.name: result}),
    )
    return results


def test_a_subject_that_fails_does_not_end_the_run() -> None:
    """Each has its outcome; one that raises keeps its figures, and its last line is the reason."""
    results = ran(["raises", "wrong", "missing", "right"])

    assert {name: result.state for name, result in results.items()} == {
        "raises": "failed",
        "wrong": "failed",
        "missing": "skipped",
        "right": "passed",
    }
    assert (results["raises"].reason, results["raises"].errors) == ("broken", "broken")
    assert results["missing"].reason == "not here"
    assert [figure.right for figure in results["raises"].figures] == [True]


def test_a_subject_that_takes_too_long_is_ended() -> None:
    """It keeps its figures."""
    result = ran(["slow"], seconds=3.0)["slow"]

    assert (result.state, [figure.name for figure in result.figures]) == ("out of time", ["x"])
    assert result.seconds < 30


def test_a_subject_without_time_is_not_begun() -> None:
    """A run of no seconds begins nothing, and says so of each."""
    assert {each.state for each in ran(["right", "wrong"], 0.0).values()} == {"out of time"}


def test_all_subjects_fit_into_nine_minutes_and_exist() -> None:
    """Their shares are the nine minutes, and each that is run is a function of its module."""
    assert TOTAL_SECONDS == 9 * 60
    for subject in SUBJECTS:
        assert bool(subject.module) != bool(subject.left_out)
        source = Path(str(ROOT), "experiments", "real_gpu", f"{subject.module}.py")
        assert subject.left_out or f"def {subject.function}(" in source.read_text()


def test_the_time_left_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A subject knows its time; one that is run by hand has all there is."""
    assert Figures(tmp_path / "figures").seconds_left == float("inf")
    monkeypatch.setenv(SECONDS, "50")
    assert 40 < Figures(tmp_path / "figures").seconds_left <= 50


def test_a_line_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    """A subject that is ended while it writes keeps the figures before that."""
    figures = Figures(tmp_path / "figures")
    figures.add("whole", 1)
    with (tmp_path / "figures").open("a") as file:
        file.write('{"name": "half')

    assert [figure.name for figure in read(tmp_path / "figures")] == ["whole"]


def report() -> Report:
    """Return the report of a GPU on which one of two subjects was not right."""
    figures = [Figure("used", 1 << 30, "bytes", 2 << 30, right=False)]
    return Report(
        MACHINE,
        "2026-01-02",
        {
            "series": Result("series", "failed", 12.0, "", figures),
            "mps": Result("mps", "skipped", 0.1, "no server"),
        },
        {"series": Result("series", "passed", 3.0, "", [Figure("used", 3 << 30, "bytes")])},
    )


def test_the_report_has_the_phantom_beside_the_gpu(tmp_path: Path) -> None:
    """It names card, driver and PyTorch, and is read as it was written."""
    report().save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")

    assert loaded == report()
    assert loaded.bad == ["series"]
    text = markdown(loaded)
    assert "NVIDIA H200, driver 580.1, PyTorch 2.13, CUDA 13.0, Python 3.12; 2026-01-02." in text
    assert "| used | 1,024 MiB | 2,048 MiB | **no** | 3,072 MiB |" in text
    assert "| Processes that share the GPU through MPS | skipped: no server | 0 |" in text


def test_the_page_is_written_only_of_a_real_gpu(tmp_path: Path) -> None:
    """Without a kept run there is no page; a phantom's figures are refused."""
    results = tmp_path / "results.json"
    assert page.rendered(results) == {}
    report().save(results)
    files = page.rendered(results)
    assert files[page.PAGE].startswith("# On a real GPU\n")
    assert files[page.INDEX].count(page.LINE) == 1
    for gpu in (None, "NVIDIA H100 80GB HBM3 (phantom)"):
        Report(Machine("3.12", "2.13", "13.0", gpu), "2026-01-02").save(results)
        with pytest.raises(ValueError, match="is not of a GPU"):
            page.rendered(results)
