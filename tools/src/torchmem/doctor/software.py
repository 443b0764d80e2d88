"""Checks of what is installed: torchmem, PyTorch, and the allocator settings in the environment."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from torchmem.allocator.settings import VARIABLES, parse_alloc_conf, rejection_reason
from torchmem.doctor.check import Check
from torchmem.explain.remedies import NEW_VARIABLE, conf_variable, torch_version

MIN_TORCH = (2, 1)
EXTRA_MODULES = ("pynvml", "psutil", "yaml", "starlette", "h11", "msgspec", "bcrypt")

InstalledVersion = Callable[[str], str | None]
"""Returns the version of an installed distribution, or None."""


def installed_version(name: str) -> str | None:
    """Return the version of a distribution without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def has_module(name: str) -> bool:
    """Return whether a module can be imported."""
    return find_spec(name) is not None


def checks(
    environment: Mapping[str, str],
    installed: InstalledVersion = installed_version,
    importable: Callable[[str], bool] = has_module,
) -> Iterator[Check]:
    """Yield the checks of the software. torch is not imported, which would take seconds."""
    yield _torchmem(installed, importable)
    torch = installed("torch")
    yield _torch(torch)
    yield from _allocator_settings(environment, torch)


def _torchmem(installed: InstalledVersion, importable: Callable[[str], bool]) -> Check:
    found = f"{installed('torchmem')}, Python {platform.python_version()}"
    missing = [name for name in EXTRA_MODULES if not importable(name)]
    if missing:
        return Check(
            "torchmem",
            "note",
            f"{found}, without the exporter's packages ({', '.join(missing)})",
            "To run the exporter here: pip install 'torchmem[exporter]'.",
        )
    return Check("torchmem", "ok", f"{found}, with the exporter's packages")


def _torch(found: str | None) -> Check:
    if found is None:
        return Check(
            "PyTorch",
            "note",
            "not installed in this environment",
            "Run `torchmem doctor` with the Python of the training job to check it too.",
        )
    if torch_version({"torch": found}) < MIN_TORCH:
        least = ".".join(map(str, MIN_TORCH))
        return Check(
            "PyTorch", "problem", f"{found} is older than {least}", f"Update PyTorch to {least}."
        )
    if found.endswith("+cpu"):
        return Check(
            "PyTorch",
            "note",
            f"{found} is a build without CUDA, so there is no GPU memory to observe",
            "To train on a GPU, install a build with CUDA: see pytorch.org.",
        )
    return Check("PyTorch", "ok", found)


def _allocator_settings(environment: Mapping[str, str], torch: str | None) -> Iterator[Check]:
    """Yield a check for each variable that sets the allocator."""
    given = [name for name in VARIABLES if environment.get(name)]
    if not given:
        yield Check("allocator settings", "ok", "none in the environment: PyTorch's defaults")
    for name in given:
        text = environment[name]
        reason = rejection_reason(text)
        if name == NEW_VARIABLE and torch and conf_variable({"torch": torch}) != NEW_VARIABLE:
            yield Check(
                name,
                "problem",
                f"{text}: PyTorch reads this variable from 2.10 on, so it has no effect here",
                f"Set {conf_variable({'torch': torch})} instead.",
            )
        elif reason is not None and "backend" not in parse_alloc_conf(text):
            yield Check(
                name, "problem", f"PyTorch rejects it: {reason}", f"Correct or unset {name}."
            )
        else:
            yield Check(name, "ok", text)
