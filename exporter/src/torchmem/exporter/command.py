"""The exporter as a subcommand, for `torchmem exporter` and `python -m torchmem.exporter`; itself needs no extra."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmem.sample.errors import MissingExtraError

HELP = "serve allocator and NVML metrics of this node to Prometheus"
_SWITCH = argparse.BooleanOptionalAction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; one that is not given is None, so that the configuration file decides."""
    web = parser.add_argument_group("serving")
    web.add_argument(
        "--listen",
        "--web.listen-address",
        metavar="HOST:PORT",
        help="address to serve on (default 127.0.0.1:9847)",
    )
    web.add_argument(
        "--web.config.file",
        dest="web_config_file",
        metavar="FILE.yml",
        help="TLS and passwords, in the format that all Prometheus exporters share",
    )
    web.add_argument(
        "--web.systemd-socket",
        dest="systemd_socket",
        action="store_true",
        default=None,
        help="serve on the socket that systemd passes",
    )
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--run-dir", metavar="DIR", help="run directory that the training processes write to"
    )
    reading.add_argument(
        "--ttl-seconds",
        metavar="N",
        type=_positive,
        help="keep an ended process's last values so long (default 900)",
    )
    reading.add_argument(
        "--scrape-deadline-seconds",
        metavar="N",
        type=_positive,
        help="wait for the driver so long (default 5)",
    )
    reading.add_argument(
        "--pcie-throughput",
        action=_SWITCH,
        default=None,
        help="measure it, at 40 ms for each GPU and scrape",
    )
    reading.add_argument(
        "--processes-per-gpu",
        metavar="N",
        type=_count,
        help="show so many processes of a GPU (default 32)",
    )
    parser.add_argument(
        "--config", metavar="FILE.yml", type=Path, help="settings in YAML; flags override them"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings that hold as YAML and exit"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one exposition on stdout and exit"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run with parsed flags and return the exit code.

    Raises MissingExtraError when the extra is not installed, UsageError for a flag or setting that cannot be used.
    """
    try:
        from torchmem.exporter import main
    except ModuleNotFoundError as error:
        raise MissingExtraError("exporter", error.name or "") from error
    return main.run(arguments)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _count(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return number


_positive.__name__, _count.__name__ = "number", "whole number"
