"""Which installed package the module `pynvml` comes from.

nvidia-ml-py provides it. nvidia-ml-py3, and pynvml before 12, install an old module of the same
name over it or beside it, because other tools still depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

DISTRIBUTION = "nvidia-ml-py"
REASON = "outdated_pynvml"
_REQUIREMENT = re.compile(rf"({DISTRIBUTION}>=([\d.]+))")
_FIRST_WITHOUT_MODULE = (12,)  # pynvml 12 has no module of its own, but requires nvidia-ml-py


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


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version_of(package)
    return None


def outdated_binding(
    module: Any, installed: Callable[[str], str | None] = installed_version
) -> OutdatedBinding | None:
    """Return what is wrong with this `pynvml`; None if it is nvidia-ml-py's and new enough.

    nvidia-ml-py is the file pynvml.py. So is nvidia-ml-py3, which lacks version 2 of the memory
    call; pynvml before 12 is a folder. `installed` returns the version of a package.
    """
    other = installed("pynvml")
    is_folder = Path(getattr(module, "__file__", None) or "").name == "__init__.py"
    if is_folder and other and _numbers(other) < _FIRST_WITHOUT_MODULE:
        return OutdatedBinding("pynvml", other)
    own, older = installed(DISTRIBUTION), installed("nvidia-ml-py3")
    is_complete = hasattr(module, "nvmlMemory_v2")
    if older and not is_complete:
        return OutdatedBinding("nvidia-ml-py3", older)
    if own and _numbers(own) < _requirement()[1]:
        return OutdatedBinding(DISTRIBUTION, own)
    return None if is_complete else OutdatedBinding(None, None)


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
