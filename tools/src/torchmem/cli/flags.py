"""Flags of commands that once had another name."""

from __future__ import annotations

import argparse
from typing import Any


def add_flag(group: argparse._ActionsContainer, name: str, former: str, **options: Any) -> None:
    """Declare a flag with its former name, which works too and which --help does not show."""
    action = group.add_argument(name, **options)
    hidden = options | {"dest": action.dest, "help": argparse.SUPPRESS}
    group.add_argument(former, **hidden)
