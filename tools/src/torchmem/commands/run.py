"""`torchmem run -- COMMAND`: monitor an unchanged program, with all processes that it starts."""

from __future__ import annotations

import argparse
import os
import sys

from torchmem.run.closing_lines import VARIABLE as SUMMARY_VARIABLE
from torchmem.run.closing_lines import wanted
from torchmem.sample.errors import UsageError

HELP = "run a command unchanged, and monitor each of its processes that uses CUDA"
EPILOG = """\
Examples:
  torchmem run -- python train.py
  torchmem run --name nightly -- torchrun --nproc-per-node 8 train.py
  torchmem run --name nightly --apply-advice -- python train.py

The command replaces this process, so its output, its signals and its exit code
are its own. On a terminal, two lines about its memory follow its last one; in a
file, only if it ran out of memory.
Every TORCHMEM_* setting works, such as TORCHMEM_HISTORY=oom.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.usage = "torchmem run [options] -- COMMAND ..."
    add = parser.add_argument
    add("--name", metavar="NAME", help="name of the run (default: the scheduler's or the script's)")
    add("--run-dir", metavar="DIR", help="run directory (default TORCHMEM_RUN_DIR)")
    add(
        "--apply-advice",
        action="store_true",
        help="if an earlier attempt ran out of memory and an allocator setting cures that, add the "
        "setting; say why if not",
    )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command, after --")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the command.

    Raises:
        UsageError: there is no command, or no name to find earlier attempts by.
        CommandError: the command cannot be started.
    """
    from torchmem.run.launch import advised, child_environment, execute

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("no command: write it after --, as in torchmem run -- python train.py.")
    settings = {"TORCHMEM_RUN": arguments.name, "TORCHMEM_RUN_DIR": arguments.run_dir}
    environment = child_environment(os.environ, settings)
    environment[SUMMARY_VARIABLE] = wanted(sys.stderr)
    if arguments.apply_advice:
        environment = advised(environment)
    execute(command, environment)
