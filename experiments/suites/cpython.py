"""CPython's own tests of how programs and processes start, run and end."""

from __future__ import annotations

from pathlib import Path

from experiments.suites.table import Suite

# Some releases install only the common part of test_multiprocessing_fork and its like. Of it, the
# tests of how processes start and end; with all others they take half an hour in each way.
_MULTIPROCESSING = """
from test import _test_multiprocessing
_test_multiprocessing.install_tests_in_module_dict(globals(), "{method}")
kept = ("TestProcess", "StartMethod", "Fork", "Subclassing", "Tracker", "CloseFds", "SysArgv")
for name, value in [*globals().items()]:
    if isinstance(value, type) and not any(word in name for word in kept):
        del globals()[name]
"""
_METHODS = ("fork", "spawn", "forkserver")

CPYTHON = Suite(
    "CPython",
    "",
    "",
    (),
    (
        "test.test_import",
        "test.test_importlib",
        "test.test_site",
        "test.test_zipimport",
        "test.test_pkgutil",
        "test.test_runpy",
        "test.test_cmd_line",
        "test.test_multiprocessing_main_handling",
        "test.test_subprocess",
        "test.test_signal",
        "test.test_threading",
        "test.test_faulthandler",
        *(f"test_of_{method}" for method in _METHODS),
    ),
    gpus=0,
)
"""Of the Python that runs it; it has no checkout."""


def write_tests(folder: Path) -> None:
    """Write the tests of multiprocessing, which are made from its common part."""
    for method in _METHODS:
        (folder / f"test_of_{method}.py").write_text(_MULTIPROCESSING.format(method=method))
