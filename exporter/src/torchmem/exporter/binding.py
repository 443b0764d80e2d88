"""Which installed package the module `pynvml` comes from.

nvidia-ml-py provides it. nvidia-ml-py3, and pynvml before 12, install an old module of the same
name over it or beside it, because other tools still depend on them.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    PackagePath,
    distributions,
    requires,
)
from pathlib import Path
from typing import Any

DISTRIBUTION = "nvidia-ml-py"
REASON = "outdated_pynvml"
_REQUIREMENT = re.compile(rf"({DISTRIBUTION}>=([\d.]+))")
_FILES = {"pynvml.py", "pynvml/__init__.py"}


@dataclass(frozen=True, slots=True)
class OutdatedBinding:
    """A module `pynvml` that lacks functions: its package, or None where that is unknown."""

    package: str | None
    version: str | None

    def __str__(self) -> str:
        package = f"{self.package} {self.version}" if self.package else "an unknown package"
        return (
            f"the module pynvml comes from {package}, which is too old: "
            "some values of NVML are missing"
        )

    @property
    def remedy(self) -> str:
        """The commands that replace it. Removing the package removes the shared file too."""
        requirement = _requirement()[0]
        install = f"pip install --force-reinstall --no-deps '{requirement}'"
        if self.package in {None, DISTRIBUTION}:
            return install
        return f"pip uninstall --yes {self.package} && {install}"


def outdated_binding(
    module: Any, installed: Iterable[Distribution] | None = None
) -> OutdatedBinding | None:
    """Return what is wrong with this `pynvml`; None if it is nvidia-ml-py's and new enough.

    `installed` are the distributions to look in, by default all of this Python's path.
    """
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    owner = _owner(Path(path), distributions() if installed is None else installed)
    if owner is None:
        is_complete = hasattr(module, "nvmlMemory_v2")
        return None if is_complete else OutdatedBinding(None, None)
    is_ours = owner.name == DISTRIBUTION and _numbers(owner.version) >= _requirement()[1]
    return None if is_ours else OutdatedBinding(owner.name, owner.version)


def _owner(path: Path, installed: Iterable[Distribution]) -> Distribution | None:
    """Return the distribution that has written the file; several may have listed it."""
    candidates = list(_candidates(path, installed))
    if not candidates:
        return None
    digest = hashlib.sha256(path.read_bytes()).digest()
    recorded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    for candidate, file in candidates:
        if file.hash and (file.hash.mode, file.hash.value) == ("sha256", recorded):
            return candidate
    return candidates[0][0]


def _candidates(
    path: Path, installed: Iterable[Distribution]
) -> Iterator[tuple[Distribution, PackagePath]]:
    for distribution in installed:
        if "pynvml" not in (distribution.read_text("RECORD") or "pynvml"):
            continue  # without parsing all files of the environment
        for file in distribution.files or ():
            if str(file) in _FILES and _is_same(path, str(distribution.locate_file(file))):
                yield distribution, file


def _is_same(path: Path, other: str) -> bool:
    with suppress(OSError):
        return path.samefile(other)
    return False


def _requirement() -> tuple[str, tuple[int, ...]]:
    """Return this package's requirement, and the version that it names."""
    with suppress(PackageNotFoundError):  # run from a source tree
        for text in requires("torchmem") or ():
            match = _REQUIREMENT.match(text)
            if match:
                return match[1], _numbers(match[2])
    return DISTRIBUTION, ()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
