"""A module `pynvml` of another package: it is named with the commands that replace it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from support.exposition import scrape
from support.fake_nvml import FakeNode, binding

from torchmem.exporter.binding import OutdatedBinding, outdated_binding
from torchmem.exporter.collect import Exporter
from torchmem.exporter.driver import PyNvml
from torchmem.exporter.nvml import NvmlLibrary

OURS = {"nvidia-ml-py": "13.580.65"}


def outdated(
    installed: Mapping[str, str], file: str = "pynvml.py", **functions: object
) -> OutdatedBinding | None:
    """Return what is wrong with the module in this file, beside these packages."""
    return outdated_binding(SimpleNamespace(__file__=file, **functions), installed.get)


def test_nvidias_binding_is_in_order() -> None:
    """nvidia-ml-py of a required version is complete, here and in this environment."""
    assert outdated(OURS, nvmlMemory_v2=1) is None
    assert outdated({**OURS, "pynvml": "12.0.0"}, nvmlMemory_v2=1) is None
    assert outdated_binding(pynvml) is None


def test_a_package_that_replaced_the_file_is_named() -> None:
    """nvidia-ml-py3 writes its old file over that of nvidia-ml-py; it is the one to remove."""
    found = outdated({**OURS, "nvidia-ml-py3": "7.352.0"})

    assert OutdatedBinding("nvidia-ml-py3", "7.352.0") == found
    assert found
    assert found.remedy.startswith(
        "pip uninstall --yes nvidia-ml-py3 && "
        "pip install --force-reinstall --no-deps 'nvidia-ml-py>="
    )


def test_a_package_that_hides_the_file_is_named() -> None:
    """The folder pynvml of the package pynvml comes before the file of nvidia-ml-py."""
    installed = {**OURS, "pynvml": "11.5.3"}

    found = outdated(installed, "/site-packages/pynvml/__init__.py", nvmlMemory_v2=1)
    assert OutdatedBinding("pynvml", "11.5.3") == found


def test_an_old_nvidia_ml_py_is_updated() -> None:
    """An nvidia-ml-py below the required version is not removed but updated."""
    old = {"nvidia-ml-py": "11.450.51"}
    for found in (outdated(old), outdated(old, nvmlMemory_v2=1)):
        assert found
        assert found.remedy.startswith("pip install --force-reinstall")


def test_a_binding_of_no_package_counts_by_its_functions() -> None:
    """A file that no package lists is too old only if it lacks a function that is needed."""
    assert OutdatedBinding(None, None) == outdated({}) == outdated(OURS)
    assert outdated({}, nvmlMemory_v2=1) is None


class OldBinding(SimpleNamespace):
    """Today's binding without what version 2 of the memory call needs."""

    def __init__(self, module: object) -> None:
        super().__init__(
            **{name: value for name, value in vars(module).items() if name != "nvmlMemory_v2"}
        )


def test_an_outdated_binding_is_a_reason_and_memory_is_read(
    tmp_path: Path, open_exporter: Callable[..., Exporter]
) -> None:
    """`nvml_up` is 1 with the reason; used + free = total comes from version 1 of the call."""
    node = FakeNode(tmp_path / "node", "h100_busy")
    node.nvml()
    module = OldBinding(binding(node.library()))
    exposition = scrape(open_exporter(PyNvml(NvmlLibrary(module))))

    assert exposition.value("nvml_up", reason="outdated_pynvml") == 1.0
    total, used, free = (
        exposition.by("gpu", f"nvml_memory_{part}_bytes")["0"] for part in ("total", "used", "free")
    )
    assert total == used + free
    assert exposition.by("gpu", "nvml_memory_reserved_bytes") == {}


def test_an_outdated_binding_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning has the commands that replace it."""
    (tmp_path / "pynvml.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml")
    library = NvmlLibrary()

    with caplog.at_level(logging.WARNING):
        assert library.module is library.module
    (message,) = caplog.messages
    assert "pip install --force-reinstall" in message
