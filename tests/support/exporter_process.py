"""The exporter as a process that serves on loopback, on a node of the fake NVML."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.exposition import Exposition
from support.fake_nvml import FakeNode
from support.waiting import until


class ExporterProcess:
    """A running exporter."""

    def __init__(self, popen: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.popen = popen
        self.url = url
        self._log = log

    def get(self, path: str = "/metrics") -> str:
        """Return the body of an answer."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:  # noqa: S310 - loopback
            return str(answer.read().decode())

    def scrape(self) -> Exposition:
        """Scrape and parse the metrics."""
        return Exposition.of_text(self.get())

    @property
    def messages(self) -> str:
        """Its log."""
        return self._log.read_text()


@contextmanager
def exporter_process(
    node: FakeNode, run_dir: Path, environment: Mapping[str, str] | None = None, **settings: float
) -> Iterator[ExporterProcess]:
    """Start an exporter on a free port, and stop it with SIGTERM.

    A scrape waits 30 s for the driver by default.
    """
    settings = {"scrape_deadline_seconds": 30, **settings}
    folder = node.file.parent
    config, log = folder / "exporter.yml", folder / "exporter.log"
    config.write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    flags = ["--listen", "127.0.0.1:0", "--run-dir", str(run_dir), "--config", str(config)]
    command = [sys.executable, "-m", "torchmem.cli", "exporter", *flags]
    variables = {**node.environment(), **(environment or {})}
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, env=variables) as popen:
        try:
            yield ExporterProcess(popen, until(lambda: _address(popen, log)), log)
        finally:
            popen.terminate()
            popen.wait(60)


def _address(popen: subprocess.Popen[bytes], log: Path) -> str | None:
    assert popen.poll() is None, log.read_text()
    match = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
    return match[0] if match else None
