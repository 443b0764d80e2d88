"""The generated files are up to date, and generate.py reports when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from generate import Files, main


def test_every_generated_file_is_current(root: Path) -> None:
    """`generate.py --check` finds no file to write."""
    command = [sys.executable, "generate.py", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "out of date" not in done.stdout


def test_an_outdated_file_is_reported_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    """--check names each file that is missing, different or superfluous, and changes nothing."""
    missing, different, superfluous = (tmp_path / name for name in ("a.md", "b.md", "c.md"))
    different.write_text("old")
    superfluous.write_text("old")

    def part() -> Files:
        return {missing: "new", different: "new", superfluous: None}

    assert main(["--check"], [part]) == 1
    assert [
        f"{os.path.relpath(path, root)} is out of date: run make generate."
        for path in (missing, different, superfluous)
    ] == capsys.readouterr().out.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.md", "c.md"]

    assert main([], [part]) == 0
    assert main(["--check"], [part]) == 0
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.md": "new", "b.md": "new"}
