"""What the subjects share: exporters, and other processes that use the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.scrape.server import Server, started
from support.exposition import Exposition

MIB = 1 << 20
PYTHON = (sys.executable, "-W", "ignore")
TEXT = "text/plain;version=0.0.4"


def scraped_once() -> Exposition:
    """Return what `torchmem exporter --once` says of this machine and this subject's processes."""
    command = [*PYTHON, "-m", "torchmem.cli", "exporter", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Exposition.of_text(done.stdout)


@contextmanager
def exporter() -> Iterator[Callable[[], Exposition]]:
    """Run an exporter; the function scrapes it."""
    flags = ["--listen", "127.0.0.1:PORT", "--run-dir", os.environ["TORCHMEM_RUN_DIR"]]
    with started([*PYTHON, "-m", "torchmem.cli", "exporter", *flags], os.environ) as server:
        yield lambda: _page(server)


def _page(server: Server) -> Exposition:
    return Exposition.of_text(server.scrape(TEXT).text)


@contextmanager
def other_process(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run code in a process of its own until the block ends; it starts once a line is printed."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*PYTHON, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | dict(environment or {}),
        )
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                errors.seek(0)
                raise RuntimeError(errors.read()[-600:])
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def json_of(
    code: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run code in a process and with a run directory of its own; return its last line, as JSON.

    Raises:
        RuntimeError: it failed; the message is the end of what it wrote to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHMEM_RUN_DIR": folder, **(environment or {})}
        done = subprocess.run(
            [*PYTHON, "-c", code, *arguments],
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    return json.loads(done.stdout.splitlines()[-1])
