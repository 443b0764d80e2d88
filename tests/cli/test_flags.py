"""Flags that were renamed."""

from __future__ import annotations

import argparse

import pytest

from torchmem.preflight import command as preflight
from torchmem.snapshot import command as snapshot
from torchmem.whatif import command as whatif


@pytest.mark.parametrize(
    ("command", "former", "now"),
    [
        (preflight, ("--card", "24GB", "--cards", "t4"), ("--gpu-model=24GB", "--gpu-models=t4")),
        (preflight, ("--list-cards",), ("--list-gpu-models",)),
        (whatif, ("a", "--card", "24GB", "--device", "1"), ("a", "--gpu-model=24GB", "--gpu=1")),
        (snapshot, ("a", "--device", "1"), ("a", "--gpu=1")),
    ],
)
def test_former_names_still_work(
    command: object, former: tuple[str, ...], now: tuple[str, ...]
) -> None:
    """The former name of a flag does the same as the flag, and --help does not show it."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]

    assert parser.parse_args(now) == parser.parse_args(former)
    shown = parser.format_help()
    assert not any(f"{flag} " in shown for flag in former if flag.startswith("--"))
