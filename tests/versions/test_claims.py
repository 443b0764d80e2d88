"""Every claim about versions of Python and PyTorch follows from results.json."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.generate.versions import results, span, supported
from versions import matrix

from torchmem.phantom.torch_build import INSTALL, MIN_VERSION

PYTHONS, TORCHES = supported(results())


def test_the_classifiers_are_the_supported_pythons(root: Path) -> None:
    """pyproject.toml names each of them, and pip refuses older ones."""
    text = (root / "pyproject.toml").read_text()

    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in text


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_pages_name_the_supported_pythons(root: Path, page: str) -> None:
    """They say from which version to which."""
    assert f"Python {span(PYTHONS)}" in (root / page).read_text()


def test_the_oldest_pytorch_of_the_matrix_is_the_oldest_supported_one() -> None:
    """An older one that fails is neither claimed nor tried again."""
    assert "{}.{}".format(*matrix.OLDEST_TORCH) == TORCHES[0]


def test_other_versions_in_use_are_supported(root: Path) -> None:
    """The phantom GPU's oldest PyTorch, what its message installs, and the exporter's image."""
    (python,) = re.findall(r"=python:(3\.\d+)", (root / "exporter" / "Dockerfile").read_text())
    (installed,) = re.findall(r"torch===(\d+\.\d+)", INSTALL)

    assert {"{}.{}".format(*MIN_VERSION), installed} <= set(TORCHES)
    assert python in PYTHONS


def test_every_supported_python_is_in_the_matrix() -> None:
    """`make test-versions` tries all of them again."""
    assert set(PYTHONS) <= set(matrix.PYTHONS)
