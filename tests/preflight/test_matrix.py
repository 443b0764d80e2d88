"""`torchmem preflight --matrix`: names, runs, the page and the document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.played_script import PlayedScript

from torchmem.commands.preflight import add_arguments
from torchmem.commands.preflight import run as run_command
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.sample.errors import TorchmemError

Output = tuple[int, str, str]


RunMatrix = Callable[..., Output]


@pytest.fixture
def matrix(capfd: pytest.CaptureFixture[str]) -> RunMatrix:
    """Return a function that runs a matrix, and returns its exit code, stdout and stderr."""

    def run(script: PlayedScript, *flags: str | Path, command: str = "sh train.sh") -> Output:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        words = ["--beside-gpu", *map(str, flags), "--", *command.split()]
        try:
            code = run_command(parser.parse_args(words), script)
        except TorchmemError as error:
            code = error.exit_code
            sys.stderr.write(f"torchmem: {error}\n")
        return code, *capfd.readouterr()

    return run


def test_the_table_of_what_fits(matrix: RunMatrix) -> None:
    """Each combination has a row, and the last line has the largest batch for each other value."""
    start = PlayedScript()
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
    start = PlayedScript()
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
    start = PlayedScript()
    axis = 'alloc_conf=,"expandable_segments:True,max_split_size_mb:64"'
    matrix(start, "--gpu-model", "2GB", "--matrix", axis)

    assert [plan.alloc_conf for plan in start.plans] == [
        "",
        "expandable_segments:True,max_split_size_mb:64",
    ]


def test_a_script_that_fails_does_not_end_the_others(matrix: RunMatrix) -> None:
    """Its output is shown with its combination, its row has no verdict, and the code is 2."""

    def fail(plan: RunPlan, result: RunResult) -> RunResult:
        is_bad = "2" in plan.command
        return replace(result, ended="error", exit_code=7) if is_bad else result

    start = PlayedScript(words="hello\n", then=fail)
    code, stdout, stderr = matrix(start, "--gpu-model", "4GB", "--matrix", "batch-size=1,2,3")

    assert (code, stderr) == (2, "hello\ntorchmem: no verdict for batch-size=2.\n")
    assert "2 of 3 fit. 1 has no verdict; its output is shown above." in stdout
    assert len(start.plans) == 3


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
        (("--matrix", "a=1", "--find-batch", "b=1..3"), "are mutually exclusive"),
        (("--matrix", "a=1", "--snapshot", "x"), "--snapshot applies to a single run"),
    ],
)
def test_bad_input_is_one_sentence(
    matrix: RunMatrix, flags: tuple[str, ...], sentence: str
) -> None:
    """The exit code is 2, and nothing runs."""
    start = PlayedScript()
    code, stdout, stderr = matrix(start, "--gpu-model", "2GB", *flags)

    assert (code, stdout, start.plans, len(stderr.splitlines())) == (2, "", [], 1)
    assert sentence in stderr


def test_every_field_of_the_json_is_documented(matrix: RunMatrix, root: Path) -> None:
    """docs/preflight-reference.md has the fields of a matrix."""
    page = (root / "docs" / "preflight-reference.md").read_text()
    document = json.loads(matrix(PlayedScript(), "--matrix", "gpu_model=2GB", "--json")[1])
    names = [*document, *document["cells"][0]]

    assert [name for name in names if f"`{name}`" not in page] == []
