"""`torchmem preflight`: its flags, and the control of its runs.

Needs no extra. The imports inside functions keep `torchmem --help` fast.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.compare.baseline_flags import BASELINE_FLAGS
from torchmem.output.terminal import interrupted_by, write_out
from torchmem.sample.errors import TorchmemError

if TYPE_CHECKING:
    from torchmem.compare.baseline import BaselineOptions
    from torchmem.preflight.baseline import BaselineResult
    from torchmem.preflight.matrix import Matrix
    from torchmem.preflight.options import PreflightOptions
    from torchmem.preflight.runner import RunFunction, Runner
    from torchmem.preflight.search import SearchRange

__all__ = ["EPILOG", "HELP", "InterruptedRunError", "add_arguments", "run"]

HELP = "run a training script on a phantom GPU and report whether it fits"
EPILOG = """\
Examples:
  torchmem preflight --gpu-model h100-80gb -- python train.py
  torchmem preflight --gpu-model 24GB --find-batch batch=1..8 -- python train.py
  torchmem preflight --matrix batch=8,16 gpu_model=24GB,40GB -- python train.py
  torchmem preflight --gpu-model 24GB --baseline memory.json -- python train.py

Exit code: 0 if it fits, 1 if it does not, memory grows until it does not, or it
needs more than the baseline,
2 if there is no verdict because a flag is wrong, the script cannot be run, or
it fails with its own error.
"""
DEFAULT_STEPS = 20


class InterruptedRunError(TorchmemError):
    """The run was ended by Ctrl-C, SIGTERM or SIGHUP."""

    exit_code = 128 + signal.SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.usage = "torchmem preflight --gpu-model MODEL [options] -- COMMAND ..."
    _add_run_flags(parser)
    _add_distributed_flags(parser.add_argument_group("one rank of a distributed run"))
    _add_table_flags(parser.add_argument_group("several runs, as a table"))
    _add_report_flags(parser.add_argument_group("the report"))
    _add_baseline_flags(parser.add_argument_group("a baseline, to find changes that cost memory"))


def run(
    arguments: argparse.Namespace,
    run_plan: RunFunction | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the command and return its exit code.

    run_plan: runs one plan, torchmem.preflight.run.run by default. clock: seconds.

    Raises:
        UsageError: a flag is wrong, or there is no verdict.
        InterruptedRunError: the run was interrupted by a signal.
    """
    from torchmem.preflight import baseline, options, pages
    from torchmem.preflight.run import run as real_run
    from torchmem.preflight.runner import Runner

    if arguments.list_gpu_models:
        write_out(pages.gpu_model_table())
        return 0
    checked = options.checked_options(arguments)
    compared = baseline.checked_options(arguments)
    options.check_machine(os.environ, beside_gpu=arguments.beside_gpu)
    with _signals_as_interrupt(), _scratch_folder() as scratch:
        runner = Runner(run_plan or real_run, scratch, checked.json, clock)
        return _run_checked(checked, runner, compared)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--gpu-model",
        metavar="MODEL",
        help="a name from --list-gpu-models, or a size: 24GB (10^9), 22.5GiB (2^30)",
    )
    add(
        "--list-gpu-models", action="store_true", help="list the GPU models known by name, and exit"
    )
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs visible to the script (default: one, or one per local rank)",
    )
    add(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"stop after N optimizer steps (default {DEFAULT_STEPS})",
    )
    add(
        "--alloc-conf",
        metavar="CONF",
        help="PYTORCH_CUDA_ALLOC_CONF for the script (default: from the environment)",
    )
    add("--beside-gpu", action="store_true", help="run even if this machine has a real NVIDIA GPU")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command to run")


def _add_distributed_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--world-size",
        type=int,
        metavar="N",
        help="run as one rank of N, with the environment that torchrun sets",
    )
    add("--rank", type=int, metavar="R", help="the rank to run (default 0)")
    add(
        "--local-world-size",
        type=int,
        metavar="N",
        help="ranks on each node (default 8, or the world size if that is smaller)",
    )


def _add_table_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--find-batch",
        metavar="NAME=LO..HI",
        help="find the largest value of a script option that fits, such as batch-size=1..64 for "
        "--batch-size",
    )
    add(
        "--matrix",
        metavar="NAME=VALUES",
        nargs="+",
        action="extend",
        default=[],
        help="run each combination, such as --matrix batch=8,16 gpu_model=24GB,a100-40gb; NAME is "
        "{NAME} in the command, gpu_model, alloc_conf, world_size, rank, an environment VARIABLE, "
        "or an option of the script",
    )


def _add_report_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--setting",
        metavar="CONF",
        action="append",
        default=[],
        help="compare this allocator setting instead of the default ones; can be repeated",
    )
    add(
        "--gpu-models",
        metavar="LIST",
        help="compare these GPU models instead of the next larger and smaller ones",
    )
    add(
        "--snapshot",
        metavar="FILE",
        type=Path,
        help="keep the trace, for memory_viz and torchmem whatif",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON document; the script's output goes to stderr",
    )


def _add_baseline_flags(group: argparse._ArgumentGroup) -> None:
    for name, metavar, text in BASELINE_FLAGS:
        kind = Path if metavar == "FILE" else str
        group.add_argument(f"--{name}", metavar=metavar, type=kind, help=text)


def _run_checked(
    options: PreflightOptions, runner: Runner, compared: BaselineOptions | None
) -> int:
    if options.matrix:
        return _matrix(options, options.matrix, runner)
    if options.search:
        return _find_batch(options, options.search, runner)
    return _single_run(options, runner, compared)


def _find_batch(options: PreflightOptions, search: SearchRange, runner: Runner) -> int:
    from torchmem.preflight import document, pages
    from torchmem.preflight.search import find_batch

    result = find_batch(options.plan, search, runner)
    write_out(document.search_document(result) if options.json else pages.search_page(result))
    return 0 if result.fits else 1


def _matrix(options: PreflightOptions, matrix: Matrix, runner: Runner) -> int:
    from torchmem.preflight import judged_run, matrix_page
    from torchmem.preflight.matrix import run_all

    result = run_all(matrix, runner)
    write_out(matrix_page.document(result) if options.json else matrix_page.page(result))
    return judged_run.exit_code(result.cells)


def _single_run(options: PreflightOptions, runner: Runner, compared: BaselineOptions | None) -> int:
    from torchmem.preflight import baseline, document, pages
    from torchmem.preflight.report import make_report

    report = make_report(options, runner)
    against = baseline.check(compared, options.plan, report.result, runner) if compared else None
    page = document.run_document(report, against) if options.json else pages.run_page(report)
    write_out(page if options.json else f"\n{page}")
    return _closed(options, 0 if report.verdict.fits else 1, against)


def _closed(options: PreflightOptions, exit_code: int, against: BaselineResult | None) -> int:
    """Print the comparison with the baseline, and return the exit code of both."""
    if against is None:
        return exit_code
    lines = list(against.lines())
    if lines and not options.json:
        write_out("\n" + "\n".join(lines) + "\n")
    return exit_code or against.exit_code


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """Provide a folder that is removed even if another signal arrives during its removal."""
    import tempfile

    from torchmem.preflight.run import DeferredSignals

    with DeferredSignals():
        scratch = tempfile.TemporaryDirectory(prefix="torchmem-preflight-")
    try:
        yield Path(scratch.name)
    finally:
        with DeferredSignals():
            scratch.cleanup()


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP from a closed terminal, end the script and clean up like Ctrl-C."""
    from torchmem.preflight.run import ENDING_SIGNALS

    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    try:
        with interrupted_by(*handled):
            yield
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: all processes of the script were ended.") from None
    finally:
        sys.stdout.flush()
