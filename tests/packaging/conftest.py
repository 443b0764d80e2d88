"""The chart as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.helm_chart import CHART


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The chart as it is packaged, loaded by Helm."""
    helm = pytest.importorskip(
        "helm_python", reason="Helm's engine has no package for this platform"
    )
    archive = helm.package(CHART, destination=tmp_path_factory.mktemp("chart"))
    with helm.Chart.load(archive) as loaded:
        yield loaded
