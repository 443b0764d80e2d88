"""The interpreter that the core of the allocator tier runs in: --interpreter PYTHON."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, which is known if the folder is named on the command line."""
    parser.addoption("--interpreter", help="run the scripts of test_core.py with this Python")
