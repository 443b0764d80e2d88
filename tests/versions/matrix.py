"""Which Python is tried with which PyTorch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from versions.environment import InstallError, output, pip_versions

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = (2, 1)
# Every minor release of PyTorch is tried on this Python, the newest one on all.
ALL_TORCHES_ON = "3.11"
Report = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter: minor version such as 3.11, full version, and its path."""

    minor: str
    version: str
    path: str


def pairs(
    pythons: Iterable[str], torches: Iterable[str], report: Report
) -> Iterator[tuple[Python, str]]:
    """Yield each Python and version of PyTorch to try.

    pythons: minor versions. torches: releases to try on each, otherwise those of the matrix.
    report: gets one line for each Python that is left out, with the reason.
    """
    wanted = list(torches)
    for minor in pythons:
        python = found(minor)
        if python is None:
            report(f"Python {minor}: not tried, it is not installed (pyenv install {minor})")
            continue
        try:
            available = releases(pip_versions(python.path, "torch"))
        except InstallError as error:
            report(f"Python {minor}: not tried, pip finds no PyTorch ({error})")
            continue
        for torch in wanted or (available if minor == ALL_TORCHES_ON else available[:1]):
            yield python, torch


def releases(versions: Iterable[str]) -> list[str]:
    """Return the newest patch release of each minor one from the oldest claimed, newest first."""
    newest: dict[tuple[int, int], tuple[int, str]] = {}
    for version in versions:
        numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)  # no +cpu, no release candidate
        if numbers and (minor := (int(numbers[1]), int(numbers[2]))) >= OLDEST_TORCH:
            newest[minor] = max(newest.get(minor, (-1, "")), (int(numbers[3]), version))
    return [newest[minor][1] for minor in sorted(newest, reverse=True)]


def found(minor: str) -> Python | None:
    """Return a Python of pyenv or on PATH with this minor version that runs."""
    for path in _candidates(minor):
        try:
            version = output(path, "-c", "import platform; print(platform.python_version())")
        except (InstallError, OSError):  # pyenv's shims exist for Pythons that are not enabled
            continue
        if version.startswith(f"{minor}."):
            return Python(minor, version.strip(), path)
    return None


def _candidates(minor: str) -> Iterator[str]:
    folders = Path.home().glob(f".pyenv/versions/{minor}.*")
    yield from (f"{folder}/bin/python" for folder in sorted(folders, key=_patch, reverse=True))
    path = shutil.which(f"python{minor}")
    if path:
        yield path


def _patch(folder: Path) -> int:
    number = re.fullmatch(r"\d+\.\d+\.(\d+)", folder.name)
    return int(number[1]) if number else -1
