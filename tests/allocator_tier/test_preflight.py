"""`torchmem preflight` on PyTorch's real allocator: its predictions, endings and cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.phantom import torch_server
from support.waiting import until

from torchmem.allocator.sizes import MIB
from torchmem.phantom.environment import STARTUP
from torchmem.phantom.gpus import parse_gpu_model
from torchmem.preflight.plan import ChildConfig, RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.run import HOOK, run
from torchmem.trace import read
from torchmem.whatif.engine import what_if

pytestmark = pytest.mark.allocator

GPU = "1.2GB"
SCRIPT = """
import argparse
import random

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--fail-at", type=int)
arguments = parser.parse_args()
lengths = random.Random(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(1, arguments.steps + 1):
    x = torch.zeros(arguments.batch * lengths.randrange(64, 1024), 1024, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del x
    print("reserved", torch.cuda.max_memory_reserved(), flush=True)
    if step == arguments.fail_at:
        raise KeyError("of the script")
"""
STEPS = 6
SETTINGS = ("expandable_segments:True", "max_split_size_mb:64")
GPUS = ("0.85GB", "1.1GB", "3GB")


PYTHON = (sys.executable, "-W", "ignore")
"""Where a test needs no process of its own, `torch_server().python()` takes much less time."""


def command(
    script: Path,
    *flags: str,
    arguments: tuple[str, ...] = (),
    python: tuple[str, ...] = PYTHON,
) -> list[str]:
    """Return a preflight of the script with these flags and arguments of the script."""
    preflight = [
        sys.executable,
        "-m",
        "torchmem.cli",
        "preflight",
        "--beside-gpu",
        "--gpu-model",
        GPU,
        *flags,
    ]
    return [*preflight, "--", *python, str(script), *arguments]


@dataclass(frozen=True)
class Place:
    """A script with its own run directory and folder for scratch files."""

    folder: Path

    @property
    def script(self) -> Path:
        return self.folder / "train.py"

    def environment(self) -> dict[str, str]:
        own = {
            "TORCHMEM_RUN_DIR": str(self.folder / "run"),
            "TORCHMEM_TEXTFILE": str(self.folder / "metrics.prom"),
            "TMPDIR": str(self.folder / "scratch"),
        }
        return {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | own

    def preflight(
        self,
        *flags: str,
        arguments: tuple[str, ...] = (),
        python: tuple[str, ...] = PYTHON,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command and check that it leaves no scratch file."""
        done = subprocess.run(
            command(self.script, *flags, arguments=arguments, python=python),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert not self.scratch_files()
        return done

    def scratch_files(self) -> list[Path]:
        return list((self.folder / "scratch").glob("*preflight*"))

    def run(self, conf: str | None = None, memory: str = GPU) -> RunResult:
        """Run the script without the command."""
        command = (*torch_server().python(), str(self.script))
        plan = RunPlan(command, parse_gpu_model(memory), steps=STEPS, alloc_conf=conf)
        return run(plan, Path(mkdtemp(dir=self.folder)), lambda _: None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return the place of all tests."""
    folder = tmp_path_factory.mktemp("preflight")
    (folder / "scratch").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return Place(folder)


@pytest.fixture(scope="module")
def done(place: Place) -> subprocess.CompletedProcess[str]:
    """Run a preflight that fits, with settings and GPUs to compare, once for all tests."""
    settings = [word for conf in SETTINGS for word in ("--setting", conf)]
    kept = str(place.folder / "trace.pickle")
    return place.preflight(
        "--steps",
        str(STEPS),
        *settings,
        "--gpu-models",
        ",".join(GPUS),
        "--snapshot",
        kept,
        "--json",
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert len(done.stdout.splitlines()) == 1, done.stderr[-2000:]
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def test_the_figures_equal_those_of_pytorch(done: subprocess.CompletedProcess[str]) -> None:
    """Peak reserved equals what the script reads at each step; it stops after the steps."""
    report = document(done)
    (device,) = report["outcome"]["devices"]
    peaks = [
        int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("reserved")
    ]
    highest = list(accumulate(device["steps"]["peak_reserved"], max))

    assert (
        done.returncode,
        report["verdict"]["fits"],
        report["outcome"]["steps"],
    ) == (0, True, STEPS)
    assert STEPS - 1 <= len(peaks) <= STEPS
    assert peaks == highest[: len(peaks)]
    assert device["peak_reserved"] == highest[-1]


def test_the_trace_replays_in_full(done: subprocess.CompletedProcess[str], place: Place) -> None:
    """Every allocation gets its address, in the preflight's replay and in one of the kept trace."""
    (recording,) = read(place.folder / "trace.pickle")

    assert document(done)["comparison"] is not None
    assert document(done)["comparison"]["settings"]["fidelity"]["share"] == 1.0
    assert what_if(recording, settings=()).fidelity.share == 1.0


def test_a_replayed_setting_equals_a_run_with_it(
    done: subprocess.CompletedProcess[str], place: Place
) -> None:
    """Replayed peaks and retries equal those of a run with that setting, to the byte."""
    for replayed in document(done)["comparison"]["settings"]["outcomes"][-len(SETTINGS) :]:
        (device,) = place.run(conf=replayed["conf"]).devices
        for name in ("peak_reserved", "peak_allocated", "retries"):
            assert (replayed["conf"], name, getattr(device, name)) == (
                replayed["conf"],
                name,
                replayed[name],
            )


def test_a_replayed_gpu_equals_a_run_on_it(
    done: subprocess.CompletedProcess[str], place: Place
) -> None:
    """A GPU that fits is replayed to the byte, and one that does not fit is report out."""
    rows = {row["gpu_model"]["name"]: row for row in document(done)["comparison"]["gpu_models"]}
    assert list(rows) == list(GPUS)
    assert {row["fits"] for row in rows.values()} == {True, False}

    for name, row in rows.items():
        result = place.run(memory=name)
        (device,) = result.devices
        assert (name, row["fits"]) == (name, result.ended != "oom")
        if row["fits"]:
            assert (row["peak_reserved"], row["retries"]) == (device.peak_reserved, device.retries)


@pytest.mark.usefixtures("done")
def test_the_run_is_not_published(place: Place) -> None:
    """A phantom rank does not appear among the ranks of the node."""
    exporter = [sys.executable, "-m", "torchmem.cli", "exporter", "--once"]
    text = subprocess.run(
        exporter, env=place.environment(), capture_output=True, text=True, check=True
    ).stdout
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]

    assert samples
    assert [sample for sample in samples if "run" in sample.labels] == []
    assert not (place.folder / "run").exists()
    assert not (place.folder / "metrics.prom").exists()


def test_a_script_that_does_not_fit(place: Place) -> None:
    """PyTorch's error is passed through, and a run on a larger phantom shows the need."""
    done = place.preflight(
        *("--steps", "4", "--setting", "", "--json"),
        arguments=("--batch", "64"),
        python=torch_server().python(),
    )
    report = document(done)

    assert (done.returncode, report["verdict"]["fits"]) == (1, False)
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "torchmem why" not in done.stderr, "its report is removed with the phantom's folder"
    assert report["oom"]["oom"]["requested_bytes"] > MIB
    assert report["need"]["ended"] == "steps"
    assert report["need"]["devices"][0]["peak_reserved"] > 10**9


def test_the_largest_batch_is_found(place: Place) -> None:
    """The search ends with a value that fits and the next one, which does not."""
    flags = ("--steps", "2", "--find-batch", "batch=7..9", "--json")
    report = document(place.preflight(*flags, python=torch_server().python()))
    tries = {run["value"]: run["fits"] for run in report["tries"]}  # the longest run of each

    assert (tries[report["best"]], tries[report["best"] + 1]) == (True, False)
    assert report["best_steps"] == 20


def test_an_error_of_the_script_is_passed_through(place: Place) -> None:
    """Its traceback is unchanged, and the exit code is that without a verdict."""
    done = place.preflight(arguments=("--fail-at", "2"))
    lines = done.stderr.splitlines(keepends=True)
    scripts = "".join(line for line in lines if not line.startswith("torchmem: "))

    assert done.returncode == 2
    assert f'Traceback (most recent call last):\n  File "{place.script}", line ' in scripts
    assert scripts.endswith("KeyError: 'of the script'\n")
    assert lines[-1].startswith(
        "torchmem: the script ended with exit code 1 after 2 optimizer steps, "
        "so there is no verdict"
    )
    assert "Preflight" not in done.stdout


def test_a_script_without_a_step_has_no_verdict(place: Place) -> None:
    """One sentence says what to do, and the exit code is 2."""
    done = place.preflight(arguments=("--steps", "0"), python=torch_server().python())

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "torchmem: the script ended without an optimizer step and without a call of a module: let "
        "it train or infer, or call session.step()" in done.stderr
    )


INFERENCE = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
with torch.no_grad():
    for rows in (1, 5, 3):
        model(torch.zeros(rows * 1024, 1024, device="cuda"))
"""


def test_inference_has_figures(tmp_path: Path) -> None:
    """Each call of the model has its peak, and the highest is that of the run."""
    script = tmp_path / "infer.py"
    script.write_text(INFERENCE)
    done = subprocess.run(
        command(script, "--json", python=torch_server().python()),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    report = json.loads(done.stdout)
    (device,) = report["outcome"]["devices"]
    peaks = device["steps"]["peak_allocated"]

    assert (done.returncode, report["outcome"]["steps"], report["outcome"]["calls"]) == (0, 0, 3)
    assert device["steps"]["step"] == [1, 2, 3]
    assert (2, max(peaks)) == (device["peak_step"], device["peak_allocated"])
    assert [peaks[0], peaks[2], peaks[1]] == sorted(peaks)


LEAK = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam(model.parameters())
kept = []
while True:
    output = model(torch.zeros(2048, 1024, device="cuda"))
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(output.detach())
"""


def test_a_leak_is_the_headline(tmp_path: Path) -> None:
    """The steps after which the GPU is full are those that a longer run makes, give or take 10%.

    A list of outputs of 8 MiB is the leak.
    """
    script = tmp_path / "leak.py"
    script.write_text(LEAK)
    short, long = (
        subprocess.run(
            command(
                *(script, "--steps", steps, "--gpu-models", GPU, "--json"),
                python=torch_server().python(),
            ),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        for steps in ("10", "500")
    )
    growth = json.loads(short.stdout)["verdict"]["growth"]
    report = json.loads(long.stdout)
    steps = report["outcome"]["steps"]

    assert (short.returncode, long.returncode) == (1, 1)
    assert (growth["kind"], growth["bytes_per_step"]) == ("kept", 8 * MIB)
    assert 10 + growth["steps_left"] == pytest.approx(steps, rel=0.1)
    assert report["verdict"]["sentence"].startswith(
        f"Grows by 8.00 MiB a step, full after {steps} steps: a leak, or data"
    )


def test_another_allocator_is_rejected(place: Place) -> None:
    """Without PyTorch's caching allocator there is one sentence and exit code 2."""
    done = place.preflight("--alloc-conf", "backend:cudaMallocAsync")

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "a preflight measures PyTorch's own caching allocator, which this run does not use"
        in done.stderr
    )


BEGINNING = """
import multiprocessing, os, sys, torch
def train(steps, device="cuda"):
    model = torch.nn.Linear(64, 64).to(device); optimizer = torch.optim.SGD(model.parameters())
    for _ in range(steps):
        model(torch.zeros(4, 64, device=device)).sum().backward()
        optimizer.step(); optimizer.zero_grad()
def train_and_leave(*arguments):
    train(*arguments); sys.exit(9)
def in_a_child(exit_code, *arguments):
    process = multiprocessing.get_context("fork").Process(target=train_and_leave, args=arguments)
    process.start(); process.join(); assert process.exitcode == exit_code
"""
ENDINGS = {
    "exits with os._exit": ("train(3); os._exit(0)", "finished", 3),
    "trains in a forked child": ("in_a_child(9, 3)", "finished", 3),
    "is stopped in a forked child": ("in_a_child(0, 1000)", "steps", STEPS),
    "forks a child that trains on the CPU": (
        f"in_a_child(9, {2 * STEPS}, 'cpu'); train(1000)",
        "steps",
        STEPS,
    ),
    "has closed its streams": (
        "sys.stdout.close(); sys.stderr.close(); train(1000)",
        "steps",
        STEPS,
    ),
    "is killed": ("train(3); os.kill(os.getpid(), 9)", "error", 3),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_endings_of_a_script(tmp_path: Path, name: str) -> None:
    """A script that uses os._exit, forks, or closes its streams is measured like any other."""
    body, ended, steps = ENDINGS[name]
    (tmp_path / "train.py").write_text(f"{BEGINNING}{body}\n")
    (tmp_path / "scratch").mkdir()
    command = (*torch_server().python(), str(tmp_path / "train.py"))
    plan = RunPlan(command, parse_gpu_model(GPU), steps=STEPS)
    result = run(plan, tmp_path / "scratch", print)

    assert (ended, steps) == (result.ended, result.steps)
    assert (ended != "error") == bool(result.devices)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_script_and_cleans_up(place: Place, number: signal.Signals) -> None:
    """SIGTERM or a closed terminal ends the script and removes the scratch folder."""
    with subprocess.Popen(
        command(place.script, "--steps", "1000"),
        env=place.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("reserved")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=600)

    assert (process.returncode, place.scratch_files()) == (130, [])
    assert "torchmem: interrupted" in stderr
    until(lambda: not _running(place.script), pause=0.1)  # a killed process takes a moment to end


def _running(script: Path) -> list[str]:
    """Return the command lines of processes that run the script."""
    lines = [_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if str(script) in line]


def _command_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_a_script_may_call_instrument_before_it_imports_torch(tmp_path: Path) -> None:
    """The script's own `instrument()`, which imports torch, returns the preflight's session."""
    code = """
from torchmem import sdk
session = sdk.instrument()
import torch
print(session is sdk.instrument(), session.lifetime.loop.after_step.__qualname__)
"""
    settings = {"PYTHONPATH": str(STARTUP), "PHANTOM_HOOK": HOOK}
    settings |= ChildConfig(tmp_path, 7).to_environment()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.stdout) == ("", "True StepWatcher.step_called\n")
