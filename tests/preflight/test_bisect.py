"""`torchmem preflight --bisect`, with a simulated script in a real git repository."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import NoReturn

import pytest
from support.git import GitRepo
from support.played_script import PlayedScript

from torchmem.allocator.sizes import MIB
from torchmem.commands.preflight import add_arguments
from torchmem.commands.preflight import run as run_command
from torchmem.compare.peak_memory import SourceLine, Use
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import GpuMemory, RunProgress, RunResult
from torchmem.preflight.runner import RunFunction
from torchmem.preflight.worktree import Repository, import_path
from torchmem.sample.errors import TorchmemError

Progress = Callable[[RunProgress], None]


class Repo(GitRepo):
    """A repository with a file `batch`, from which the simulated script takes its batch size."""

    def commit_batch(self, batch: str) -> None:
        number = len(self.commits)
        self.commit({"batch": batch, "number": str(number)}, f"Commit {number}: {batch}")


@dataclass
class CommittedScript:
    """Trains with the batch size of the commit that is checked out; "fail" has no verdict.

    It leaves a change in a tracked file. "leak" keeps memory at each step. folders: where it ran.
    """

    folders: list[Path] = field(default_factory=list)

    def __call__(
        self, plan: RunPlan, folder: Path, progress: Progress, **streams: int | None
    ) -> RunResult:
        assert plan.folder is not None
        self.folders.append(plan.folder)
        batch = (plan.folder / "batch").read_text()
        (plan.folder / "number").write_text("changed by the script")
        is_broken, leak = batch == "fail", 5 * MIB if batch == "leak" else 0
        words = (*plan.command, "--batch-size", batch if batch.isdigit() else "1")
        result = PlayedScript(leak)(replace(plan, command=words), folder, progress, **streams)
        result = replace(result, devices=tuple(_divided(each) for each in result.devices))
        return replace(result, ended="error", exit_code=1) if is_broken else result


def _divided(device: GpuMemory) -> GpuMemory:
    """Return the figures with a line of the script that holds what the weights do not."""
    line = SourceLine("model.py", 31, "forward", "return self.inner(x)")
    weights = Use("parameters", 99 * MIB, "encoder")
    rest = Use("activations", device.peak_allocated - weights.bytes, "encoder", line)
    return replace(device, uses=(weights, rest))


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """Return an empty repository, in which the test runs."""
    made = Repo(tmp_path / "repo")
    monkeypatch.chdir(made.folder)
    return made


Bisect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bisect(capfd: pytest.CaptureFixture[str]) -> Bisect:
    """Return a function that runs a bisection and returns its exit code, stdout and stderr."""

    def run(script: RunFunction, commits: str, *flags: str) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        words = ["--beside-gpu", "--bisect", commits, *flags, "--", "sh", "train.sh"]
        gpu = [] if "--gpu-model" in flags else ["--gpu-model", "8GB"]
        try:
            code = run_command(parser.parse_args([*gpu, *words]), script, repeat(0.0).__next__)
        except TorchmemError as error:
            code = error.exit_code
            sys.stderr.write(f"torchmem: {error}\n")
        return code, *capfd.readouterr()

    return run


def test_the_commit_that_costs_the_memory(repo: Repo, bisect: Bisect, root: Path) -> None:
    """It is named with what it adds, where, and what others add; the JSON is documented."""
    for batch in ("4", "4", "5", "12", "12", "12", "13", "13"):
        repo.commit_batch(batch)
    script = CommittedScript()
    flags = "--json", "--gpu-model", "80GB"
    code, stdout, stderr = bisect(script, f"{repo.commits[0]}..HEAD", *flags)
    document = json.loads(stdout)
    pages = [(root / "docs" / f"preflight{name}.md").read_text() for name in ("", "-bisect")]
    names = [*document, *document["commits"][0]]
    tested = [(run["subject"], run["answer"]) for run in document["commits"]]

    assert (code, stderr) == (0, "")
    assert document["commit"]["hash"] == repo.commits[3]
    assert tested == [
        ("Commit 0: 4", "good"),
        ("Commit 2: 5", "good"),
        ("Commit 3: 12", "bad"),
        ("Commit 7: 13", "bad"),
    ]
    assert len(script.folders) == 4
    assert document["changes"] == [
        {
            "bytes": document["increase_bytes"],
            "component": "activations",
            "module": "encoder",
            "file": "model.py",
            "line": 31,
        }
    ]
    assert " GiB more (+" in document["verdict"]["sentence"]
    assert " The other commits take " in document["verdict"]["sentence"]
    assert [name for name in names if f"`{name}`" not in "".join(pages)] == []


def test_the_checkout_is_not_touched(repo: Repo, bisect: Bisect) -> None:
    """Files, index, branch and references stay, and no worktree is left."""
    for batch in ("4", "12", "12"):
        repo.commit_batch(batch)
    (repo.folder / "batch").write_text("not committed")
    (repo.folder / "other").write_text("not tracked")
    questions = (
        ("status", "--porcelain"),
        ("worktree", "list"),
        ("for-each-ref",),
        ("branch", "--list", "--all"),
    )
    before = [repo.git(*question) for question in questions]
    index = (repo.folder / ".git" / "index").read_bytes()
    code, stdout, _ = bisect(CommittedScript(), "HEAD~2..")

    assert code == 0
    assert "GiB  activations  encoder  model.py:31  return self.inner(x)" in stdout
    assert [repo.git(*question) for question in questions] == before
    assert (repo.folder / ".git" / "index").read_bytes() == index
    assert (repo.folder / "batch").read_text() == "not committed"
    assert not (repo.folder / ".git" / "BISECT_LOG").exists()
    assert "Changes that are not committed are in none of the runs." in " ".join(stdout.split())


def test_a_commit_without_a_verdict_is_skipped(repo: Repo, bisect: Bisect) -> None:
    """The search goes on beside it."""
    for batch in ("4", "4", "fail", "4", "12", "12"):
        repo.commit_batch(batch)
    code, stdout, stderr = bisect(CommittedScript(), f"{repo.commits[0]}..main", "--json")

    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["commit"]["subject"] == "Commit 4: 12"


def test_only_candidates_are_left(repo: Repo, bisect: Bisect) -> None:
    """If the commits beside it have no verdict, all that it may be are named; the code is 2."""
    for batch in ("4", "fail", "12"):
        repo.commit_batch(batch)
    code, stdout, _ = bisect(CommittedScript(), f"{repo.commits[0]}..main", "--json")
    document = json.loads(stdout)

    assert (code, document["commit"]) == (2, None)
    assert {each["hash"] for each in document["candidates"]} == set(repo.commits[1:])
    assert document["verdict"]["sentence"].startswith("It is one of ")


def test_the_first_commit_that_does_not_fit(repo: Repo, bisect: Bisect) -> None:
    """If the bad end does not fit, that tells the commits apart, not a peak that was cut off."""
    for batch in ("2", "4", "30", "31"):
        repo.commit_batch(batch)
    code, stdout, _ = bisect(CommittedScript(), f"{repo.commits[0]}..main", "--gpu-model", "4GB")

    assert code == 0
    assert "Commit 2: 30) costs the memory: it is the first commit at which the script does" in (
        " ".join(stdout.split())
    )
    assert max(map(len, stdout.splitlines())) <= 100


def test_the_first_commit_that_leaks(repo: Repo, bisect: Bisect) -> None:
    """If memory grows at the bad end until it does not fit, the growth is the reason."""
    for batch in ("1", "1", "leak", "leak"):
        repo.commit_batch(batch)
    _, stdout, _ = bisect(CommittedScript(), f"{repo.commits[0]}..main", "--gpu-model", "2GB")

    assert "(Commit 2: leak) costs the memory. Grows by 5." in " ".join(stdout.split())


def test_ends_that_take_the_same(repo: Repo, bisect: Bisect) -> None:
    """Nothing else is run, and the exit code is 1."""
    for batch in ("4", "12", "4"):
        repo.commit_batch(batch)
    script = CommittedScript()
    code, stdout, _ = bisect(script, f"{repo.commits[0]}..main")

    assert (code, len(script.folders)) == (1, 2)
    assert "No commit costs memory" in stdout


def test_the_script_starts_in_the_same_folder(repo: Repo, bisect: Bisect) -> None:
    """A preflight that is started in a subfolder runs there at each commit."""
    for batch in ("4", "12"):
        repo.commit({"inner/batch": batch, "inner/number": ""}, batch)
    os.chdir(repo.folder / "inner")
    script = CommittedScript()
    code, _, stderr = bisect(script, "HEAD~1..HEAD")

    assert (code, stderr) == (0, "")
    assert {folder.name for folder in script.folders} == {"inner"}
    assert not {folder for folder in script.folders if folder.is_relative_to(repo.folder)}


def test_modules_are_imported_from_the_commit(repo: Repo, tmp_path: Path) -> None:
    """Folders of the checkout that are imported from come first as folders of the worktree."""
    for root in (repo.folder, tmp_path / "worktree"):
        (root / "src").mkdir(parents=True)
    other = str(tmp_path)
    base = os.environ | {"PYTHONPATH": os.pathsep.join([str(repo.folder / "src"), other])}
    command = (sys.executable, "train.py")
    path = import_path(command, Repository(repo.folder), tmp_path / "worktree", base)

    assert path is not None
    assert path.split(os.pathsep) == [
        str(tmp_path / "worktree" / "src"),
        str(repo.folder / "src"),
        other,
    ]


def test_an_interrupt_leaves_no_worktree(repo: Repo, bisect: Bisect) -> None:
    """Ctrl-C during a run removes the worktree and its entry in the repository."""
    for batch in ("4", "12"):
        repo.commit_batch(batch)

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    code, _, stderr = bisect(interrupted, "HEAD~1..HEAD")

    assert (code, stderr) == (
        130,
        "torchmem: interrupted: all processes of the script were ended.\n",
    )
    assert len(repo.git("worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    ("commits", "sentence"),
    [
        ("HEAD", "'HEAD' is not a range of commits such as v1.0..HEAD"),
        ("HEAD~1...HEAD", "is not a range of commits"),
        ("..HEAD", "is not a range of commits"),
        ("nowhere..HEAD", "'nowhere' is not a commit of"),
        ("HEAD..HEAD", "are the same commit"),
        ("HEAD..HEAD~1", "HEAD~1 is older than HEAD: give the good, older commit first"),
        ("side..HEAD", "side is not in the history of HEAD"),
        ("HEAD~1..HEAD", "the script ended with exit code 1"),
        ("HEAD~3..HEAD", "the script does not fit at"),
    ],
)
def test_bad_input_is_one_sentence(repo: Repo, bisect: Bisect, commits: str, sentence: str) -> None:
    """The exit code is 2, and the worktree is removed."""
    for batch in ("40", "4", "fail", "4"):
        repo.commit_batch(batch)
    repo.git("branch", "side", repo.git("commit-tree", "-m", "side", "HEAD^{tree}"))
    code, stdout, stderr = bisect(CommittedScript(), commits, "--gpu-model", "4GB")

    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert sentence in stderr
    assert len(repo.git("worktree", "list").splitlines()) == 1


def test_outside_a_repository(
    tmp_path: Path, bisect: Bisect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says what git says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    code, _, stderr = bisect(CommittedScript(), "v1..HEAD")

    assert code == 2
    assert "--bisect: git rev-parse failed (not a git repository" in stderr
