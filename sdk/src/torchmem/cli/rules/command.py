"""What `torchmem rules` does, by its flags."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmem.cli.rules.render import HEADER, differences, render
from torchmem.cli.rules.thresholds import defaults, defaults_text, load
from torchmem.core.errors import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Print the defaults, write the rules, check those that are there, or print them all. Raises UsageError."""
    if arguments.defaults:
        sys.stdout.write(defaults_text())
        return 0
    rendered = render(load(arguments.thresholds) if arguments.thresholds else defaults())
    if arguments.check:
        return _check(arguments.check, rendered)
    if arguments.out is None:
        raise UsageError("Say where the rules shall go: torchmem rules --out DIR.")
    _write(arguments.out, rendered)
    print(f"{len(rendered)} files in {arguments.out}; check them with: promtool check rules {arguments.out}/*.yml")
    return 0


def _check(folder: Path, rendered: dict[str, str]) -> int:
    different = differences(rendered, _present(folder))
    if different:
        print(f"torchmem: {folder} is not what the thresholds give ({', '.join(different)}): run `torchmem rules "
              f"--out {folder}` with the same thresholds.", file=sys.stderr)  # fmt: skip
    return 1 if different else 0


def _write(folder: Path, rendered: dict[str, str]) -> None:
    """Write every file, and remove those that an earlier rendering left and this one has no more."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _present(folder).keys() - rendered.keys():
            (folder / name).unlink()
        for name, text in rendered.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write the rules to {folder}: {error.strerror}; give another --out.") from error


def _present(folder: Path) -> dict[str, str]:
    """The rules in a folder that were rendered by us; files of others are left alone."""
    found = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("*.yml")}
    return {name: text for name, text in found.items() if text.startswith(HEADER)}
