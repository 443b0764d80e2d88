"""Flags that several commands have."""

from __future__ import annotations

import argparse

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
