"""A release: check that every file names its version, write a new one, or name its image.

python deploy/release.py check v0.2.0    # before a tag is published; prints the release notes
python deploy/release.py bump 0.2.0      # writes the version, and dates the changelog
python deploy/release.py image NAME@sha256:…    # writes the published image into the chart
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# File → the pattern before its version. The first one is the source.
PLACES = {
    "pyproject.toml": r'^version = "',
    "exporter/Dockerfile": r'org\.opencontainers\.image\.version="',
    "docker-compose.yml": r"localhost/torchmem-exporter:",
    "deploy/helm/torchmem/Chart.yaml": r"^(?:version|appVersion): ",
    "deploy/kubernetes/base/kustomization.yaml": r"newTag: ",
}
VALUES = "deploy/helm/torchmem/values.yaml"
_REPOSITORY = re.compile(r"^  repository: .*$", re.MULTILINE)
_DIGEST = re.compile(r"^  digest: .*$", re.MULTILINE)
_NUMBER = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
_UNRELEASED = "## [Unreleased]"


class ReleaseError(Exception):
    """What must be changed before this version can be released."""


def check(version: str, root: Path = ROOT) -> str:
    """Return the release notes of a version; raise ReleaseError if it is not ready."""
    for name, before in PLACES.items():
        found = re.findall(f"(?:{before})({_NUMBER})", _read(root / name), re.MULTILINE)
        if set(found) != {version}:
            raise ReleaseError(
                f"{name} has the version {', '.join(found) or 'of no release'}, not {version}: "
                f"run python deploy/release.py bump {version}."
            )
    section = re.search(
        rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)",
        _read(root / "CHANGELOG.md"),
        re.MULTILINE | re.DOTALL,
    )
    if section is None or not section[1].strip():
        raise ReleaseError(f"CHANGELOG.md says nothing about {version}: describe it there.")
    return section[1].strip()


def bump(version: str, root: Path = ROOT, today: dt.date | None = None) -> None:
    """Write a version everywhere, and turn what is unreleased in the changelog into its section.

    Raises ReleaseError for a version that Python packages do not accept.
    """
    if not re.fullmatch(_NUMBER, version):
        raise ReleaseError(f"{version!r} is not a version: give one such as 0.2.0 or 0.2.0rc1.")
    for name, before in PLACES.items():
        text = re.sub(
            f"({before}){_NUMBER}", rf"\g<1>{version}", _read(root / name), flags=re.MULTILINE
        )
        (root / name).write_text(text, encoding="utf-8")
    changelog = _read(root / "CHANGELOG.md")
    if f"## [{version}]" not in changelog:
        date = today or dt.datetime.now(dt.timezone.utc).date()
        dated = f"{_UNRELEASED}\n\n## [{version}] - {date}"
        changelog = changelog.replace(_UNRELEASED, dated, 1)
        (root / "CHANGELOG.md").write_text(changelog, encoding="utf-8")


def name_image(image: str, root: Path = ROOT) -> None:
    """Write an image NAME@DIGEST as the default of the chart, which then needs no values.

    Raises ReleaseError if it has no digest, because a tag can be moved.
    """
    parts = re.fullmatch(r"([a-z0-9][a-z0-9./:_-]*)@(sha256:[0-9a-f]{64})", image)
    if parts is None:
        raise ReleaseError(f"{image!r} is not an image with a digest: give NAME@sha256:….")
    path = root / VALUES
    text = re.sub(_REPOSITORY, f"  repository: {parts[1]}", _read(path), count=1)
    text = re.sub(_DIGEST, f'  digest: "{parts[2]}"', text, count=1)
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Return 0, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["check", "bump", "image"])
    parser.add_argument("what", help="0.2.0, or the tag v0.2.0; or the image with its digest")
    parsed = parser.parse_args(arguments)
    version = parsed.what.removeprefix("v")
    try:
        if parsed.command == "check":
            print(check(version, root))
        elif parsed.command == "bump":
            bump(version, root)
        else:
            name_image(parsed.what, root)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
