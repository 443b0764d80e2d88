"""A module `pynvml` of another package: it is named with the commands that replace it."""

from __future__ import annotations

import base64
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distributions
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

OLD = b"# an old binding\n"
NEW = b"nvmlMemory_v2 = 1\n"


class Site:
    """A folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, name: str, version: str, file: str, content: bytes) -> None:
        """Write the package's file over that of another one, and what pip records of it."""
        path = self._folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        recorded = self._folder / f"{name.replace('-', '_')}-{version}.dist-info"
        recorded.mkdir()
        recorded.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        recorded.joinpath("RECORD").write_text(f"{file},sha256={digest},{len(content)}\n")

    def outdated(self, file: str = "pynvml.py", **functions: object) -> OutdatedBinding | None:
        """Return what is wrong with the module in that file."""
        module = SimpleNamespace(__file__=str(self._folder / file), **functions)
        return outdated_binding(module, self._distributions())

    def _distributions(self) -> Iterator[Distribution]:
        return iter(distributions(path=[str(self._folder)]))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return an environment with today's nvidia-ml-py."""
    site = Site(tmp_path)
    site.install("nvidia-ml-py", "13.580.65", "pynvml.py", NEW)
    return site


def test_nvidias_binding_is_in_order(site: Site) -> None:
    """nvidia-ml-py of a required version is complete, here and in this environment."""
    assert site.outdated() is None
    assert outdated_binding(pynvml) is None


def test_a_package_that_replaced_the_file_is_named(site: Site) -> None:
    """Both packages list the file; the one whose content it has is the one to remove."""
    site.install("nvidia-ml-py3", "7.352.0", "pynvml.py", OLD)

    found = site.outdated()
    assert OutdatedBinding("nvidia-ml-py3", "7.352.0") == found
    assert found
    assert found.remedy.startswith(
        "pip uninstall --yes nvidia-ml-py3 && "
        "pip install --force-reinstall --no-deps 'nvidia-ml-py>="
    )


def test_a_package_that_hides_the_file_is_named(site: Site) -> None:
    """The folder pynvml of the package pynvml comes before the file of nvidia-ml-py."""
    site.install("pynvml", "11.5.3", "pynvml/__init__.py", OLD)

    assert OutdatedBinding("pynvml", "11.5.3") == site.outdated("pynvml/__init__.py")


def test_an_old_nvidia_ml_py_is_updated(tmp_path: Path) -> None:
    """An nvidia-ml-py below the required version is not removed but updated."""
    site = Site(tmp_path)
    site.install("nvidia-ml-py", "11.525.150", "pynvml.py", OLD)

    found = site.outdated()
    assert found
    assert found.remedy.startswith("pip install --force-reinstall")


def test_a_binding_of_no_package_counts_by_its_functions(tmp_path: Path) -> None:
    """A file that no package lists is too old only if it lacks a function that is needed."""
    (tmp_path / "pynvml.py").write_bytes(OLD)

    assert OutdatedBinding(None, None) == Site(tmp_path).outdated()
    assert Site(tmp_path).outdated(nvmlMemory_v2=1) is None


class OldBinding(SimpleNamespace):
    """Today's binding without what version 2 of the memory call needs."""

    def __init__(self, module: object, file: Path) -> None:
        super().__init__(
            **{name: value for name, value in vars(module).items() if name != "nvmlMemory_v2"}
        )
        self.__file__ = str(file)


def test_an_outdated_binding_is_a_reason_and_memory_is_read(
    tmp_path: Path, open_exporter: Callable[..., Exporter]
) -> None:
    """`nvml_up` is 1 with the reason; used + free = total comes from version 1 of the call."""
    node = FakeNode(tmp_path / "node", "h100_busy")
    node.nvml()
    (tmp_path / "pynvml.py").write_bytes(OLD)
    module = OldBinding(binding(node.library()), tmp_path / "pynvml.py")
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
    (tmp_path / "pynvml.py").write_bytes(OLD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml")
    library = NvmlLibrary()

    with caplog.at_level(logging.WARNING):
        assert library.module is library.module
    (message,) = caplog.messages
    assert "pip install --force-reinstall" in message
