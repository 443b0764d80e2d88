"""What the flags of `torchmem preflight` ask for, checked before anything runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmem.cli.preflight.catalogue import usable
from torchmem.cli.preflight.command import checked_command, option_of
from torchmem.cli.preflight.places import checked_places
from torchmem.cli.whatif.checks import check_plot, check_settings
from torchmem.core.errors import UsageError
from torchmem.phantom.cards import MAX_CARDS, Card
from torchmem.preflight.plan import Placement, Plan

MOST_TRIED = 1 << 31


@dataclass(frozen=True, slots=True)
class Search:
    """The largest value from `low` to `high` of the script's option that fits is looked for."""

    option: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Flags, checked.

    plan: the run, or the first of them. search, sweep: several runs instead; at most one of them. settings, cards: what
    to compare; empty for the usual ones.
    """

    plan: Plan
    search: Search | None
    sweep: tuple[Placement, ...]
    settings: tuple[str, ...]
    cards: tuple[Card, ...]
    snapshot: Path | None
    json: bool
    plot: Path | None


def checked(arguments: argparse.Namespace) -> Wanted:
    """The flags of the command line; raises UsageError or MissingExtraError."""
    if not arguments.card:
        raise UsageError("--card is missing: name one of torchmem preflight --list-cards, or a size as --card 24GB.")
    command = checked_command(arguments.command)
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps} is not possible: give a number from 1.")
    check_settings(arguments.setting)
    placement, sweep = checked_places(arguments)
    search = _search(arguments.find_batch, command) if arguments.find_batch else None
    _check_one_table(arguments)
    _check_files(arguments)
    plan = Plan(
        command, usable(arguments.card), _devices(arguments.gpus, placement, sweep), arguments.steps,
        arguments.alloc_conf, placement,
    )  # fmt: skip
    cards = tuple(usable(text) for text in (arguments.cards or "").split(",") if text.strip())
    return Wanted(
        plan, search, sweep, tuple(arguments.setting), cards, arguments.snapshot, arguments.json, arguments.plot
    )


def _search(text: str, command: Sequence[str]) -> Search:
    name, _, bounds = text.rpartition("=")
    low, dots, high = bounds.partition("..")
    if not (
        name.strip("-") and dots and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < MOST_TRIED
    ):
        raise UsageError(f"--find-batch {text[:60]!r} is no search: write it as batch-size=1..64.")
    return Search(option_of(command, name), int(low), int(high))


def _devices(gpus: int | None, placement: Placement | None, sweep: Sequence[Placement]) -> int:
    """Cards of the node, the same in all runs; each rank of a node has one."""
    least = max((place.local_world_size for place in (*sweep, *([placement] if placement else []))), default=1)
    if least > MAX_CARDS:
        raise UsageError(f"a node has at most {MAX_CARDS} phantom cards: tell a smaller --local-world-size.")
    if gpus is None:
        return least
    if not least <= gpus <= MAX_CARDS:
        raise UsageError(f"--gpus {gpus} is not possible here: give a number from {least} to {MAX_CARDS}.")
    return gpus


def _check_one_table(arguments: argparse.Namespace) -> None:
    several = [flag for flag in ("find_batch", "ranks", "world_sizes") if getattr(arguments, flag)]
    single = [flag for flag in ("setting", "cards", "snapshot", "plot") if getattr(arguments, flag)]
    if len(several) > 1:
        raise UsageError(f"{_flag(several[0])} and {_flag(several[1])} are two tables: ask for one at a time.")
    if several and single:
        raise UsageError(f"{_flag(single[0])} belongs to a single run: leave it out beside {_flag(several[0])}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_files(arguments: argparse.Namespace) -> None:
    if arguments.plot:
        check_plot(arguments.plot, "preflight")
    if arguments.snapshot and not arguments.snapshot.parent.is_dir():
        raise UsageError(f"--snapshot: there is no directory {arguments.snapshot.parent}; make it first.")
