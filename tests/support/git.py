"""Git repositories for tests, with an author and without the user's settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "a"), ("EMAIL", "a@example.com"))
}


@dataclass
class GitRepo:
    """A repository in a folder, made when the folder has none. commits: hashes, oldest first."""

    folder: Path
    commits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *words: str) -> str:
        """Run git in the folder, and return what it prints."""
        environment = os.environ | AUTHOR | {"GIT_CONFIG_GLOBAL": "/dev/null"}
        command = ["git", "-C", str(self.folder), *words]
        return subprocess.check_output(command, env=environment, text=True).strip()

    def commit(self, files: Mapping[str, str], message: str) -> None:
        """Write the files and commit everything."""
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
        self.commits.append(self.git("rev-parse", "HEAD"))
