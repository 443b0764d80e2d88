"""`torchmem preflight --matrix`: names, runs side by side, resumed runs, and the three outputs."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
from support.played_script import PlayedScript

from torchmem.allocator.sizes import GIB
from torchmem.commands.preflight import add_arguments
from torchmem.commands.preflight import run as run_command
from torchmem.preflight.matrix import Cell, CellResult, Matrix
from torchmem.preflight.matrix_runs import MatrixRuns, jobs_for
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.sample.errors import TorchmemError

Output = tuple[int, str, str]


@dataclass
class Played:
    """A run of a played script, which ends at its second poll."""

    result: RunResult
    ended: list[str]
    polls: int = 0

    def poll(self) -> RunResult | None:
        self.polls += 1
        return self.result if self.polls > 1 else None

    def ask_to_end(self) -> None:
        self.ended.append("asked")

    def end(self) -> None:
        self.ended.append("ended")


@dataclass
class PlayedStart:
    """Starts played scripts. plans: those that were started; ended: what was ended early."""

    script: PlayedScript = field(default_factory=PlayedScript)
    plans: list[RunPlan] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def __call__(self, plan: RunPlan, folder: Path, output: int) -> Played:
        self.plans.append(plan)
        return Played(self.script(plan, folder, lambda _: None, stdout=output), self.ended)


RunMatrix = Callable[..., Output]


@pytest.fixture
def matrix(capfd: pytest.CaptureFixture[str]) -> RunMatrix:
    """Return a function that runs a matrix, and returns its exit code, stdout and stderr."""

    def run(start: PlayedStart, *flags: str | Path, command: str = "sh train.sh") -> Output:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        jobs = ["--jobs", "2"] if "--matrix" in flags else []
        words = ["--beside-gpu", *jobs, *map(str, flags), "--", *command.split()]
        try:
            clock = count(0.0, 7.25).__next__
            code = run_command(parser.parse_args(words), clock=clock, start=start)
        except TorchmemError as error:
            code = error.exit_code
            sys.stderr.write(f"torchmem: {error}\n")
        return code, *capfd.readouterr()

    return run


def test_the_table_of_what_fits(matrix: RunMatrix) -> None:
    """Each combination has a row, and the last line has the largest batch for each other value."""
    start = PlayedStart()
    flags = "--gpu-model", "2GB", "--matrix", "batch-size=1,2,32", "MODE=train,eval"
    code, stdout, stderr = matrix(start, *flags)
    lines = stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith("  ") and line.split()[0].isdigit()]

    assert (code, stderr) == (1, "")
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("1", "train", "fits"),
        ("1", "eval", "fits"),
        ("2", "train", "fits"),
        ("2", "eval", "fits"),
        ("32", "train", "fit"),
        ("32", "eval", "fit"),
    ]
    assert "4 of 6 fit. The largest batch-size that fits: 2 with train, 2 with eval." in lines
    assert max(map(len, lines)) <= 100


def test_names_are_placeholders_flags_variables_or_options(matrix: RunMatrix) -> None:
    """{name} in the command comes first, then the preflight's flags, variables, and options."""
    start = PlayedStart()
    axes = "rank=8", "gpu_model=2GB", "world_size=16", "LR=0.1", "batch=4", "x=,--fast"
    command = "sh train.sh --rank {rank} --batch 1 {x}"
    code, _, stderr = matrix(start, "--matrix", *axes, command=command)
    first, second = start.plans

    assert (code, stderr) == (0, "")
    assert first.command == ("sh", "train.sh", "--rank", "8", "--batch", "4")
    assert second.command == (*first.command, "--fast")
    assert first.environment == (("LR", "0.1"),)
    assert first.gpu.product == "GPU of 2GB"
    assert first.placement is not None
    assert (first.placement.rank, first.placement.world_size) == (0, 16)


def test_quotes_keep_a_comma(matrix: RunMatrix) -> None:
    """An allocator setting with a comma is one value, as in CSV; the empty one is the default."""
    start = PlayedStart()
    axis = 'alloc_conf=,"expandable_segments:True,max_split_size_mb:64"'
    matrix(start, "--gpu-model", "2GB", "--matrix", axis)

    assert [plan.alloc_conf for plan in start.plans] == [
        "",
        "expandable_segments:True,max_split_size_mb:64",
    ]


def test_a_script_that_fails_does_not_end_the_others(matrix: RunMatrix) -> None:
    """Its output is shown under its combination, its row has no verdict, and the code is 2."""

    def fail(plan: RunPlan, result: RunResult) -> RunResult:
        is_bad = "2" in plan.command
        return replace(result, ended="error", exit_code=7) if is_bad else result

    start = PlayedStart(PlayedScript(words="hello\n", then=fail))
    code, stdout, stderr = matrix(start, "--gpu-model", "4GB", "--matrix", "batch-size=1,2,3")

    assert (code, stderr) == (2, "torchmem: the output of batch-size=2:\nhello\n")
    assert "2 of 3 fit. 1 has no verdict; its output is shown above." in stdout
    assert len(start.plans) == 3


def test_a_preflight_goes_on_where_another_ended(matrix: RunMatrix, tmp_path: Path) -> None:
    """Only combinations without a verdict in the file are run, also after a cut-off line."""

    def fail(plan: RunPlan, result: RunResult) -> RunResult:
        return replace(result, ended="error") if "2" in plan.command else result

    file = tmp_path / "results.jsonl"
    flags = "--gpu-model", "2GB", "--resume", file, "--json", "--matrix"
    whole = json.loads(matrix(PlayedStart(), *flags, "batch-size=1,2,3")[1])
    file.unlink()
    matrix(PlayedStart(PlayedScript(then=fail)), *flags, "batch-size=1,2")
    file.write_text(file.read_text() + '{"kind": "preflight_result", "sche')
    start = PlayedStart()
    code, stdout, _ = matrix(start, *flags, "batch-size=1,2,3")
    again = matrix(PlayedStart(), *flags, "batch-size=1,2,3")
    document = json.loads(stdout)

    assert [plan.command[-1] for plan in start.plans] == ["2", "3"]
    assert [cell["resumed"] for cell in document["cells"]] == [True, False, False]
    assert [cell["resumed"] for cell in json.loads(again[1])["cells"]] == [True] * 3
    outcomes = [[cell["outcome"] for cell in each["cells"]] for each in (whole, document)]
    assert outcomes[0] == outcomes[1]
    assert code == again[0]


def test_other_steps_are_other_results(matrix: RunMatrix, tmp_path: Path) -> None:
    """A result counts only for the same command, variables, GPU model, settings and steps."""
    file, start = tmp_path / "results.jsonl", PlayedStart()
    for steps in ("3", "4", "3"):
        flags = "--steps", steps, "--resume", file, "--matrix", "MODE=a"
        matrix(start, "--gpu-model", "2GB", *flags)

    assert [plan.steps for plan in start.plans] == [3, 4]


@pytest.mark.parametrize("content", ["print('mine')\n", "no end of line", '{"kind": "other"}\n'])
def test_a_file_of_the_user_is_not_touched(matrix: RunMatrix, tmp_path: Path, content: str) -> None:
    """A file that has no results is refused before anything runs, and keeps its content."""
    file, start = tmp_path / "train.py", PlayedStart()
    file.write_text(content)
    code, _, stderr = matrix(start, "--gpu-model", "2GB", "--resume", file, "--matrix", "A=1")

    assert (code, start.plans, file.read_text()) == (2, [], content)
    assert f"--resume: line 1 of {file} is not a result of a matrix" in stderr


def test_the_csv_has_a_column_for_each_axis(matrix: RunMatrix) -> None:
    """Sizes are bytes, and what is unknown is empty."""
    flags = "--gpu-model", "2GB", "--csv", "--matrix", "batch-size=1,32"
    _, stdout, _ = matrix(PlayedStart(), *flags)
    fitting, failed = csv.DictReader(stdout.splitlines())

    assert (fitting["batch-size"], fitting["verdict"], fitting["error"]) == ("1", "fits", "")
    assert int(fitting["peak_allocated_bytes"]) <= int(fitting["peak_reserved_bytes"])
    assert (failed["verdict"], failed["headroom_bytes"]) == ("does not fit", "")


def test_an_interrupt_ends_all_that_run(tmp_path: Path) -> None:
    """All are asked before the first is waited for."""
    ended: list[str] = []
    cells = tuple(Cell((str(number),), None) for number in range(3))  # type: ignore[arg-type]

    class Interrupted(Played):
        def poll(self) -> None:
            raise KeyboardInterrupt

    runs = MatrixRuns(Matrix((), (), cells), tmp_path, 2, None)
    with pytest.raises(KeyboardInterrupt):
        runs.run(lambda *_: Interrupted(None, ended))  # type: ignore[arg-type]

    assert ended == ["asked", "asked", "ended", "ended"]


def test_ram_limits_how_many_run_at_a_time() -> None:
    """The first run is alone; then as many as there are cores, as far as RAM suffices."""
    result = RunResult("steps", 0, 3, 1.0, host_bytes=10 * GIB)
    results = [CellResult(result, Cell((), None))]  # type: ignore[arg-type]

    assert jobs_for([], 8, 64 * GIB) == 1
    assert jobs_for(results, 8, 64 * GIB) == 6
    assert jobs_for(results, 2, 64 * GIB) == 2
    assert jobs_for(results, 8, GIB) == 1
    assert jobs_for(results, 8, None) == 8


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--matrix", "batch"), "'batch' is not a name with values such as batch=8,16,32"),
        (("--matrix", "=1"), "'=1' is not a name with values"),
        (("--matrix", "a=1", "a=2"), "--matrix has a twice"),
        (("--matrix", "gpu_model=2GB"), "--matrix varies gpu_model: remove --gpu-model"),
        (("--matrix", "world_size=x"), "--matrix world_size 'x' is not a number"),
        (("--matrix", "rank=1"), "the number of ranks is missing: set --world-size"),
        (("--matrix", "LD_PRELOAD=x"), "--matrix cannot vary LD_PRELOAD"),
        (("--matrix", "a=" + ",".join(map(str, range(300)))), "has 300 combinations"),
        (("--matrix", "a=1", "--ranks", "0..3"), "are mutually exclusive"),
        (("--matrix", "a=1", "--snapshot", "x"), "--snapshot applies to a single run"),
        (("--matrix", "a=1", "--csv", "--json"), "--csv and --json are mutually exclusive"),
        (("--matrix", "a=1", "--jobs", "0"), "--jobs 0 is invalid"),
        (("--matrix", "a=1", "--resume", "/nowhere/x"), "there is no directory /nowhere"),
        (("--csv",), "--csv applies to a matrix"),
    ],
)
def test_bad_input_is_one_sentence(
    matrix: RunMatrix, flags: tuple[str, ...], sentence: str
) -> None:
    """The exit code is 2, and nothing runs."""
    start = PlayedStart()
    code, stdout, stderr = matrix(start, "--gpu-model", "2GB", *flags)

    assert (code, stdout, start.plans, len(stderr.splitlines())) == (2, "", [], 1)
    assert sentence in stderr


def test_every_field_of_the_json_is_documented(matrix: RunMatrix, root: Path) -> None:
    """docs/preflight-matrix.md has the fields that other documents of a preflight lack."""
    page = (root / "docs" / "preflight-matrix.md").read_text()
    document = json.loads(matrix(PlayedStart(), "--matrix", "gpu_model=2GB", "--json")[1])
    others = (root / "docs" / "preflight.md").read_text()
    names = [*document, *document["cells"][0]]

    assert [name for name in names if f"`{name}`" not in page + others] == []
