"""The lists of packages in pyproject.toml are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NEED_THE_EXTRA = {"exporter", "demo", "doctor", "mcp", "top", "commands"}


def packages(root: Path) -> set[str]:
    """Return the packages of all source roots."""
    return {path.parent.name for path in root.glob("*/src/torchmem/*/*.py")}


def import_linter(root: Path) -> dict[str, Any]:
    """Return the section of import-linter."""
    tomllib = pytest.importorskip("tomllib")
    loaded: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())
    return loaded["tool"]["importlinter"]  # type: ignore[no-any-return]


def named(modules: list[str]) -> set[str]:
    """Return the packages that a list names, wholly or by one of their modules."""
    return set(re.findall(r"torchmem\.(\w+)", " ".join(modules)))


def contract(root: Path, name: str) -> dict[str, Any]:
    """Return the contract of this name."""
    (found,) = [item for item in import_linter(root)["contracts"] if item["name"] == name]
    return found  # type: ignore[no-any-return]


def test_every_package_is_checked(root: Path) -> None:
    """import-linter reads every package and knows its layer."""
    layers = contract(root, "imports point one way")["layers"]

    assert packages(root) == named(import_linter(root)["root_packages"])
    assert packages(root) == named(layers)


def test_no_package_escapes_a_contract(root: Path) -> None:
    """A new package keeps out of the SDK's private modules, and needs no extra unless listed."""
    private = contract(root, "nothing outside the SDK imports a private module of it")
    base = contract(root, "the base install needs neither the exporter nor its extra")

    assert packages(root) - {"sdk"} == named(private["source_modules"])
    assert packages(root) - NEED_THE_EXTRA == named(base["source_modules"])
