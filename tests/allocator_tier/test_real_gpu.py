"""`make test-gpu` on the phantom: its first subject passes, and what needs a driver is skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from experiments.real_gpu.machine import ROOT
from experiments.real_gpu.report import Report

pytestmark = pytest.mark.allocator

SHOWN = "series"
LEFT_TO_A_DRIVER = ("events", "mps", "vllm")


def test_a_run_on_the_phantom(tmp_path: Path) -> None:
    """The report has an outcome for each subject, with the reason where it is skipped."""
    command = [sys.executable, "-m", "experiments.real_gpu", "--phantom", "--seconds", "300"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--only", SHOWN, *LEFT_TO_A_DRIVER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.load(tmp_path / "report.json")
    assert (report.machine.gpu, report.real) == (None, {})
    states = {name: result.state for name, result in report.phantom.items()}
    assert states == {SHOWN: "passed", **dict.fromkeys(LEFT_TO_A_DRIVER, "skipped")}
    assert all(report.phantom[name].reason for name in LEFT_TO_A_DRIVER)
    assert sum(figure.right is True for figure in report.phantom[SHOWN].figures) >= 10
    assert (tmp_path / "report.md").read_text().startswith("# On a phantom GPU\n")
