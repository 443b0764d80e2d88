"""`torchmem preflight`: an unchanged training script on a phantom GPU; needs no extra but for `--plot`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchmem.cli.preflight.arguments import add_arguments

if TYPE_CHECKING:
    from torchmem.cli.preflight.attempts import Runner

HELP = "run a training script on a phantom GPU and tell whether its memory fits a card"

__all__ = ["HELP", "add_arguments", "run"]


def run(arguments: argparse.Namespace, runner: Runner | None = None) -> int:
    """Try the command and return the exit code; raises UsageError.

    `runner`: what runs a plan, torchmem.preflight.run.run if not given.
    """
    from torchmem.cli.preflight.answer import answer

    return answer(arguments, runner)
