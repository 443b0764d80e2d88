"""`tests/programs.sh` never stops `make test`, whatever this machine's package source lacks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ("exit 0", "The package prometheus is not available here"),
        ("exit 100", "They could not be downloaded"),
    ],
    ids=["no packages", "no network"],
)
def test_what_cannot_be_had_is_skipped(
    root: Path, tmp_path: Path, update: str, message: str
) -> None:
    """Where no package can be had, the script says so and ends well."""
    script = tmp_path / "tests" / "programs.sh"
    commands = tmp_path / "commands"
    for folder in (script.parent, commands):
        folder.mkdir()
    shutil.copy(root / "tests" / "programs.sh", script)
    for program, line in (("apt-get", update), ("apt-cache", "exit 100"), ("dpkg-deb", "exit 1")):
        (commands / program).write_text(f"#!/bin/sh\n{line}\n")
        (commands / program).chmod(0o755)
    # None of the programs, but what the script itself needs.
    for program in ("sh", "dirname", "flock", "sort", "mkdir", "rm", "id"):
        found = shutil.which(program)
        assert found
        (commands / program).symlink_to(found)

    done = subprocess.run(
        [script], env={"PATH": str(commands)}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert message in done.stderr
