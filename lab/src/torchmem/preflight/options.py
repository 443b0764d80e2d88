"""The flags of `torchmem preflight`, checked before anything runs."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path, PurePath

from torchmem.phantom.build import LIBRARY
from torchmem.phantom.gpus import MAX_GPUS, GpuModel, parse_usable_gpu_model
from torchmem.preflight.matrix import Axis, Cell, Matrix, applied, check_axes, combinations
from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.search import SearchRange
from torchmem.sample.errors import UsageError, program_advice
from torchmem.sample.untrusted import sanitize_text
from torchmem.whatif.question import check_settings

LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "orterun", "srun"}
)
LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate.commands.launch",
        "deepspeed.launcher.runner",
    }
)
DEFAULT_RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class PreflightOptions:
    """The checked flags.

    plan: the run, or the first one of several. search, matrix: several runs
    instead of one; at most one of them is set. settings, gpu_models: what to compare; empty for
    the default choice.
    """

    plan: RunPlan
    search: SearchRange | None
    matrix: Matrix | None
    settings: tuple[str, ...]
    gpu_models: tuple[GpuModel, ...]
    snapshot: Path | None
    json: bool


def checked_options(arguments: argparse.Namespace) -> PreflightOptions:
    """Check the flags of the command line. Raises UsageError or MissingExtraError."""
    _check_combination(arguments)
    _check_files(arguments)
    check_settings(arguments.setting)
    matrix = _checked_matrix(arguments) if arguments.matrix else None
    plan = matrix.cells[0].plan if matrix else _checked_plan(arguments)
    gpu_models = (text for text in (arguments.gpu_models or "").split(",") if text.strip())
    find = arguments.find_batch
    return PreflightOptions(
        plan=plan,
        search=SearchRange.parse(find, plan.command) if find else None,
        matrix=matrix,
        settings=tuple(arguments.setting),
        gpu_models=tuple(map(parse_usable_gpu_model, gpu_models)),
        snapshot=arguments.snapshot,
        json=arguments.json,
    )


def _checked_plan(arguments: argparse.Namespace) -> RunPlan:
    if not arguments.gpu_model:
        raise UsageError(
            "--gpu-model is missing: choose one from torchmem preflight --list-gpu-models, or give "
            "a size such as --gpu-model 24GB."
        )
    command = _checked_command(arguments.command)
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps} is invalid: it must be at least 1.")
    placement = _checked_placement(arguments)
    gpu = parse_usable_gpu_model(arguments.gpu_model)
    devices = _devices(arguments.gpus, placement)
    return RunPlan(command, gpu, devices, arguments.steps, arguments.alloc_conf, placement)


def _checked_matrix(arguments: argparse.Namespace) -> Matrix:
    """Return the matrix; each combination is checked as if it had been given by itself."""
    axes = tuple(map(Axis.parse, arguments.matrix))
    check_axes(axes, arguments)

    def plan_of(values: Sequence[str]) -> RunPlan:
        own, environment, command = applied(axes, values, arguments.command)
        changed = argparse.Namespace(**vars(arguments) | own | {"command": list(command)})
        return replace(_checked_plan(changed), environment=environment)

    cells = (Cell(values, plan_of(values)) for values in combinations(axes))
    return Matrix(_without_dashes(arguments.command), axes, tuple(cells))


def check_machine(
    environment: Mapping[str, str], *, beside_gpu: bool, root: Path = Path("/")
) -> None:
    """Raise UsageError on a phantom GPU, and on a machine with a real one unless `beside_gpu`.

    root: root of the file system to search for NVIDIA's driver.
    """
    if LIBRARY in environment.get("LD_PRELOAD", ""):
        raise UsageError(
            "this shell already runs on a phantom GPU: start torchmem preflight outside of it."
        )
    if not beside_gpu and _has_gpu(root):
        raise UsageError(
            "this machine has a real NVIDIA GPU: run the script on it, or add --beside-gpu to use "
            "a phantom GPU, which does not touch the real one."
        )


def _has_gpu(root: Path) -> bool:
    """Return whether NVIDIA's driver lists a GPU, without calling the driver."""
    paths = [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]
    return bool(paths)


def _checked_command(words: Sequence[str]) -> tuple[str, ...]:
    command = _without_dashes(words)
    if not command:
        raise UsageError("no command given: add one after --, for example -- python train.py.")
    launcher = _launcher(command)
    if launcher:
        raise UsageError(
            f"{launcher} starts several processes, but a preflight runs one of them: give the "
            "script itself (-- python train.py ...) and set --world-size and --rank."
        )
    if not shutil.which(command[0]):
        name = sanitize_text(command[0])
        raise UsageError(f"{name} is not a program: {program_advice(name)}")
    return command


def _without_dashes(words: Sequence[str]) -> tuple[str, ...]:
    # argparse.REMAINDER keeps the dashes.
    return tuple(words[1:] if words[:1] == ["--"] else words)


def _launcher(command: Sequence[str]) -> str | None:
    """Return the launcher named before the script, or None."""
    before = list(takewhile(lambda word: not word.endswith((".py", ".sh")), command))
    for word, following in zip(before, [*before[1:], ""], strict=False):
        if PurePath(word).name in LAUNCHERS:
            return PurePath(word).name
        if word == "-m" and following in LAUNCHER_MODULES:
            return following
    return None


def _checked_placement(arguments: argparse.Namespace) -> Placement | None:
    rank, world, local = arguments.rank, arguments.world_size, arguments.local_world_size
    if world is not None:
        return _placement(rank or 0, world, local)
    if rank is not None or local is not None:
        raise UsageError("the number of ranks is missing: set --world-size.")
    return None


def _placement(rank: int, world: int, local: int | None) -> Placement:
    if world < 1:
        raise UsageError(f"--world-size {world} is invalid: it must be at least 1.")
    if not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank} in a world of {world}: ranks start at 0.")
    node = min(DEFAULT_RANKS_PER_NODE, world) if local is None else local
    if not 1 <= node <= world:
        raise UsageError(
            f"--local-world-size {node} is invalid: with a world size of {world} it must be from "
            f"1 to {world}."
        )
    return Placement(rank, world, node)


def _devices(gpus: int | None, placement: Placement | None) -> int:
    """Return the number of GPUs of the node. Each rank of a node has a GPU of its own."""
    minimum = placement.local_world_size if placement else 1
    if minimum > MAX_GPUS:
        raise UsageError(
            f"a node has at most {MAX_GPUS} phantom GPUs: use a smaller --local-world-size."
        )
    if gpus is None:
        return minimum
    if not minimum <= gpus <= MAX_GPUS:
        raise UsageError(f"--gpus {gpus} is invalid: it must be from {minimum} to {MAX_GPUS}.")
    return gpus


def _check_combination(arguments: argparse.Namespace) -> None:
    names = ("find_batch", "matrix")
    tables = [flag for flag in names if getattr(arguments, flag)]
    single = [flag for flag in ("setting", "gpu_models", "snapshot") if getattr(arguments, flag)]
    if len(tables) > 1:
        raise UsageError(
            f"{_flag(tables[0])} and {_flag(tables[1])} are mutually exclusive: use only one."
        )
    if tables and single:
        raise UsageError(
            f"{_flag(single[0])} applies to a single run: do not combine it with "
            f"{_flag(tables[0])}."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_files(arguments: argparse.Namespace) -> None:
    snapshot = arguments.snapshot
    if snapshot and not snapshot.parent.is_dir():
        raise UsageError(f"--snapshot: there is no directory {snapshot.parent}; create it first.")
