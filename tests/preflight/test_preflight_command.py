"""`torchmem preflight`: its words, its JSON, its picture and its exit codes, with a script that is played for it."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree as ET

import pytest
from support.played_script import PlayedScript

from torchmem.allocator.sizes import MIB
from torchmem.preflight.command import add_arguments
from torchmem.preflight.command import run as run_command
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import Ended, RunResult
from torchmem.recording import read
from torchmem.sample.errors import TorchmemError, UsageError

GOLDEN = Path(__file__).parent / "golden"
COMMAND = ("--", "sh", "train.sh")
FILES = 20_000
Preflight = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Preflight:
    """Runs the command with a script that is played; exit code, stdout and stderr."""

    def run_one(
        script: RunFunction, *arguments: str | Path, command: tuple[str, ...] = COMMAND
    ) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        parsed = parser.parse_args(["--beside-gpu", *map(str, arguments), *command])
        try:
            code = run_command(parsed, script)
        except TorchmemError as error:
            code = error.exit_code
            sys.stderr.write(f"torchmem: {error}\n")
        return code, *capfd.readouterr()

    return run_one


def check_golden(name: str, shown: str) -> None:
    golden = GOLDEN / name
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(shown)
    assert golden.read_text() == shown
    assert [line for line in shown.splitlines() if len(line) > 100 and name.endswith(".txt")] == []


def test_the_report_of_a_script_that_fits(run: Preflight) -> None:
    """Verdict, figures, settings and cards are those on file, with exit code 0."""
    code, shown, said = run(PlayedScript(), "--card", "2GB")

    assert (0, "") == (code, said)
    check_golden("fits.txt", shown)


def test_the_report_of_a_script_that_does_not_fit(run: Preflight) -> None:
    """The OOM is explained, the true need is looked for on a larger phantom, and the exit code is 1."""
    script = PlayedScript()
    code, shown, said = run(script, "--card", "0.86GB", "--cards", "0.86GB,1GB,2GB")

    assert (1, "") == (code, said)
    assert [1, 8] == [round(plan.card.memory_bytes / 0.86e9) for plan in script.plans]
    check_golden("does_not_fit.txt", shown)


def test_a_trace_that_the_replay_does_not_repeat_is_run_again(run: Preflight) -> None:
    """Each setting and each card is then a run of its own, and the report says so."""
    script = PlayedScript(odd=True)
    confs = "max_split_size_mb:64", "expandable_segments:True"
    code, shown, _ = run(
        script, "--card", "2GB", "--cards", "1GB,2GB", "--setting", confs[0], "--setting", confs[1]
    )

    assert 0 == code
    assert [None, *confs, None, None] == [plan.alloc_conf for plan in script.plans]
    assert [2, 2, 2, 1, 2] == [round(plan.card.memory_bytes / 1e9) for plan in script.plans]
    check_golden("run_again.txt", shown)


def test_retries_and_growth_are_told(run: Preflight) -> None:
    """A fit with retries is one only just; memory that grows is named, with the steps until the card is full."""
    code, shown, _ = run(
        PlayedScript(leak=5 * MIB), "--card", "1.6GB", "--setting", "expandable_segments:True"
    )

    assert 0 == code
    assert "Fits, but only just, a phantom GPU of 1.6GB" in shown
    assert "; PyTorch had to empty its cache 1 time to find room" in " ".join(shown.split())
    assert re.search(r"  growth per step +5\.\d\d MiB\n", shown)
    assert re.search(r"Memory on GPU 0 grows by 5\.\d\d MiB with each step", shown)


def test_the_json_of_one_run(run: Preflight) -> None:
    """One document, all of it that on file but for timelines; what the script prints goes to stderr."""
    code, shown, said = run(
        PlayedScript(words="epoch 1\n"), "--card", "2GB", "--steps", "8", "--json"
    )
    found = json.loads(shown)
    for outcome in found["comparison"]["settings"]["outcomes"]:
        outcome.pop("timeline", None)

    assert (0, "epoch 1\n", 1) == (code, said, len(shown.splitlines()))
    check_golden("fits.json", json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn(run: Preflight, tmp_path: Path, suffix: str) -> None:
    """It says that it is of a phantom, of which card, and names every setting."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{suffix}"
    code, shown, _ = run(PlayedScript(), "--card", "2GB", "--plot", path, "--json")

    assert 0 == code
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    assert ET.parse(path).getroot().tag.endswith("svg")  # noqa: S314 - drawn by this test
    comments = path.read_text()
    assert "Fits a phantom GPU of 2GB" in comments
    for outcome in json.loads(shown)["comparison"]["settings"]["outcomes"]:
        assert outcome["name"] in comments


def test_the_trace_is_kept_on_demand(run: Preflight, tmp_path: Path) -> None:
    """The snapshot can be read again, and only its owner may; without the flag nothing is left."""
    path = tmp_path / "trace.pickle"
    path.write_text("older, and readable by all")
    run(PlayedScript(), "--card", "2GB", "--snapshot", path)

    assert 0o600 == path.stat().st_mode & 0o777
    assert 1 == len(read(path))
    assert [path] == list(tmp_path.iterdir())


def test_the_largest_batch_is_found(run: Preflight) -> None:
    """The table shows every try; the largest that fits and the one above it were both run."""
    script = PlayedScript()
    code, shown, said = run(script, "--card", "4GB", "--find-batch", "batch-size=1..64")
    tried = {int(plan.command[-1]) for plan in script.plans}
    best = int(re.findall(r"largest that fits is --batch-size (\d+)", shown)[0])

    assert (0, "") == (code, said)
    assert {1, best, best + 1, 64} <= tried
    assert len(tried) == len(script.plans) <= 8
    check_golden("find_batch.txt", shown)


def test_the_search_ends_at_its_bounds(run: Preflight) -> None:
    """Where all fit two runs are enough; where none does one is, and the exit code is 1."""
    small, large = PlayedScript(), PlayedScript()
    fits = run(small, "--card", "80GB", "--find-batch", "batch-size=2..4", "--json")
    misses = run(large, "--card", "1GB", "--find-batch", "batch-size=32..64", "--json")

    assert (0, 4, [2, 4]) == (
        fits[0],
        json.loads(fits[1])["best"],
        [int(plan.command[-1]) for plan in small.plans],
    )
    assert (1, None, [32]) == (
        misses[0],
        json.loads(misses[1])["best"],
        [int(plan.command[-1]) for plan in large.plans],
    )


def test_an_error_within_a_search_ends_it(run: Preflight) -> None:
    """What the script said is shown as it was, and there is no verdict."""
    script = PlayedScript(words="ValueError: mine\n", then=ends("error", exit_code=5))
    code, shown, said = run(script, "--card", "4GB", "--find-batch", "batch-size=1..64")

    assert (2, "") == (code, shown)
    assert said.startswith(
        "ValueError: mine\ntorchmem: the script ended with exit code 5 after 20 optimizer steps"
    )


def test_ranks_are_a_table(run: Preflight) -> None:
    """Each rank is a run with its own place; all are shown."""
    script = PlayedScript(idle_ranks=(1,))
    code, shown, _ = run(script, "--card", "2GB", "--world-size", "1024", "--ranks", "0..1,1023")

    assert 0 == code
    assert [(0, 0), (1, 1), (1023, 7)] == [
        (plan.placement.rank, plan.placement.local_rank) for plan in script.plans if plan.placement
    ]
    assert {8} == {plan.devices for plan in script.plans}
    check_golden("ranks.txt", shown)


def test_a_rank_that_fails_hides_no_other(run: Preflight) -> None:
    """Each of the world sizes has its row and its word; one that does not fit makes the exit code 1."""

    def then(plan: RunPlan, outcome: RunResult) -> RunResult:
        assert plan.placement
        ended: dict[int, Ended] = {8: "error", 64: "oom", 1024: "steps"}
        return replace(outcome, ended=ended[plan.placement.world_size])

    code, shown, _ = run(PlayedScript(then=then), "--card", "2GB", "--world-sizes", "8,64,1024")
    words = [line.split("  ")[-1].strip() for line in shown.splitlines() if re.match(r" +0 ", line)]

    assert 1 == code
    assert ["no verdict", "does not fit", "fits"] == words


def test_several_cards_have_a_column_each(run: Preflight) -> None:
    """The verdict is on the fullest."""

    def then(_: RunPlan, outcome: RunResult) -> RunResult:
        (device,) = outcome.devices
        other = replace(device, device=1, peak_reserved=device.peak_reserved // 2)
        return replace(outcome, devices=(other, device))

    _, shown, _ = run(PlayedScript(then=then), "--card", "2GB", "--gpus", "2")

    assert "Preflight on 2 times a phantom GPU of 2GB" in shown
    assert re.search(r"^ +GPU 1 +GPU 0$", shown, re.MULTILINE)
    assert "on GPU 0, the fullest, CUDA context included" in " ".join(shown.split())


def ends(ended: Ended, **more: object) -> Callable[[RunPlan, RunResult], RunResult]:
    """An outcome that ends so, whatever it was."""
    return lambda _, outcome: replace(outcome, ended=ended, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("then", "sentence"),
    [
        (
            ends("error", exit_code=3, steps=1),
            "exit code 3 after 1 optimizer step, so there is no verdict",
        ),
        (ends("error", exit_code=-9, steps=0), "exit code 137 before its first optimizer step"),
        (
            ends("error", exit_code=1, values_read=2),
            "it had read 2 values from the phantom, which are zero",
        ),
        (
            ends("finished", steps=0),
            "without an optimizer step: let it train for one, or call session.step()",
        ),
        (
            ends("finished", steps=3, devices=()),
            "the script never used CUDA: let it train on the GPU",
        ),
        (
            ends("unsupported", exit_code=1, lacking=("cufftExecC2C",)),
            "needs cufftExecC2C, which the phantom GPU",
        ),
    ],
)
def test_no_verdict_is_one_sentence(
    run: Preflight, then: Callable[[RunPlan, RunResult], RunResult], sentence: str
) -> None:
    """The exit code is 2, which no verdict has, whatever the script's own was. Nothing else is said."""
    found, shown, said = run(PlayedScript(then=then), "--card", "2GB")

    assert (2, "", 1) == (found, shown, len(said.splitlines()))
    assert sentence in said


def test_values_that_were_read_are_told(run: Preflight) -> None:
    """A script that decides by what it computes may go another way, and the reader hears it."""
    _, shown, _ = run(
        PlayedScript(then=lambda _, outcome: replace(outcome, values_read=41)), "--card", "2GB"
    )

    assert "read values from the card 41 times" in " ".join(shown.split())


def test_an_untold_trace_is_said(run: Preflight) -> None:
    """Without a trace the verdict stands, and why nothing is compared."""
    code, shown, _ = run(
        PlayedScript(then=lambda _, outcome: replace(outcome, snapshot=None)), "--card", "2GB"
    )

    assert 0 == code
    assert "Other settings and cards cannot be compared: nothing was recorded" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--card is missing"),
        (("--card", "warp-drive"), "'warp-drive' names no card"),
        (("--card", "0.1GB"), "has no memory left beside a CUDA context"),
        (("--card", "2GB", "--steps", "0"), "--steps 0 is not possible"),
        (
            ("--card", "2GB", "--gpus", "99"),
            "--gpus 99 is not possible here: give a number from 1 to",
        ),
        (
            ("--card", "2GB", "--setting", "max_split_size_mb:many"),
            "--setting: max_split_size_mb must be 20 or more.",
        ),
        (("--card", "2GB", "--find-batch", "batch=9..1"), "--find-batch 'batch=9..1' is no search"),
        (("--card", "2GB", "--rank", "1"), "Tell it with --world-size"),
        (("--card", "2GB", "--world-size", "4", "--rank", "4"), "no rank 4 in a world of 4"),
        (
            ("--card", "2GB", "--world-size", "4", "--ranks", "a"),
            "--ranks 'a' is no list of numbers",
        ),
        (("--card", "2GB", "--world-size", "4", "--world-sizes", "8"), "contradict each other"),
        (
            ("--card", "2GB", "--world-sizes", "8", "--plot", "a.png"),
            "--plot belongs to a single run",
        ),
        (("--card", "2GB", "--world-sizes", "8", "--find-batch", "a=1..2"), "are two tables"),
        (("--card", "2GB", "--snapshot", "nowhere/a.pickle"), "there is no directory nowhere"),
        (("--card", "2GB", "--plot", "a.pdf"), "--plot draws png and svg"),
    ],
)
def test_a_flag_that_cannot_be_used_is_one_sentence(
    run: Preflight, arguments: tuple[str, ...], sentence: str
) -> None:
    """It is found before anything runs, and the exit code is 2."""
    script = PlayedScript()
    code, shown, said = run(script, *arguments)

    assert (2, "", 1) == (code, shown, len(said.splitlines()))
    assert sentence in said
    assert not script.plans


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ((), "there is no command to try"),
        (("--", "no-such-program"), "there is no program 'no-such-program'"),
        (("--", "torchrun", "--nproc-per-node", "8", "train.py"), "torchrun starts many processes"),
        (
            ("--", "python", "-m", "torch.distributed.run", "train.py"),
            "torch.distributed.run starts many processes",
        ),
        (
            ("--", "uv", "run", "accelerate", "launch", "train.py"),
            "accelerate starts many processes",
        ),
    ],
)
def test_a_command_that_cannot_be_tried_is_one_sentence(
    run: Preflight, command: tuple[str, ...], sentence: str
) -> None:
    """So is a launcher, which would start what a preflight stands for."""
    code, shown, said = run(PlayedScript(), "--card", "2GB", command=command)

    assert (2, "", 1) == (code, shown, len(said.splitlines()))
    assert sentence in said


def test_every_field_of_the_json_is_documented(run: Preflight) -> None:
    """In docs/preflight.md, but for what `torchmem whatif` and `torchmem oom` document."""
    page = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text()
    kinds = (
        ("--card", "0.86GB"),
        ("--card", "2GB"),
        ("--card", "2GB", "--find-batch", "batch-size=1..2"),
        ("--card", "2GB", "--world-sizes", "8,16"),
    )
    documents = [json.loads(run(PlayedScript(), *flags, "--json")[1]) for flags in kinds]

    assert {"run", "find_batch", "sweep"} == {document["kind"] for document in documents}
    assert [] == sorted(name for name in set(names(documents)) if f"`{name}`" not in page)


def names(value: object) -> Iterator[str]:
    """Keys of all objects within, without those of whatif and oom, and without phases."""
    if isinstance(value, list):
        for item in value:
            yield from names(item)
    if isinstance(value, dict):
        yield from value
        inner = (
            value.keys() - {"phase_peaks", "oom"} - ({"settings"} if "method" in value else set())
        )
        for key in inner:
            yield from names(value[key])


def torchmem(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "preflight", *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_cards_are_listed() -> None:
    """Every card of the catalogue has a line, and no command is needed for that."""
    from torchmem.phantom.cards import CATALOG

    done = torchmem("--list-cards")

    assert (0, "") == (done.returncode, done.stderr)
    assert ["card", *(card.name for card in CATALOG)] == [
        line.split()[0] for line in done.stdout.splitlines()
    ]


def test_a_phantom_within_a_phantom_is_refused() -> None:
    """It would measure the outer one."""
    done = torchmem("--card", "2GB", "--beside-gpu", *COMMAND, LD_PRELOAD="/nowhere/libphantom.so")

    assert (2, "") == (done.returncode, done.stdout)
    assert "torchmem: this shell runs on a phantom GPU already" in done.stderr


def test_a_real_gpu_is_left_alone(tmp_path: Path) -> None:
    """Where a card is found nothing runs, unless told to."""
    from torchmem.preflight.options import check_machine

    check_machine({}, beside_gpu=False, root=tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    check_machine({}, beside_gpu=True, root=tmp_path)
    with pytest.raises(UsageError, match=r"this machine has a real NVIDIA GPU: .* --beside-gpu"):
        check_machine({}, beside_gpu=False, root=tmp_path)


def test_ctrl_c_while_the_scratch_folder_is_emptied(run: Preflight) -> None:
    """An impatient second Ctrl-C leaves nothing of the traces, which may be large."""
    scratch: list[Path] = []

    def ended(folder: Path) -> None:
        while len(list(folder.iterdir())) == FILES:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(_: RunPlan, folder: Path, *__: object, **___: object) -> NoReturn:
        scratch.append(folder.parent)
        for number in range(FILES):
            (folder / str(number)).touch()
        threading.Thread(target=ended, args=(folder,)).start()
        raise KeyboardInterrupt

    code, _, said = run(interrupted, "--card", "2GB")

    assert (130, "torchmem: interrupted: nothing is left running.\n") == (code, said)
    assert not scratch[0].exists()
