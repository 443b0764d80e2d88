"""The command to try: what can be run, and how an option of it is set.

Ranks and world sizes to be tried.

A phantom never by accident: where a real GPU is, or where one phantom already is.

The cards known by name: shown as a list, and those beside a given one.

What the flags of `torchmem preflight` ask for, checked before anything runs.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePath

from torchmem.allocator.sizes import format_size
from torchmem.cli.terminal import aligned
from torchmem.phantom.build import LIBRARY
from torchmem.phantom.cards import CATALOGUE, MAX_CARDS, Card, card
from torchmem.preflight.plan import Placement, Plan
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.whatif.command import check_plot, check_settings

LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "orterun", "srun"}
)
LAUNCHER_MODULES = frozenset({
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner",
})  # fmt: skip


def checked_command(words: Sequence[str]) -> tuple[str, ...]:
    """What stands after `--`; raises UsageError when it cannot be tried."""
    command = tuple(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise UsageError("there is no command to try: name one after --, as in -- python train.py.")
    launcher = _launcher(command)
    if launcher:
        raise UsageError(
            f"{launcher} starts many processes, and a preflight is one of them: name the script itself (-- python "
            "train.py ...) and tell its place with --world-size and --rank."
        )
    if not shutil.which(command[0]):
        raise UsageError(
            f"there is no program {sanitize_text(command[0])!r}: name one that can be run, as python train.py."
        )
    return command


def _launcher(command: Sequence[str]) -> str | None:
    """The launcher among the words before the script, if there is one."""
    before = list(takewhile(lambda word: not word.endswith((".py", ".sh")), command))
    for word, following in zip(before, [*before[1:], ""], strict=True):
        if PurePath(word).name in LAUNCHERS:
            return PurePath(word).name
        if word == "-m" and following in LAUNCHER_MODULES:
            return following
    return None


def option_of(command: Sequence[str], name: str) -> str:
    """How the script calls the option `name`: as given with dashes, as `name=` where it stands so, else `--name`."""
    if name.startswith("-") or any(word.startswith(f"{name}=") for word in command):
        return name
    return f"--{name}"


def with_option(command: Sequence[str], option: str, value: int) -> tuple[str, ...]:
    """The command with an option set to `value`, in place of what it has there, else at its end."""
    words = list(command)
    for place, word in enumerate(words):
        if word.startswith(f"{option}="):
            words[place] = f"{option}={value}"
            return tuple(words)
        if word == option and place + 1 < len(words):
            words[place + 1] = str(value)
            return tuple(words)
    return (*words, option, str(value))


RANKS_PER_NODE = 8
MOST_RUNS = 256


def checked_places(arguments: argparse.Namespace) -> tuple[Placement | None, tuple[Placement, ...]]:
    """The place of the single run, and those of a sweep; raises UsageError."""
    rank, world, local = arguments.rank, arguments.world_size, arguments.local_world_size
    if arguments.world_sizes:
        if world is not None:
            raise UsageError(
                "--world-size and --world-sizes contradict each other: give one of them."
            )
        sizes = numbers("--world-sizes", arguments.world_sizes)
        return None, tuple(place(rank or 0, size, local) for size in sizes)
    if world is None:
        if rank is not None or local is not None or arguments.ranks:
            raise UsageError("a rank is one of how many? Tell it with --world-size.")
        return None, ()
    if not arguments.ranks:
        return place(rank or 0, world, local), ()
    if rank is not None:
        raise UsageError("--rank and --ranks contradict each other: give one of them.")
    return None, tuple(place(one, world, local) for one in numbers("--ranks", arguments.ranks))


def place(rank: int, world: int, local: int | None) -> Placement:
    """One rank; raises UsageError for one that the world does not have."""
    if world < 1 or not 0 <= rank < world:
        raise UsageError(
            f"there is no rank {rank} in a world of {world}: ranks are counted from 0."
        )
    node = min(RANKS_PER_NODE, world) if local is None else local
    if not 1 <= node <= world:
        raise UsageError(f"--local-world-size {node} is not possible in a world of {world}.")
    return Placement(rank, world, node)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """The numbers of "0..3,7", each once; raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\.\.([0-9]{1,9}))?\s*", part)
        if not match:
            raise UsageError(f"{flag} {text[:60]!r} is no list of numbers: write it as 0..3,7.")
        first, last = int(match[1]), int(match[2] or match[1])
        found.extend(range(first, min(last, first + MOST_RUNS) + 1))
    if not found or len(found) > MOST_RUNS:
        raise UsageError(
            f"{flag} {text[:60]!r} asks for {'no' if not found else 'too many'} runs: name 1 to {MOST_RUNS}."
        )
    return tuple(dict.fromkeys(found))


def check_machine(
    environment: Mapping[str, str], *, beside_gpu: bool, root: Path = Path("/")
) -> None:
    """Raise UsageError where a preflight should not run. `root`: of the file system that is looked at."""
    if LIBRARY in environment.get("LD_PRELOAD", ""):
        raise UsageError(
            "this shell runs on a phantom GPU already: start torchmem preflight outside of it."
        )
    if not beside_gpu and has_gpu(root):
        raise UsageError(
            "this machine has a real NVIDIA GPU: run the script on it, or add --beside-gpu for a phantom that leaves "
            "it alone."
        )


def has_gpu(root: Path) -> bool:
    """Whether NVIDIA's driver shows a card here; no call of the driver is made."""
    found = [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]
    return bool(found)


EACH_WAY = 3
CLEARLY = 1.1
"""A card with so many times the memory of another is another choice."""


def listing() -> str:
    """A table of all cards known by name."""
    rows = [("card", "memory", "context", "SMs", "capability")]
    for one in CATALOGUE:
        capability = ".".join(map(str, one.capability))
        sizes = format_size(one.memory_bytes), format_size(one.context_bytes)
        rows.append((one.name, *sizes, str(one.multiprocessors), capability))
    products = ["product", *(one.product for one in CATALOGUE)]
    return "".join(
        f"{line}  {product}\n" for line, product in zip(aligned(rows), products, strict=True)
    )


def usable(text: str) -> Card:
    """The card of this name or size; raises UsageError when there is none, or no memory beside its context."""
    found = card(text)
    if found.memory_bytes <= found.context_bytes:
        raise UsageError(
            f"a card of {text} has no memory left beside a CUDA context of {format_size(found.context_bytes)}: name a "
            "larger one."
        )
    return found


def beside(asked: Card, known: Sequence[Card] = CATALOGUE) -> list[Card]:
    """The asked card between the next smaller and the next larger ones, in ascending order, each clearly larger."""
    ascending = sorted(known, key=lambda one: one.memory_bytes)
    found = [asked]
    for one in reversed(ascending):
        if len(found) <= EACH_WAY and CLEARLY * one.memory_bytes <= found[0].memory_bytes:
            found.insert(0, one)
    most = len(found) + EACH_WAY
    for one in ascending:
        if len(found) < most and one.memory_bytes >= CLEARLY * found[-1].memory_bytes:
            found.append(one)
    return found


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
        raise UsageError(
            "--card is missing: name one of torchmem preflight --list-cards, or a size as --card 24GB."
        )
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
        plan,
        search,
        sweep,
        tuple(arguments.setting),
        cards,
        arguments.snapshot,
        arguments.json,
        arguments.plot,
    )


def _search(text: str, command: Sequence[str]) -> Search:
    name, _, bounds = text.rpartition("=")
    low, dots, high = bounds.partition("..")
    if not (
        name.strip("-")
        and dots
        and low.isdecimal()
        and high.isdecimal()
        and 0 < int(low) <= int(high) < MOST_TRIED
    ):
        raise UsageError(f"--find-batch {text[:60]!r} is no search: write it as batch-size=1..64.")
    return Search(option_of(command, name), int(low), int(high))


def _devices(gpus: int | None, placement: Placement | None, sweep: Sequence[Placement]) -> int:
    """Cards of the node, the same in all runs; each rank of a node has one."""
    least = max(
        (place.local_world_size for place in (*sweep, *([placement] if placement else []))),
        default=1,
    )
    if least > MAX_CARDS:
        raise UsageError(
            f"a node has at most {MAX_CARDS} phantom cards: tell a smaller --local-world-size."
        )
    if gpus is None:
        return least
    if not least <= gpus <= MAX_CARDS:
        raise UsageError(
            f"--gpus {gpus} is not possible here: give a number from {least} to {MAX_CARDS}."
        )
    return gpus


def _check_one_table(arguments: argparse.Namespace) -> None:
    several = [flag for flag in ("find_batch", "ranks", "world_sizes") if getattr(arguments, flag)]
    single = [flag for flag in ("setting", "cards", "snapshot", "plot") if getattr(arguments, flag)]
    if len(several) > 1:
        raise UsageError(
            f"{_flag(several[0])} and {_flag(several[1])} are two tables: ask for one at a time."
        )
    if several and single:
        raise UsageError(
            f"{_flag(single[0])} belongs to a single run: leave it out beside {_flag(several[0])}."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_files(arguments: argparse.Namespace) -> None:
    if arguments.plot:
        check_plot(arguments.plot, "preflight")
    if arguments.snapshot and not arguments.snapshot.parent.is_dir():
        raise UsageError(
            f"--snapshot: there is no directory {arguments.snapshot.parent}; make it first."
        )
