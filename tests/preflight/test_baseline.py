"""`torchmem preflight --save-baseline` and `--baseline`, with a simulated script."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from support.played_script import PlayedScript

from torchmem.allocator.sizes import MIB
from torchmem.commands.preflight import add_arguments
from torchmem.commands.preflight import run as run_command
from torchmem.compare.peak_memory import SourceLine, Use
from torchmem.phantom.gpus import parse_gpu_model
from torchmem.preflight.baseline import run_name
from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.result import RunResult
from torchmem.sample.errors import UsageError

LINE = SourceLine("train.py", 7, "train", "x = model(x)")


class Peaks:
    """A script whose runs have these peaks in MiB, one after the other, the last one repeated."""

    def __init__(self, *peaks: int) -> None:
        self._peaks = list(peaks)
        self.script = PlayedScript(then=self._then)

    def _then(self, plan: RunPlan, result: RunResult) -> RunResult:
        peak = (self._peaks.pop(0) if len(self._peaks) > 1 else self._peaks[0]) * MIB
        uses = (Use("activations", peak, "layers.*.up", LINE),)
        devices = tuple(
            replace(each, peak_allocated=peak, uses=uses, steps=()) for each in result.devices
        )
        return replace(result, devices=devices, torch_version="2.13.0+cu130")


def preflight(script: PlayedScript, *flags: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shared = ("--beside-gpu", "--gpu-model", "2GB", "--setting", "max_split_size_mb:64")
    arguments = parser.parse_args([*shared, *map(str, flags), "--", "sh", "train.sh"])
    return run_command(arguments, script, count(0.0, 7.25).__next__)


@pytest.fixture
def saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A baseline with a peak of 100 MiB."""
    path = tmp_path / "gpu-memory.json"
    assert preflight(Peaks(100).script, "--save-baseline", path) == 0
    capfd.readouterr()
    return path


def test_the_same_passes(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that needs as much ends with 0, and so does one within the tolerance."""
    assert preflight(Peaks(100).script, "--baseline", saved) == 0
    assert "Baseline: sh train.sh needs as much memory" in capfd.readouterr().out
    assert preflight(Peaks(104).script, "--baseline", saved, "--tolerance", "5%") == 0


def test_more_memory_fails_and_is_named(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that needs more ends with 1; page and comment name component, module and line."""
    page = tmp_path / "comment.md"
    assert preflight(Peaks(150).script, "--baseline", saved, "--markdown", page) == 1
    shown = " ".join(capfd.readouterr().out.split())
    assert "peak allocated 150.00 MiB instead of 100.00 MiB (+50.0%)" in shown
    assert "+50.00 MiB activations in layers.*.up (train.py:7)." in shown
    assert "train.py:7 x = model(x)" in shown
    assert page.read_text().startswith("### GPU memory: 1 need more")


def test_json(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The document has the comparison, with its exit code."""
    assert preflight(Peaks(150).script, "--baseline", saved, "--json") == 1
    against = json.loads(capfd.readouterr().out)["baseline"]
    assert (against["exit_code"], against["compared"][0]["outcome"]) == (1, "more")
    assert against["compared"][0]["largest_growth"].startswith("+50.00 MiB activations")


def test_a_peak_that_varies_is_no_verdict(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If other runs of the same code stay below the limit, it says by how much the peak varies."""
    assert preflight(Peaks(150, 100).script, "--baseline", saved) == 2
    shown = " ".join(capfd.readouterr().out.split())
    assert "varies by 50.00 MiB (50.0%) between 3 runs of the same code" in shown


def test_another_gpu_model_is_not_compared(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A baseline of another GPU model is said to be so, with exit code 2."""
    assert preflight(Peaks(100).script, "--baseline", saved, "--gpu-model", "3GB") == 2
    assert "is of 2GB, and this is 3GB" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tolerance", "2%"), "--tolerance needs a baseline: add --baseline FILE."),
        (("--baseline", "/none.json"), "there is no baseline /none.json"),
        (("--save-baseline", "/none/b.json"), "there is no directory /none: create it first."),
        (("--save-baseline", "b.json", "--find-batch", "batch=1..2"), "do not combine it with"),
    ],
)
def test_wrong_flags(flags: tuple[str, ...], sentence: str) -> None:
    """Wrong flags are one sentence, before anything runs."""
    script = PlayedScript()
    with pytest.raises(UsageError) as caught:
        preflight(script, *flags)
    assert sentence in str(caught.value)
    assert script.plans == []


def test_names_are_the_same_on_all_machines() -> None:
    """The path of the interpreter is left out, and the rank is part of the name."""
    plan = RunPlan(("/venv/bin/python3.11", "train.py"), parse_gpu_model("2GB"))
    assert run_name(plan) == "python train.py"
    assert run_name(replace(plan, placement=Placement(3, 8, 8))) == "python train.py as rank 3 of 8"
