"""The exporter as a command: build it from the settings, then print once or serve until a signal."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from contextlib import closing
from dataclasses import fields
from functools import partial

from prometheus_client import generate_latest

from torchmem.exporter import config, systemd
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import Settings
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.rundir import RunDirectory
from torchmem.exporter.serve import serve
from torchmem.exporter.web.live import LiveConfig
from torchmem.sample.errors import TorchmemError

_log = logging.getLogger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT)


def run(arguments: argparse.Namespace) -> int:
    """Run with parsed flags and return the exit code; raises UsageError for what cannot be used."""
    flags = {setting.name: getattr(arguments, setting.name, None) for setting in fields(Settings)}
    settings = config.load(arguments.config, flags)
    if arguments.print_config:
        _print(settings.as_yaml())
        return 0
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(
        logging.ERROR
    )  # its warnings are about what strangers send
    exporter = Exporter(
        PyNvml(),
        RunDirectory(settings.run_dir, settings.ttl_seconds),
        settings.scrape_deadline_seconds,
        processes_per_gpu=settings.processes_per_gpu,
        pcie_throughput=settings.pcie_throughput,
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
    """Serve until SIGTERM or SIGINT; then end at once, also while a scrape waits for the driver.

    Raises TorchmemError when the server ends by itself.
    """
    listener = systemd.listener() if settings.systemd_socket else None
    beat = partial(systemd.notify, "WATCHDOG=1")
    web = LiveConfig(settings.web_config_file)
    # Blocked in every thread that starts from here on and only asked for: a handler would run in the midst of whatever
    # the main thread does, where it may wait for a lock that this thread holds.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    with (
        closing(
            serve(exporter, *settings.address, listener=listener, web=web, beat=beat)
        ) as server,
        closing(exporter),
    ):
        _log.info("serving %s/metrics from the run directory %s", server.url, settings.run_dir)
        systemd.notify("READY=1")
        while not server.stopped.is_set() and signal.sigtimedwait(_ENDING, 1) is None:
            pass
        systemd.notify("STOPPING=1")
        if server.stopped.is_set():
            raise TorchmemError(
                "The HTTP server ended by itself: see the error above, then start it again."
            )
