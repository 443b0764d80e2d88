"""A release: check that a tag can be published, or write its image into the chart.

python deploy/release.py check v0.2.0    # at the tag; prints the release notes
python deploy/release.py image NAME@sha256:…    # writes the published image into the chart
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VALUES = "deploy/helm/torchmem/values.yaml"
_REPOSITORY = re.compile(r"^  repository: .*$", re.MULTILINE)
_DIGEST = re.compile(r"^  digest: .*$", re.MULTILINE)


class ReleaseError(Exception):
    """What must be changed before this version can be released."""


def check(tag: str, root: Path = ROOT) -> str:
    """Return the release notes of a tag; raise ReleaseError if it cannot be published."""
    released = tag.removeprefix("v")
    found = runpy.run_path(str(root / "deploy" / "version.py"))["version"](root, {})
    if found != released:
        raise ReleaseError(
            f"the checkout has the version {found}, not {released}: check out the tag {tag} of a "
            "version such as 0.2.0 or 0.2.0rc1, and change nothing."
        )
    section = re.search(
        rf"^## \[{re.escape(released)}\][^\n]*\n(.*?)(?=^## \[|\Z)",
        (root / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    if section is None or not section[1].strip():
        raise ReleaseError(f"CHANGELOG.md says nothing about {released}: describe it there.")
    return section[1].strip()


def name_image(image: str, root: Path = ROOT) -> None:
    """Write an image NAME@DIGEST as the default of the chart, which then needs no values.

    Raises ReleaseError if it has no digest, because a tag can be moved.
    """
    parts = re.fullmatch(r"([a-z0-9][a-z0-9./:_-]*)@(sha256:[0-9a-f]{64})", image)
    if parts is None:
        raise ReleaseError(f"{image!r} is not an image with a digest: give NAME@sha256:….")
    path = root / VALUES
    text = path.read_text(encoding="utf-8")
    text = re.sub(_REPOSITORY, f"  repository: {parts[1]}", text, count=1)
    text = re.sub(_DIGEST, f'  digest: "{parts[2]}"', text, count=1)
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Return 0, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["check", "image"])
    parser.add_argument("what", help="the tag v0.2.0, or the image with its digest")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "check":
            print(check(parsed.what, root))
        else:
            name_image(parsed.what, root)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
