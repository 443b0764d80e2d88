"""Git for a bisection: commits, and a worktree of its own, so that the user's is not touched."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchmem.phantom.torch_build import script_interpreter
from torchmem.preflight.run import DeferredSignals
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text

PROBE_SECONDS = 60
_OF_CALLER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
"""Variables that git sets for its hooks, and that name another worktree."""
_FOUND = re.compile(r"^# (?:possible )?first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
# Prints the folders from which Python imports, with those of packages in editable mode.
_PROBE = """
import importlib.metadata, importlib.util, json, os, sys
paths = list(sys.path)
for each in importlib.metadata.distributions():
    direct = json.loads(each.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        for name in (each.read_text("top_level.txt") or "").split():
            spec = importlib.util.find_spec(name)
            found = spec and (spec.submodule_search_locations or [spec.origin])
            paths += map(os.path.dirname, found or ())
print(json.dumps(paths))
"""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit. subject: the first line of its message."""

    hash: str
    short: str
    subject: str


class Repository:
    """The repository around a folder. Its methods raise UsageError if git fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root = Path(self._git("rev-parse", "--show-toplevel").strip()).resolve()
        self.prefix = self._git("rev-parse", "--show-prefix").strip()
        """The folder, relative to the root; "" for the root itself."""

    def commit(self, name: str) -> Commit:
        """Return the commit of a revision."""
        try:
            format_ = ("--no-patch", "--format=%H%x00%h%x00%s")
            found = self._git("show", *format_, f"{name}^{{commit}}", "--")
        except UsageError:
            raise UsageError(
                f"--bisect: {sanitize_text(name)!r} is not a commit of {self.root}."
            ) from None
        hash_, short, subject = found.strip("\n").split("\0")
        return Commit(hash_, short, sanitize_text(subject))

    def commits_between(self, good: Commit, bad: Commit) -> list[str]:
        """Return the commits after `good` up to `bad`, the oldest first."""
        words = ("rev-list", "--reverse", "--topo-order", f"{good.hash}..{bad.hash}")
        return self._git(*words).split()

    def is_ancestor(self, first: Commit, second: Commit) -> bool:
        """Return whether the first commit is in the history of the second."""
        return not self._git("rev-list", "--max-count=1", first.hash, f"^{second.hash}").strip()

    def parent(self, commit: Commit) -> Commit:
        """Return the first parent."""
        return self.commit(f"{commit.hash}^")

    def is_tracked(self, path: str) -> bool:
        """Return whether a path, relative to the folder, is a file of the newest commit."""
        return bool(self._git("ls-files", "--", path).strip())

    def has_changes(self) -> bool:
        """Return whether tracked files differ from the newest commit."""
        return bool(self._git("status", "--porcelain", "--untracked-files=no").strip())

    @contextmanager
    def worktree(self, place: Path, commit: Commit) -> Iterator[Worktree]:
        """Provide a worktree in `place`, which must not exist, and remove it at the end."""
        try:
            with DeferredSignals():
                self._git("worktree", "add", "--detach", str(place), commit.hash)
            yield Worktree(place)
        finally:
            with DeferredSignals():
                if place.exists():
                    self._git("worktree", "remove", "--force", str(place))

    def _git(self, *words: str) -> str:
        return git(self._folder, *words)


class Worktree:
    """A worktree in which nothing but the bisection works. Its methods raise UsageError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_out(self, commit: Commit) -> None:
        """Check out a commit; what a script left in tracked files is lost."""
        git(self.root, "checkout", "--quiet", "--force", "--detach", commit.hash)

    def start(self, good: Commit, bad: Commit) -> None:
        """Start a bisection and check out the first commit to test."""
        git(self.root, "reset", "--quiet", "--hard")
        git(self.root, "bisect", "start", bad.hash, good.hash)

    def mark(self, answer: str) -> None:
        """Tell git that the current commit is "good", "bad" or "skip", and go to the next one."""
        git(self.root, "reset", "--quiet", "--hard")
        git(self.root, "bisect", answer, allowed=(0, 2))  # 2: only skipped commits are left

    def current(self) -> str:
        """Return the hash of the commit to test."""
        return git(self.root, "rev-parse", "HEAD").strip()

    def found(self) -> tuple[str, ...]:
        """Return the first bad commit, or the possible ones if some were skipped; () if unknown."""
        return tuple(_FOUND.findall(git(self.root, "bisect", "log")))


def git(folder: Path, *words: str, allowed: Sequence[int] = (0,)) -> str:
    """Run git without the user's hooks and return what it prints.

    Raises UsageError with its first line of errors, or if there is no git.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_CALLER}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.hooksPath=/dev/null", *words],
            cwd=folder,
            env=environment | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C does not reach it
        )
    except OSError as error:
        raise UsageError(f"--bisect needs git ({error.strerror}): install it.") from error
    if done.returncode not in allowed:
        lines = (done.stderr or done.stdout).strip().splitlines() or [""]
        reason = sanitize_text(lines[0].removeprefix("fatal: ")).rstrip(".")
        raise UsageError(f"--bisect: git {words[0]} failed ({reason}): run it in a repository.")
    return done.stdout


def import_path(
    command: Sequence[str], repository: Repository, worktree: Path, base: Mapping[str, str]
) -> str | None:
    """Return the PYTHONPATH with which a command imports the commit's modules; None if unchanged.

    Folders of the user's worktree from which its Python imports, such as those of packages that
    are installed in editable mode, come first as folders of the bisection's worktree.
    """
    given = [path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path]
    used = [*given, *_imported_from(script_interpreter(command, base), base)]
    root, real = repository.root, (Path(path).resolve() for path in used)
    inner = (path.relative_to(root) for path in real if path.is_relative_to(root))
    moved = dict.fromkeys(str(worktree / path) for path in inner if (worktree / path).is_dir())
    return os.pathsep.join([*moved, *given]) if moved else None


def _imported_from(python: str | None, base: Mapping[str, str]) -> list[str]:
    if python is None:
        return []
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE],
            env=dict(base),
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=True,
        )
        paths = json.loads(probe.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
    return [path for path in paths if isinstance(path, str) and path.startswith("/")]
