"""`torchmem preflight`: pages, JSON and exit codes, with a simulated script."""

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
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest
from support.played_script import PlayedScript

from torchmem.allocator.sizes import MIB
from torchmem.commands.preflight import add_arguments
from torchmem.commands.preflight import run as run_command
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import Ended, RunResult
from torchmem.preflight.runner import RunFunction
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.trace import read

GOLDEN = Path(__file__).parent / "golden"
COMMAND = ("--", "sh", "train.sh")
FILES = 20_000
Preflight = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Preflight:
    """Return a function that runs the command and returns its exit code, stdout and stderr."""

    def run_one(
        script: RunFunction, *arguments: str | Path, command: tuple[str, ...] = COMMAND
    ) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        parsed = parser.parse_args(["--beside-gpu", *map(str, arguments), *command])
        try:
            code = run_command(parsed, script, count(0.0, 7.25).__next__)
        except TorchmemError as error:
            code = error.exit_code
            sys.stderr.write(f"torchmem: {error}\n")
        return code, *capfd.readouterr()

    return run_one


def check_golden(name: str, stdout: str) -> None:
    golden = GOLDEN / name
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(stdout)
    assert golden.read_text() == stdout
    assert [line for line in stdout.splitlines() if len(line) > 100 and name.endswith(".txt")] == []


def test_the_report_of_a_script_that_fits(run: Preflight) -> None:
    """The page equals the golden file, and the exit code is 0."""
    code, stdout, stderr = run(PlayedScript(), "--gpu-model", "2GB")

    assert (code, stderr) == (0, "")
    check_golden("fits.txt", stdout)


def test_the_report_of_a_script_that_does_not_fit(run: Preflight) -> None:
    """The OOM is explained, a run on a larger phantom shows the need, and the exit code is 1."""
    script = PlayedScript()
    code, stdout, stderr = run(script, "--gpu-model", "0.86GB", "--gpu-models", "0.86GB,1GB,2GB")

    assert (code, stderr) == (1, "")
    assert [round(plan.gpu.memory_bytes / 0.86e9) for plan in script.plans] == [1, 8]
    check_golden("does_not_fit.txt", stdout)


def test_the_first_sentence_names_a_setting_that_makes_it_fit(run: Preflight) -> None:
    """Headline, advice, table and JSON name the same setting; the exit code is 1."""
    flags = "--gpu-model", "1.1GB", "--setting", "expandable_segments:True"
    code, stdout, _ = run(PlayedScript(), *flags, "--json")
    document = json.loads(stdout)
    settings = document["comparison"]["settings"]
    fitting = {each["conf"] for each in settings["outcomes"][1:] if each["oom"] is None}
    sentence = document["verdict"]["sentence"]

    assert (code, document["verdict"]["fits"]) == (1, False)
    assert {"expandable_segments:True"} == fitting == {document["verdict"]["fits_with"]}
    assert settings["verdict"]["recommended"] == "expandable_segments:True"
    assert "It fits with expandable_segments:True, which reserves 462.00 MiB." in sentence


def test_without_an_exact_replay_nothing_is_compared(run: Preflight) -> None:
    """The page says why, and how to run the script under each setting."""
    script = PlayedScript(odd=True)
    code, stdout, _ = run(script, "--gpu-model", "2GB", "--setting", "max_split_size_mb:64")

    assert (code, len(script.plans)) == (0, 1)
    check_golden("not_exact.txt", stdout)


GROWING = (
    *("--gpu-model", "1.6GB", "--gpu-models", "1.6GB,2GB,80GB"),
    *("--setting", "expandable_segments:True"),
)


def test_growth_is_the_headline(run: Preflight) -> None:
    """It leads, with the steps until the GPU is full, and decides: the exit code is 1."""
    code, stdout, _ = run(PlayedScript(leak=5 * MIB), *GROWING)
    document = json.loads(run(PlayedScript(leak=5 * MIB), *GROWING, "--json")[1])
    verdict, text = document["verdict"], " ".join(stdout.split())
    left = verdict["growth"]["steps_left"]

    assert (code, verdict["fits"], verdict["fits_with"]) == (1, False, None)
    assert verdict["sentence"] in text
    assert re.match(
        rf"Grows by 5\.\d\d MiB a step, full after about {left} more steps: a leak, or data that "
        r"the script accumulates\. For 20 steps it barely fits a phantom GPU of 1\.6GB: ",
        verdict["sentence"],
    )
    assert "; PyTorch had to empty its cache 1 time to satisfy a request" in text
    assert re.search(r"  growth per step +5\.\d\d MiB\n", stdout)
    check_golden("grows.txt", stdout)


def test_other_gpus_are_full_later(run: Preflight) -> None:
    """Each GPU of the table has its own steps left, and one that is never full soon fits."""
    document = json.loads(run(PlayedScript(leak=5 * MIB), *GROWING, "--json")[1])
    own, larger, largest = document["comparison"]["gpu_models"]

    assert document["verdict"]["growth"]["steps_left"] == own["steps_left"] < larger["steps_left"]
    assert [each["fits"] for each in (own, larger, largest)] == [False, False, True]
    assert largest["steps_left"] is None


def test_growth_that_has_filled_the_gpu_is_the_headline(run: Preflight) -> None:
    """A leak that ran out of memory is told by the run with more memory; no setting helps."""
    script = PlayedScript(leak=40 * MIB)
    code, stdout, _ = run(script, "--gpu-model", "1.6GB", "--json")
    verdict = json.loads(stdout)["verdict"]

    assert (code, verdict["fits"], verdict["fits_with"]) == (1, False, None)
    assert re.match(
        r"Grows by 4\d\.\d\d MiB a step, full after 1\d steps: a leak, .* accumulates\. "
        r"Does not fit a phantom GPU of 1\.6GB: in step 1\d, ",
        verdict["sentence"],
    )
    assert verdict["growth"]["steps_left"] == 0
    assert "It fits with" not in verdict["sentence"]


def test_the_growth_of_a_whole_run_is_a_note(run: Preflight) -> None:
    """A script that ended by itself did fit."""
    whole = PlayedScript(leak=5 * MIB, then=ends("finished"))
    code, stdout, _ = run(whole, "--gpu-model", "2GB")

    assert code == 0
    assert "Fits a phantom GPU of 2GB" in stdout
    assert re.search(r"  - Grows by 5\.\d\d MiB a step, full after", stdout)


def test_the_growth_of_a_few_steps_is_unknown(run: Preflight) -> None:
    """It decides nothing, and the table says that it is not known."""
    code, stdout, _ = run(PlayedScript(leak=40 * MIB), "--gpu-model", "2GB", "--steps", "1")

    assert code == 0
    assert re.search(r"  growth per step +unknown \(too few steps\)\n", stdout)


def test_a_rank_whose_memory_grows_does_not_fit(run: Preflight) -> None:
    """Its row says so, the first sentence tells the growth, and the exit code is 1."""
    script = PlayedScript(leak=5 * MIB)
    flags = "--gpu-model", "2GB", "--world-size", "16", "--matrix", "rank=0,9"
    code, stdout, _ = run(script, *flags)

    assert code == 1
    assert len(re.findall(r"  grows$", stdout, re.MULTILINE)) == 2
    assert "0 of 2 fit." in " ".join(stdout.split())
    assert "Grows by 5." in stdout


def test_the_json_of_one_run(run: Preflight) -> None:
    """One document equals the golden file, without timelines; the script prints to stderr."""
    code, stdout, stderr = run(
        PlayedScript(words="epoch 1\n"), "--gpu-model", "2GB", "--steps", "8", "--json"
    )
    document = json.loads(stdout)
    for outcome in document["comparison"]["settings"]["outcomes"]:
        outcome.pop("timeline", None)

    assert (code, stderr, len(stdout.splitlines())) == (0, "epoch 1\n", 1)
    check_golden("fits.json", json.dumps(document, indent=1) + "\n")


def test_the_trace_is_kept_on_request(run: Preflight, tmp_path: Path) -> None:
    """Only its owner can read the file, and no other file is left."""
    path = tmp_path / "trace.pickle"
    path.write_text("older, and readable by everyone")
    run(PlayedScript(), "--gpu-model", "2GB", "--snapshot", path)

    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read(path)) == 1
    assert [path] == list(tmp_path.iterdir())


def test_the_largest_batch_is_found(run: Preflight) -> None:
    """The table shows every run; the largest value that fits and the next one were both run."""
    script = PlayedScript()
    code, stdout, stderr = run(script, "--gpu-model", "4GB", "--find-batch", "batch-size=1..64")
    tried = {int(plan.command[-1]) for plan in script.plans}
    best = int(re.findall(r"largest value that fits is --batch-size (\d+)", stdout)[0])

    lines = stderr.splitlines()
    runs = [re.match(r"torchmem: run (\d+) of the script, phantom, --batch-size", x) for x in lines]

    assert code == 0
    assert [run and run[1] for run in runs] == ["2", "4", "6", "8"]
    assert {1, best, best + 1, 64} <= tried
    assert len(tried) + 1 == len(script.plans) <= 9
    assert ((str(best), 40)) == (script.plans[-1].command[-1], script.plans[-1].steps)
    check_golden("find_batch.txt", stdout)


def test_the_search_ends_at_its_bounds(run: Preflight) -> None:
    """If all values fit, the bounds are run and the best is confirmed; if none fits, one is run."""
    small, large = PlayedScript(), PlayedScript()
    fits = run(small, "--gpu-model", "80GB", "--find-batch", "batch-size=2..4", "--json")
    misses = run(large, "--gpu-model", "1GB", "--find-batch", "batch-size=32..64", "--json")

    assert (
        fits[0],
        json.loads(fits[1])["best"],
        [int(plan.command[-1]) for plan in small.plans],
    ) == (0, 4, [2, 4, 4])
    assert (
        misses[0],
        json.loads(misses[1])["best"],
        [int(plan.command[-1]) for plan in large.plans],
    ) == (1, None, [32])


def test_the_largest_batch_is_confirmed_in_a_longer_run(run: Preflight) -> None:
    """A value that fits for 5 steps but not for 20 is not the result; the steps are reported."""
    script = PlayedScript(leak=60 * MIB)
    flags = "--gpu-model", "4GB", "--steps", "5", "--find-batch", "batch-size=1..64"
    code, stdout, _ = run(script, *flags, "--json")
    document = json.loads(stdout)
    runs = [(each["value"], each["steps"], each["fits"]) for each in document["tries"]]
    best = document["best"]

    assert (code, document["best_steps"]) == (1, 20)
    assert document["verdict"]["sentence"].startswith("Grows by 60.")
    assert {(best, 20, True), (best + 1, 20, False)} <= set(runs)
    assert any(fits for value, steps, fits in runs if value > best and steps == 5)
    assert "tried for 20 optimizer steps" in document["verdict"]["sentence"]


def test_an_error_ends_a_search(run: Preflight) -> None:
    """The script's output is shown, and there is no verdict."""
    script = PlayedScript(words="ValueError: mine\n", then=ends("error", exit_code=5))
    code, stdout, stderr = run(script, "--gpu-model", "4GB", "--find-batch", "batch-size=1..64")

    assert (code, stdout) == (2, "")
    assert stderr.startswith(
        "ValueError: mine\ntorchmem: the script ended with exit code 5 after 20 optimizer steps"
    )


def test_ranks_are_a_table(run: Preflight) -> None:
    """Each rank is run with its own placement and has a row."""
    script = PlayedScript(idle_ranks=(1,))
    code, stdout, _ = run(
        script, "--gpu-model", "2GB", "--world-size", "1024", "--matrix", "rank=0,1,1023"
    )

    assert code == 0
    assert [
        (plan.placement.rank, plan.placement.local_rank) for plan in script.plans if plan.placement
    ] == [(0, 0), (1, 1), (1023, 7)]
    assert {plan.devices for plan in script.plans} == {8}
    check_golden("ranks.txt", stdout)


def test_a_failing_rank_does_not_end_the_others(run: Preflight) -> None:
    """Each world size has a row; if one does not fit, the exit code is 1."""

    def then(plan: RunPlan, outcome: RunResult) -> RunResult:
        assert plan.placement
        ended: dict[int, Ended] = {8: "error", 64: "oom", 1024: "steps"}
        return replace(outcome, ended=ended[plan.placement.world_size])

    code, stdout, _ = run(
        PlayedScript(then=then), "--gpu-model", "2GB", "--matrix", "world_size=8,64,1024"
    )
    words = [
        line.split("  ")[-1].strip() for line in stdout.splitlines() if re.match(r"  \d", line)
    ]

    assert code == 1
    assert words == ["no verdict", "does not fit", "fits"]


def test_several_gpus_have_a_column_each(run: Preflight) -> None:
    """The verdict is about the fullest GPU."""

    def then(_: RunPlan, outcome: RunResult) -> RunResult:
        (device,) = outcome.devices
        other = replace(device, device=1, peak_reserved=device.peak_reserved // 2)
        return replace(outcome, devices=(other, device))

    _, stdout, _ = run(PlayedScript(then=then), "--gpu-model", "2GB", "--gpus", "2")

    assert "Preflight on 2 GPUs, each a phantom GPU of 2GB" in stdout
    assert re.search(r"^ +cuda:1 +cuda:0$", stdout, re.MULTILINE)
    assert "on cuda:0, the fullest, including the CUDA context" in " ".join(stdout.split())


def ends(ended: Ended, **more: object) -> Callable[[RunPlan, RunResult], RunResult]:
    """Return a function that changes how a run ended."""
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
            "it had read 2 values from the phantom GPU, which are zero",
        ),
        (
            ends("finished", steps=0),
            "without an optimizer step and without a call of a module: let it train or infer, or",
        ),
        (
            ends("finished", steps=3, devices=()),
            "the script never used CUDA: make it train on the GPU",
        ),
        (
            ends("unsupported", exit_code=1, lacking=("cufftExecC2C",)),
            "needs cufftExecC2C, which the phantom GPU does not support",
        ),
    ],
)
def test_no_verdict_is_one_sentence(
    run: Preflight, then: Callable[[RunPlan, RunResult], RunResult], sentence: str
) -> None:
    """The exit code is 2, whatever that of the script, and nothing else is printed."""
    code, stdout, stderr = run(PlayedScript(then=then), "--gpu-model", "2GB")

    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert sentence in stderr


def test_inference_has_figures(run: Preflight) -> None:
    """A script that never steps an optimizer has a verdict, and figures for each call."""
    inference = ends("finished", steps=0, calls=20)
    code, stdout, stderr = run(PlayedScript(then=inference), "--gpu-model", "2GB")

    assert (code, stderr) == (0, "")
    assert "Exited after 20 forward calls; the run took" in stdout
    assert "Fits a phantom GPU of 2GB" in stdout
    assert re.search(r"^    reached in +call 19, ", stdout, re.MULTILINE)
    assert re.search(r"^  growth per call +none$", stdout, re.MULTILINE)


def test_estimates_are_named(run: Preflight) -> None:
    """Text and JSON name the figures that include an estimated workspace."""
    script = PlayedScript(then=ends("steps", estimated=("cuFFT", "cuDNN")))
    _, stdout, _ = run(script, "--gpu-model", "2GB")
    document = json.loads(run(script, "--gpu-model", "2GB", "--json")[1])

    assert "Workspaces of cuFFT, cuDNN are estimates" in " ".join(stdout.split())
    assert document["estimates"] == ["outside", "headroom", "peak_allocated", "peak_reserved"]


def test_values_that_were_read_are_reported(run: Preflight) -> None:
    """The report notes that control flow may depend on values that are zero here."""
    _, stdout, _ = run(
        PlayedScript(then=lambda _, outcome: replace(outcome, values_read=41)), "--gpu-model", "2GB"
    )

    assert "read values from the GPU 41 times" in " ".join(stdout.split())


def test_a_missing_trace_is_reported(run: Preflight) -> None:
    """Without a trace there is a verdict, and the reason why nothing is compared."""
    code, stdout, _ = run(
        PlayedScript(then=lambda _, outcome: replace(outcome, snapshot=None)), "--gpu-model", "2GB"
    )

    assert code == 0
    assert "Other settings and GPUs were not compared: no trace was recorded" in stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--gpu-model is missing"),
        (("--gpu-model", "warp-drive"), "'warp-drive' is not a known GPU"),
        (("--gpu-model", "0.1GB"), "has no memory left besides a CUDA context"),
        (("--gpu-model", "2GB", "--steps", "0"), "--steps 0 is invalid"),
        (
            ("--gpu-model", "2GB", "--gpus", "99"),
            "--gpus 99 is invalid: it must be from 1 to 16",
        ),
        (
            ("--gpu-model", "2GB", "--setting", "max_split_size_mb:many"),
            "--setting: max_split_size_mb must be a whole number, 20 or more.",
        ),
        (
            ("--gpu-model", "2GB", "--find-batch", "batch=9..1"),
            "--find-batch 'batch=9..1' is not a range",
        ),
        (("--gpu-model", "2GB", "--rank", "1"), "set --world-size"),
        (("--gpu-model", "2GB", "--world-size", "4", "--rank", "4"), "no rank 4 in a world of 4"),
        (
            ("--gpu-model", "2GB", "--matrix", "world_size=8", "--snapshot", "a.pickle"),
            "--snapshot applies to a single run",
        ),
        (
            ("--gpu-model", "2GB", "--matrix", "world_size=8", "--find-batch", "a=1..2"),
            "are mutually exclusive",
        ),
        (("--gpu-model", "2GB", "--snapshot", "nowhere/a.pickle"), "there is no directory nowhere"),
    ],
)
def test_an_invalid_flag_is_one_sentence(
    run: Preflight, arguments: tuple[str, ...], sentence: str
) -> None:
    """It is rejected before anything runs, with exit code 2."""
    script = PlayedScript()
    code, stdout, stderr = run(script, *arguments)

    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert sentence in stderr
    assert not script.plans


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ((), "no command given"),
        (("--", "no-such-program"), "no-such-program is not a program: check its name"),
        (("--", "train.py"), "train.py is not a program: start it with Python"),
        (
            ("--", "torchrun", "--nproc-per-node", "8", "train.py"),
            "torchrun starts several processes",
        ),
        (
            ("--", "python", "-m", "torch.distributed.run", "train.py"),
            "torch.distributed.run starts several processes",
        ),
        (
            ("--", "uv", "run", "accelerate", "launch", "train.py"),
            "accelerate starts several processes",
        ),
    ],
)
def test_an_invalid_command_is_one_sentence(
    run: Preflight, command: tuple[str, ...], sentence: str
) -> None:
    """A launcher is rejected too, because it would start several processes."""
    code, stdout, stderr = run(PlayedScript(), "--gpu-model", "2GB", command=command)

    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert sentence in stderr


def test_every_field_of_the_json_is_documented(run: Preflight) -> None:
    """docs/preflight-reference.md has all but the fields of `whatif` and `why`."""
    page = (Path(__file__).parents[2] / "docs" / "preflight-reference.md").read_text()
    kinds = (
        ("--gpu-model", "0.86GB"),
        ("--gpu-model", "2GB"),
        ("--gpu-model", "2GB", "--find-batch", "batch-size=1..2"),
    )
    documents = [json.loads(run(PlayedScript(), *flags, "--json")[1]) for flags in kinds]

    assert {document["kind"] for document in documents} == {"run", "find_batch"}
    assert sorted(name for name in set(names(documents)) if f"`{name}`" not in page) == []


def names(value: object) -> Iterator[str]:
    """Yield the keys of all objects except those of whatif and oom, and phases."""
    if isinstance(value, list):
        for item in value:
            yield from names(item)
    if isinstance(value, dict):
        yield from value
        replayed = {"settings"} if "gpu_models" in value else set()
        inner = value.keys() - {"phase_peaks", "oom"} - replayed
        for key in inner:
            yield from names(value[key])


def torchmem(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "preflight", *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_gpus_are_listed() -> None:
    """Every GPU of the catalog has a line, and no command is needed."""
    from torchmem.phantom.gpus import CATALOG

    done = torchmem("--list-gpu-models")

    assert (done.returncode, done.stderr) == (0, "")
    assert ["GPU", *(gpu.name for gpu in CATALOG)] == [
        line.split()[0] for line in done.stdout.splitlines()
    ]


def test_a_phantom_inside_a_phantom_is_rejected() -> None:
    """It would measure the outer phantom."""
    done = torchmem(
        "--gpu-model", "2GB", "--beside-gpu", *COMMAND, LD_PRELOAD="/nowhere/libphantom.so"
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "torchmem: this shell already runs on a phantom GPU" in done.stderr


def test_a_machine_with_a_real_gpu_is_rejected(tmp_path: Path) -> None:
    """Nothing runs on a machine with a real GPU, except with --beside-gpu."""
    from torchmem.preflight.options import check_machine

    check_machine({}, beside_gpu=False, root=tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    check_machine({}, beside_gpu=True, root=tmp_path)
    with pytest.raises(UsageError, match=r"this machine has a real NVIDIA GPU: .* --beside-gpu"):
        check_machine({}, beside_gpu=False, root=tmp_path)


def test_ctrl_c_during_the_removal_of_the_scratch_folder(run: Preflight) -> None:
    """A second Ctrl-C leaves none of the traces, which may be large."""
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

    code, _, stderr = run(interrupted, "--gpu-model", "2GB")

    assert (
        code,
        stderr,
    ) == (130, "torchmem: interrupted: all processes of the script were ended.\n")
    assert not scratch[0].exists()
