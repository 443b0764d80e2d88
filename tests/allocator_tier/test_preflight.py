"""`torchmem preflight` on PyTorch's real allocator: what it foretells is what happens, and nothing is left behind."""

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
from support.waiting import until

from torchmem.allocator.sizes import MIB
from torchmem.phantom.cards import parse_card
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.run import run
from torchmem.recording import read
from torchmem.whatif.engine import what_if

pytestmark = pytest.mark.allocator

CARD = "1.2GB"
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
        raise KeyError("mine alone")
"""
STEPS = 6
SETTINGS = ("expandable_segments:True", "max_split_size_mb:64")
CARDS = ("0.85GB", "1.1GB", "3GB")


def command(script: Path, *flags: str, words: tuple[str, ...] = ()) -> list[str]:
    """The flags of ours, and the words after the script."""
    preflight = [
        sys.executable,
        "-m",
        "torchmem.cli",
        "preflight",
        "--beside-gpu",
        "--card",
        CARD,
        *flags,
    ]
    return [*preflight, "--", *script_alone(script), *words]


def script_alone(script: Path) -> tuple[str, ...]:
    return sys.executable, "-W", "ignore", str(script)


@dataclass(frozen=True)
class Place:
    """A script, a run directory and a folder for scratch files of their own."""

    folder: Path

    @property
    def script(self) -> Path:
        return self.folder / "train.py"

    def environment(self) -> dict[str, str]:
        own = {"TORCHMEM_RUN_DIR": str(self.folder / "run"), "TMPDIR": str(self.folder / "scratch")}
        return {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | own

    def preflight(
        self, *flags: str, words: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run the command; whatever happens, no scratch file of it is left."""
        done = subprocess.run(
            command(self.script, *flags, words=words), env=self.environment(), capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert not self.left()
        return done

    def left(self) -> list[Path]:
        return list((self.folder / "scratch").glob("*preflight*"))

    def really(self, conf: str | None = None, memory: str = CARD) -> RunResult:
        """One run of the script, without the command around it."""
        plan = RunPlan(script_alone(self.script), parse_card(memory), steps=STEPS, alloc_conf=conf)
        return run(plan, Path(mkdtemp(dir=self.folder)), lambda _: None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One for all tests."""
    folder = tmp_path_factory.mktemp("preflight")
    (folder / "scratch").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return Place(folder)


@pytest.fixture(scope="module")
def done(place: Place) -> subprocess.CompletedProcess[str]:
    """A preflight that fits, with settings and cards to compare, run once for all tests."""
    settings = [word for conf in SETTINGS for word in ("--setting", conf)]
    kept = str(place.folder / "trace.pickle")
    return place.preflight(
        "--steps", str(STEPS), *settings, "--cards", ",".join(CARDS), "--snapshot", kept, "--json"
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert 1 == len(done.stdout.splitlines()), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_figures_are_those_that_pytorch_tells(done: subprocess.CompletedProcess[str]) -> None:
    """The most reserved by each step equals what the script itself reads; it is stopped after the steps asked for."""
    found = told(done)
    (device,) = found["outcome"]["devices"]
    peaks = [
        int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("reserved")
    ]
    highest = list(accumulate(device["steps"]["peak_reserved"], max))

    assert (0, True, STEPS) == (
        done.returncode,
        found["verdict"]["fits"],
        found["outcome"]["steps"],
    )
    assert STEPS - 1 <= len(peaks) <= STEPS
    assert peaks == highest[: len(peaks)]
    assert device["peak_reserved"] == highest[-1]


def test_the_trace_replays_in_full(done: subprocess.CompletedProcess[str], place: Place) -> None:
    """Every allocation lands, in the preflight's own replay and in that of the trace it kept."""
    (recording,) = read(place.folder / "trace.pickle")

    assert "replayed" == told(done)["comparison"]["method"]
    assert 1.0 == told(done)["comparison"]["settings"]["fidelity"]["share"]
    assert 1.0 == what_if(recording, settings=()).fidelity.share


def test_a_replayed_setting_is_what_pytorch_does_under_it(
    done: subprocess.CompletedProcess[str], place: Place
) -> None:
    """Peaks and retries that were replayed equal those of a run under that setting, to the byte."""
    for foretold in told(done)["comparison"]["settings"]["outcomes"][-len(SETTINGS) :]:
        (device,) = place.really(conf=foretold["conf"]).devices
        for name in ("peak_reserved", "peak_allocated", "retries"):
            assert (foretold["conf"], name, getattr(device, name)) == (
                foretold["conf"],
                name,
                foretold[name],
            )


def test_a_replayed_card_is_what_happens_on_it(
    done: subprocess.CompletedProcess[str], place: Place
) -> None:
    """A card that fits is foretold to the byte, and one that does not fit is found out."""
    rows = {row["card"]["name"]: row for row in told(done)["comparison"]["cards"]}
    assert list(CARDS) == list(rows)
    assert {True, False} == {row["fits"] for row in rows.values()}

    for name, row in rows.items():
        outcome = place.really(memory=name)
        (device,) = outcome.devices
        assert (name, row["fits"]) == (name, outcome.ended != "oom")
        if row["fits"]:
            assert (row["peak_reserved"], row["retries"]) == (device.peak_reserved, device.retries)


@pytest.mark.usefixtures("done")
def test_the_run_is_published_as_a_phantom(place: Place) -> None:
    """The exporter shows it in the label `run`, so that nobody takes it for a real one."""
    exporter = [sys.executable, "-m", "torchmem.exporter", "--once"]
    shown = subprocess.run(
        exporter, env=place.environment(), capture_output=True, text=True, check=True
    ).stdout
    samples = [
        sample for family in text_string_to_metric_families(shown) for sample in family.samples
    ]

    assert {"train (phantom)"} == {
        sample.labels["run"] for sample in samples if "run" in sample.labels
    }


def test_a_script_that_does_not_fit_says_so_itself(place: Place) -> None:
    """PyTorch's own error comes through, the verdict is no, and what it needs is known from a larger phantom."""
    done = place.preflight("--steps", "4", "--setting", "", "--json", words=("--batch", "64"))
    found = told(done)

    assert (1, False) == (done.returncode, found["verdict"]["fits"])
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert found["oom"]["oom"]["requested_bytes"] > MIB
    assert "steps" == found["need"]["ended"]
    assert found["need"]["devices"][0]["peak_reserved"] > 10**9


def test_the_largest_batch_is_found(place: Place) -> None:
    """The search ends between a value that fits and the next, which does not."""
    found = told(place.preflight("--steps", "2", "--find-batch", "batch=9..17", "--json"))
    tries = {one["value"]: one["fits"] for one in found["tries"]}

    assert (True, False) == (tries[found["best"]], tries[found["best"] + 1])


def test_an_error_of_the_script_comes_through_unchanged(place: Place) -> None:
    """Its traceback is what it says without us, and the exit code is the one without a verdict."""
    done = place.preflight(words=("--fail-at", "2"))
    *_, before, ours = done.stderr.rpartition("torchmem: ")[0::2]

    assert 2 == done.returncode
    assert f'Traceback (most recent call last):\n  File "{place.script}", line ' in before
    assert before.endswith("KeyError: 'mine alone'\n")
    assert ours.startswith(
        "the script ended with exit code 1 after 2 optimizer steps, so there is no verdict"
    )
    assert "Preflight" not in done.stdout


def test_a_script_without_a_step_is_refused(place: Place) -> None:
    """One sentence that says what to do, exit code 2."""
    done = place.preflight(words=("--steps", "0"))

    assert (2, "") == (done.returncode, done.stdout)
    assert (
        "torchmem: the script ended without an optimizer step: let it train for one, or call"
        in done.stderr
    )


def test_another_allocator_is_refused(place: Place) -> None:
    """Where PyTorch's caching allocator is not in use there are no figures: one sentence, exit code 2."""
    done = place.preflight("--alloc-conf", "backend:cudaMallocAsync")

    assert (2, "") == (done.returncode, done.stdout)
    assert (
        "torchmem: a preflight watches PyTorch's own caching allocator, which this run does not use"
        in done.stderr
    )


BEGINNING = """
import multiprocessing, os, sys, torch
def train(steps, device="cuda"):
    model = torch.nn.Linear(64, 64).to(device); optimizer = torch.optim.SGD(model.parameters())
    for _ in range(steps):
        model(torch.zeros(4, 64, device=device)).sum().backward(); optimizer.step(); optimizer.zero_grad()
def train_and_leave(*arguments):
    train(*arguments); sys.exit(9)
def in_a_child(exit_code, *arguments):
    process = multiprocessing.get_context("fork").Process(target=train_and_leave, args=arguments)
    process.start(); process.join(); assert process.exitcode == exit_code
"""
ENDINGS = {
    "leaves by os._exit": ("train(3); os._exit(0)", "finished", 3),
    "trains in a forked child": ("in_a_child(9, 3)", "finished", 3),
    "is stopped in a forked child": ("in_a_child(0, 1000)", "steps", STEPS),
    "forks a child that trains on the CPU": (
        "in_a_child(9, 1000, 'cpu'); train(1000)",
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
def test_a_script_ends_in_its_own_way(tmp_path: Path, name: str) -> None:
    """A script that ends past Python's exit, forks, or has no streams is measured like any other, step by step."""
    body, ended, steps = ENDINGS[name]
    (tmp_path / "train.py").write_text(f"{BEGINNING}{body}\n")
    (tmp_path / "scratch").mkdir()
    outcome = run(
        RunPlan(script_alone(tmp_path / "train.py"), parse_card(CARD), steps=STEPS),
        tmp_path / "scratch",
        print,
    )

    assert (ended, steps) == (outcome.ended, outcome.steps)
    assert (ended != "error") == bool(outcome.devices)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ended_from_outside_it_leaves_nothing(place: Place, number: signal.Signals) -> None:
    """SIGTERM, or the end of the terminal, ends the script as well, and the scratch folder is gone."""
    with subprocess.Popen(
        command(place.script, "--steps", "1000"), env=place.environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith("reserved")
        process.send_signal(number)
        _, said = process.communicate(timeout=600)

    assert (130, []) == (process.returncode, place.left())
    assert "torchmem: interrupted" in said
    until(
        lambda: not _running(place.script), pause=0.1
    )  # what has just been killed may take a moment to go


def _running(script: Path) -> list[str]:
    """Processes that run the script."""
    found = [_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in found if str(script) in line]


def _command_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
