"""The name of marker, fixture and settings, and which tests are measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

NAME = "gpu_memory"
DEFAULT_GPU_MODEL = "h100-80gb"


def is_measured(item: pytest.Item) -> bool:
    """Return whether a test has the marker or the fixture."""
    names: Sequence[str] = getattr(item, "fixturenames", ())
    return item.get_closest_marker(NAME) is not None or NAME in names
