"""The exporter as a command: build it from the settings, then print once or serve until a signal."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from contextlib import closing

from prometheus_client import generate_latest

from torchmem.exporter import config
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import Settings
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.rundir import RunDirectory
from torchmem.exporter.serve import serve

_log = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Run with parsed flags and return the exit code; raises UsageError for what cannot be used."""
    settings = config.load(arguments.config, {"listen": arguments.listen, "run_dir": arguments.run_dir})
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    exporter = Exporter(
        PyNvml(), RunDirectory(settings.run_dir, settings.ttl_seconds), settings.scrape_deadline_seconds
    )
    with closing(exporter):
        if arguments.once:
            _print(generate_latest(exporter).decode())
        else:
            serve_until_signal(exporter, settings)
    return 0


def _print(text: str) -> None:
    """Write to stdout; a reader that has seen enough, such as `head`, is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def serve_until_signal(exporter: Exporter, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then end at once, also while a scrape waits for the driver."""
    with closing(serve(exporter, *settings.address)) as server, closing(exporter):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _signal, _frame: server.stopped.set())
        _log.info("serving %s/metrics from the run directory %s", server.url, settings.run_dir)
        server.stopped.wait()
