"""Flags that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_EXPORTER = "http://127.0.0.1:9847"


def add_exporter(group: argparse._ActionsContainer, default: str | None = DEFAULT_EXPORTER) -> None:
    """Declare the flag with the address of the exporter.

    `default` None tells a command that no address was given.
    """
    group.add_argument(
        "--exporter",
        metavar="URL",
        default=default,
        help="address of the exporter, also with USER:PASSWORD@ before the host "
        f"(default {DEFAULT_EXPORTER})",
    )


def add_run_directory(group: argparse._ActionsContainer) -> None:
    """Declare the flag with the run directory."""
    group.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="run directory (default TORCHMEM_RUN_DIR)"
    )


def add_process(group: argparse._ActionsContainer) -> None:
    """Declare the flags that choose the process of a rank."""
    add = group.add_argument
    add("--rank", type=int, metavar="N", help="global rank of the process")
    add(
        "--run",
        metavar="NAME",
        dest="run_name",
        help="name of its run; of several launches, the newest",
    )
    add("--launch", metavar="ID", help="its launch, as in the label `launch`")
    add("--pid", type=int, metavar="N", help="its process id")
