"""Flags that several commands have, and flags that once had another name."""

from __future__ import annotations

import argparse
from typing import Any

DEFAULT_EXPORTER = "http://127.0.0.1:9847"


def add_exporter(group: argparse._ActionsContainer) -> None:
    """Declare the flag with the address of the exporter."""
    group.add_argument(
        "--exporter",
        metavar="URL",
        default=DEFAULT_EXPORTER,
        help="address of the exporter, also with USER:PASSWORD@ before the host "
        f"(default {DEFAULT_EXPORTER})",
    )


def add_flag(group: argparse._ActionsContainer, name: str, former: str, **options: Any) -> None:
    """Declare a flag with its former name, which works too and which --help does not show."""
    action = group.add_argument(name, **options)
    hidden = options | {"dest": action.dest, "help": argparse.SUPPRESS}
    group.add_argument(former, **hidden)
