"""The exporter as a subcommand, for `torchmem exporter` and `python -m torchmem.exporter`; itself needs no extra."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmem.core.errors import MissingExtraError

HELP = "serve allocator and NVML metrics of this node to Prometheus"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to serve on (default 127.0.0.1:9847)")
    parser.add_argument("--run-dir", metavar="DIR", help="run directory that the training processes write to")
    parser.add_argument("--config", metavar="FILE.yml", type=Path, help="settings in YAML; flags override them")
    parser.add_argument("--once", action="store_true", help="print one exposition on stdout and exit")


def run(arguments: argparse.Namespace) -> int:
    """Run with parsed flags and return the exit code.

    Raises MissingExtraError when the extra is not installed, UsageError for a flag or setting that cannot be used.
    """
    try:
        from torchmem.exporter import main
    except ModuleNotFoundError as error:
        raise MissingExtraError("exporter", error.name or "") from error
    return main.run(arguments)
