"""The demo's flags, its start and end, and its screen."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.publishing import publish
from support.reports import CAPACITY
from support.stubborn_rank import stubborn_rank
from support.waiting import until

from torchmem.cli.main import command_line, main
from torchmem.demo.ending import explained, next_steps
from torchmem.demo.ranks import DemoPlan, RankProcesses
from torchmem.demo.screen import show
from torchmem.explain.headline import headline
from torchmem.explain.oom_report import encode
from torchmem.explain.remedies import remedies
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.scenarios import SCENARIOS

DEMO = [sys.executable, "-m", "torchmem.cli", "demo", "--listen", "127.0.0.1:0"]


def test_a_demo_shorter_than_a_step_ends(tmp_path: Path) -> None:
    """A demo whose time is over while its ranks start ends without an error and without a file."""
    done = subprocess.run(
        [*DEMO, "--ranks", "2", "--duration", "0.01"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_repeated_interrupts(tmp_path: Path) -> None:
    """Repeated Ctrl-C, which the starting ranks receive too, leaves no traceback and no file."""
    with subprocess.Popen(
        [*DEMO, "--ranks", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as demo:
        assert demo.stdout is not None
        demo.stdout.readline()
        time.sleep(0.5)  # by now the processes of the ranks exist and import modules
        while demo.poll() is None:
            os.killpg(demo.pid, signal.SIGINT)
            time.sleep(0.01)
        _, errors = demo.communicate(timeout=60)

    assert (demo.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_a_closed_terminal_ends_it(kind: str, tmp_path: Path) -> None:
    """A demo whose terminal is closed ends, and leaves no file."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*DEMO, "--ranks", "1"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path), "TERM": kind},
    ) as demo:
        os.close(theirs)
        assert b"in a browser" in os.read(ours, 1000)
        os.close(ours)
        demo.send_signal(signal.SIGHUP)
        _, errors = demo.communicate(timeout=60)

    assert (demo.returncode, errors) == (0, b"")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_scrape_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """When the exporter does not answer, the screen is not updated and the demo goes on.

    It goes on until all ranks have ended, also after its duration.
    """
    alive = iter([True, True, True, False])
    ranks = cast("RankProcesses", SimpleNamespace(alive=lambda: next(alive)))
    show(DemoPlan("fragmentation", 1, 0.001, 0), ranks, "http://127.0.0.1:1")

    assert capsys.readouterr() == ("", "")
    assert not list(alive)


@pytest.mark.parametrize("passing", [0.0, 3600.0], ids=["no time passes", "each step takes hours"])
def test_a_scenario_is_complete_on_a_slow_machine(passing: float) -> None:
    """The rank runs out of memory however long its steps take, and not only within the duration."""
    gpu = SimulatedGpu(SCENARIOS["leak"].gpu_bytes)
    plan, times = DemoPlan("leak", 1, 1.0, 0), count(0.0, passing)
    simulated = plan.simulated(0, DeviceCachingAllocator(gpu), gpu.mem_get_info()[0])

    with pytest.raises(OutOfMemoryError):
        list(plan.train(simulated, lambda: next(times)))


def test_a_training_without_an_error_ends() -> None:
    """A scenario in which nothing fails ends after its steps, once the duration is over."""
    gpu = SimulatedGpu(SCENARIOS["healthy-slack"].gpu_bytes)
    plan, times = DemoPlan("healthy-slack", 1, 1.0, 0), count(0.0, 3600.0)
    simulated = plan.simulated(0, DeviceCachingAllocator(gpu), gpu.mem_get_info()[0])

    assert list(plan.train(simulated, lambda: next(times))).count("step") == plan.steps + 1


def test_ranks_that_ignore_sigterm_share_one_grace_period(tmp_path: Path) -> None:
    """All ranks are killed after one grace period, not one after the other."""
    ranks = RankProcesses(DemoPlan("fragmentation", 3, 1, 0), tmp_path, stubborn_rank)
    ranks.start()
    until(lambda: len(ranks.last_lines()) == 3)
    started = time.monotonic()
    ranks.close(grace_seconds=3)

    assert 3 <= time.monotonic() - started < 3 * 3
    assert not ranks.alive()


@pytest.mark.parametrize("columns", [70, 160])
def test_the_list_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--list` describes each scenario with its number and source, in the width of the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code = main(["demo", "--list"])
    output = capsys.readouterr().out
    words = re.findall(r"[^\s│]+", output)

    assert code == 0
    assert columns == max(len(line) for line in output.splitlines())
    assert "simulated" in words
    for scenario in SCENARIOS.values():
        assert scenario.name in words
        assert set(f"{scenario.summary} {scenario.reproduces}".split()) <= set(words)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scenario", "fragmentaton"], "did you mean 'fragmentation'"),
        (["--ranks", "0"], "--ranks"),
        (["--listen", "nowhere"], "HOST:PORT"),
    ],
)
def test_bad_flags_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong flag is one sentence that says what to do, with exit code 2."""
    assert main(["demo", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--scenario", "x"], "make demo ARGS='--list'"),
        (["--ranks", "0"], "make demo ARGS='--ranks 4'"),
        (["--duration", "-1"], "make demo ARGS='--duration 300'"),
    ],
)
def test_make_demo_names_its_own_lines(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started by make, the demo says how to pass the flag through make."""
    assert main(["demo", "--by-make", *arguments]) == 2
    assert f"`{line}`" in capsys.readouterr().err


def test_make_demo_says_that_it_is_make(root: Path) -> None:
    """The Makefile starts the demo with the flag, and its help has the number of GPUs."""
    line = ["make", "--dry-run", "demo", "VENV=.venv", "ARGS=--ranks 2"]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    described = subprocess.run(
        ["make", "help"], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    (demo,) = (text for text in described.stdout.splitlines() if text.startswith("make demo"))

    assert "torchmem demo --by-make --ranks 2" in done.stdout
    assert "four GPUs" in demo
    assert "ARGS='--ranks 8'" in demo
    assert demo_ranks([]) == 4


def demo_ranks(arguments: list[str]) -> int:
    """Return the number of ranks with these flags."""
    parsed = command_line(["demo"]).parse_args(["demo", *arguments])
    return int(parsed.ranks)


@pytest.mark.parametrize("has_oom", [True, False])
def test_what_to_do_after_the_end(tmp_path: Path, has_oom: bool) -> None:
    """The last lines name the screen, the page, and after an OOM the command that explains it.

    The commands exist.
    """
    if has_oom:
        (tmp_path / "1000").mkdir()
        (tmp_path / "1000" / f"1-2-1{REPORT_SUFFIX}").touch()
    lines = next_steps("http://127.0.0.1:9847", tmp_path)

    assert any(line.endswith("top --exporter http://127.0.0.1:9847") for line in lines)
    assert lines[-1] == "and in a browser: http://127.0.0.1:9847"
    assert any(f"why --run-dir {tmp_path}" in line for line in lines) is has_oom
    for line in lines:
        if line.startswith("  "):
            _, *words = line.split()
            command_line(words[:1]).parse_args(words)


def test_without_a_terminal_the_demo_ends_with_the_verdict(tmp_path: Path) -> None:
    """Each rank that ran out of memory is explained, the first one first; without one, nothing."""
    publish(tmp_path, encode(CAPACITY), f"1-2-3-1{REPORT_SUFFIX}")
    lines = list(explained(tmp_path))

    assert lines[0].startswith(f"rank {CAPACITY.process.rank}: ")
    assert headline(CAPACITY)[:40] in lines[0]
    assert remedies(CAPACITY)[0].text[:40] in "".join(lines)
    assert list(explained(tmp_path / "empty")) == []
