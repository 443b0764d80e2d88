"""The commands of the front page, and of the page that starts from a symptom, work as written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.examples import prepare

from torchmem.cli.main import command_line

PAGES = ("README.md", "docs/leak-or-fragmentation.md")
# They serve until Ctrl-C, need a running rank, CUDA or an exporter, or are only named.
NOT_RUN = re.compile(
    r"torchmem (exporter|top|capture .*|release .*|preflight .*|fleet .*|run -- torchrun .*|demo .*"
    r"|doctor|manifests( rules| dashboards| completion)?|fleet|run)"
)
_BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```|((?:^    [^\n]+\n)+)", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`((?:torchmem|make|pip|docker) [^`]+)`(?!`)")
_COMMAND = re.compile(r"(?:\w+=\S+ )*(?:torchmem|make|pip|docker) .+")


def commands(root: Path) -> list[str]:
    """Return the commands of the pages in their order, without comments and prompts."""
    found = []
    for page in PAGES:
        text = (root / page).read_text()
        blocks = "".join(fenced or indented for fenced, indented in _BLOCK.findall(text))
        shown = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
        lines = [line.split("  #")[0].strip() for line in [*blocks.splitlines(), *shown]]
        found += [line for line in [*lines, *_SPAN.findall(text)] if _COMMAND.fullmatch(line)]
    return list(dict.fromkeys(found))


def words(command: str) -> list[str]:
    """Return the words of a command, without the variables in front of it."""
    parts = shlex.split(command)
    return parts[next(index for index, word in enumerate(parts) if "=" not in word) :]


def of(root: Path, program: str) -> list[str]:
    """Return the commands of one program; a page that shows none fails the test."""
    found = [command for command in commands(root) if words(command)[0] == program]
    assert found
    return found


def test_the_first_command_works_in_a_clone(root: Path) -> None:
    """The first line to copy installs from the clone, and the page says what is not on PyPI."""
    text = (root / "README.md").read_text()
    in_blocks = re.findall(r"```bash\n(.+)\n", text)

    assert in_blocks[0] == "pip install '.[exporter]'"
    assert "not on PyPI yet" in text


def test_what_pip_installs_can_be_installed(root: Path) -> None:
    """The clone has the extra that pip is asked for, and its metadata is valid."""
    (command,) = [each for each in of(root, "pip") if " '." in each]
    pip = [sys.executable, "-m", "pip", *words(command)[1:], "--dry-run", "--no-deps", "--quiet"]
    done = subprocess.run(pip, cwd=root, capture_output=True, text=True, check=False)

    assert (done.returncode, "does not provide the extra" in done.stderr) == (0, False)


def test_make_knows_what_it_is_asked_for(root: Path) -> None:
    """Each make command names a target, and the page has those of a newcomer."""
    made = of(root, "make")
    for command in made:
        done = subprocess.run(
            [*words(command), "--dry-run"], cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

    assert {"make demo", "make test"} <= set(made)


def test_every_command_line_of_torchmem_is_valid(root: Path) -> None:
    """The parser accepts the flags and values of every command that is complete."""
    kinds = {f"torchmem manifests {kind}" for kind in ("rules", "dashboards", "completion")}
    bare = {"torchmem manifests", *kinds}
    for command in of(root, "torchmem"):
        if command not in bare | {"torchmem run", "torchmem demo --scenario NAME"}:
            assert callable(command_line().parse_args(words(command)[1:]).run), command


def test_the_commands_of_torchmem_run(root: Path, tmp_path: Path) -> None:
    """With a report, a running rank and a snapshot, the commands that only read succeed."""
    environment = prepare(tmp_path)
    for rank in (0, 3):
        shutil.copy(tmp_path / "snapshot.pickle", tmp_path / f"rank{rank}.pickle")
    ran = [command for command in of(root, "torchmem") if not NOT_RUN.fullmatch(command)]
    for command in ran:
        # The prepared rank has this number.
        done = subprocess.run(
            ["sh", "-c", command.replace("--rank 0", "--rank 3")],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

    assert {words(command)[1] for command in ran} >= {"why", "whatif", "run"}


def test_the_lines_for_the_script_run(root: Path, tmp_path: Path) -> None:
    """The Python block of the front page runs, without PyTorch as well."""
    (block,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env=os.environ | {"TORCHMEM_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


@pytest.mark.parametrize("page", PAGES)
def test_named_scenarios_exist(page: str, root: Path) -> None:
    """Each scenario that a page plays exists."""
    text = (root / page).read_text()
    named = set(re.findall(r"--scenario (\w[\w-]*)", text)) - {"NAME"}
    assert named or "`torchmem demo --scenario NAME`" in text
    for command in (f"torchmem demo --scenario {name}" for name in named):
        assert callable(command_line().parse_args(words(command)[1:]).run)
