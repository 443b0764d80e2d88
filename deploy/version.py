"""The version of this tree, from git: a commit's wheel, chart and image have names of their own.

python deploy/version.py          # 0.1.1.dev14+g1a2b3c4d5e of the wheel; 0.1.0 at the tag v0.1.0
python deploy/version.py chart    # 0.1.1-dev.14+g1a2b3c4d5e, a semantic version as Helm requires
python deploy/version.py image    # 0.1.1.dev14-g1a2b3c4d5e, as the tag of an image has no +

What is there first counts: the variable TORCHMEM_VERSION, for a build without .git, as in a
container; the metadata of a source distribution; git; and what `git archive` wrote into this file.
The build runs this file (`tool.hatch.version` in pyproject.toml): it imports nothing of torchmem.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "TORCHMEM_VERSION"
# Tags of releases only. .gitattributes makes `git archive` replace $Format:…$.
_ARCHIVED = "$Format:%(describe:tags=true,match=v[0-9]*,exclude=*-*,abbrev=10) %H$"
_DESCRIBE = ("describe", "--tags", "--match=v[0-9]*", "--exclude=*-*", "--abbrev=10")
# v0.1.0 at a tag, v0.1.0-14-g1a2b3c4d5e after it.
_DESCRIBED = re.compile(r"v(\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?)(?:-(\d+)-g[0-9a-f]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40,}")


def version(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """Return the version of a tree as of PEP 440."""
    return (
        environment.get(VARIABLE)
        or _of_source_distribution(root)
        or _of_checkout(root)
        or _of_archive(root)
        or f"{_upcoming(root)}.dev0+unknown"
    )


def as_chart(version: str) -> str:
    """Return a version as the semantic version of the chart."""
    public, plus, commit = version.partition("+")
    number, *before = re.findall(r"\d+\.\d+\.\d+|[a-z]+|\d+", public)
    return "-".join(filter(None, [number, ".".join(before)])) + plus + commit


def as_image_tag(version: str) -> str:
    """Return a version as the tag of an image."""
    return version.replace("+", "-")


def _of_source_distribution(root: Path) -> str | None:
    metadata = root / "PKG-INFO"
    text = metadata.read_text(encoding="utf-8") if metadata.exists() else ""
    found = re.search(r"^Version: (.+)$", text, re.MULTILINE)
    return found[1] if found else None


def _of_checkout(root: Path) -> str | None:
    """Return the version by git. It is not that of another repository that contains the tree."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None or _git(root, "rev-parse", "--show-prefix"):
        return None
    described = _git(root, *_DESCRIBE) or ""
    # A shallow clone counts the commits that it has.
    commits = _git(root, "rev-list", "--count", "HEAD") or "0"
    changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    return _of_commit(root, described, commit, commits, changed)


def _of_archive(root: Path) -> str | None:
    described, _, commit = _ARCHIVED.rpartition(" ")
    return _of_commit(root, described, commit) if _COMMIT.fullmatch(commit) else None


def _of_commit(
    root: Path, described: str, commit: str, commits: str = "0", changed: bool = False
) -> str:
    """Return a release's version at its tag, else one that is below that of the next release.

    commits: how many there are, which counts without a tag. changed: files differ from the commit.
    """
    found = _DESCRIBED.fullmatch(described)
    if found and not found[2] and not changed:
        return found[1]
    number = _after(found[1]) if found else _upcoming(root)
    count = (found[2] or "0") if found else commits
    return f"{number}.dev{count}+g{commit[:10]}{'.dirty' if changed else ''}"


def _after(release: str) -> str:
    """Return the lowest version after a release: 0.1.0 → 0.1.1, 0.2.0rc1 → 0.2.0rc2."""
    return re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), release)


def _upcoming(root: Path) -> str:
    """Return the number of the changelog's newest section, which counts without a tag."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(r"^## \[(\d+\.\d+\.\d+)\]", text, re.MULTILINE)
    return found[1] if found else "0.0.0"


def _git(root: Path, *words: str) -> str | None:
    """Return what git prints, or None if it fails or there is none.

    The tree may belong to another user, as in a container; its build runs its code anyway.
    """
    command = ["git", "-C", str(root), "--no-optional-locks", "-c", "safe.directory=*", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main(arguments: list[str] | None = None) -> int:
    """Print the version, as the wheel, the chart or the image has it."""
    forms: dict[str, Callable[[str], str]] = {
        "wheel": str,
        "chart": as_chart,
        "image": as_image_tag,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("form", nargs="?", choices=forms, default="wheel", help="whose version")
    print(forms[parser.parse_args(arguments).form](version()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
