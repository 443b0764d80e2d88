"""What the page shows while no rank is there, in a real Chromium."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
from support.browser import Page
from support.publishing import own_sample, publish

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.nvml import NvmlDownError
from torchmem.exporter.nvml_reasons import REASONS
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.host.process_table import ProcessStatus, ProcessTable
from torchmem.sample.sample import Process

RANK = ".rank .row"
START = "document.querySelector('.start')"


def without_driver() -> list[object]:
    """Fail as NVML does on a machine without the driver."""
    raise NvmlDownError("library_not_found")


def test_it_says_what_is_missing_and_fills_by_itself(page: Page, tmp_path: Path) -> None:
    """Without driver and rank it says so in words, with three ways to start; then a rank comes."""
    exporter = Exporter(FakeNvml(without_driver), RunDirectory(tmp_path))  # type: ignore[arg-type]
    with closing(exporter), closing(serve(exporter)) as server:
        page.goto(server.url)
        page.wait(f"{START}?.hidden === false")
        start = page.evaluate(f"{START}.innerText")
        nvml = page.evaluate("document.getElementById('nvml').innerText")
        summary = page.evaluate("document.getElementById('summary').textContent")
        assert page.axe() == []

        publish(tmp_path, own_sample())
        page.wait(f"document.querySelector('{RANK}')")
        assert page.evaluate(f"{START}.hidden")

    for command in ("sdk.instrument()", "torchmem run -- python train.py", "torchmem demo"):
        assert command in start
    assert str(tmp_path) in start
    reason = REASONS["library_not_found"]
    assert reason.words[1:] in nvml
    assert reason.next_step in nvml
    assert summary == "No GPU · no rank"


class NoDescriptors(ProcessTable):
    """A process table of an exporter that has no file descriptor left."""

    def locate(self, process: Process) -> ProcessStatus:
        """Raise OSError."""
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_it_says_that_ranks_are_missing(page: Page, tmp_path: Path) -> None:
    """Without file descriptors, the page says so, and what to do."""
    publish(tmp_path, own_sample())
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path, processes=NoDescriptors()))
    with closing(exporter), closing(serve(exporter)) as server:
        page.goto(server.url)
        page.wait("document.getElementById('missing').hidden === false")
        words = page.evaluate("document.getElementById('missing').innerText")
        assert page.axe() == []

    assert "the exporter has no file descriptor left: raise its limit" in words


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_way_can_be_copied(page: Page, tmp_path: Path, number: int) -> None:
    """The button says that the lines are in the clipboard, or which keys put them there."""
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path))
    with closing(exporter), closing(serve(exporter)) as server:
        page.goto(server.url)
        page.wait(f"{START}?.hidden === false")
        page.click(f".ways li:nth-child({number + 1}) .copy")
        copy = f"document.querySelectorAll('.ways .copy')[{number}].textContent"
        assert page.wait(f"{copy} !== 'Copy' && {copy}") in {"Copied", "Press Ctrl+C"}
        page.wait(f"{copy} === 'Copy'")
