"""Flags that can be found wrong before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchmem.core.alloc_conf_check import refusal
from torchmem.core.errors import MissingExtraError, UsageError
from torchmem.core.untrusted import harmless


def check_settings(settings: Sequence[str]) -> None:
    """Raise UsageError for a text that PyTorch would refuse in PYTORCH_CUDA_ALLOC_CONF."""
    for text in settings:
        reason = refusal(text)
        if reason is not None:
            raise UsageError(f"--setting: {harmless(reason)}")


def check_plot(path: Path, command: str) -> None:
    """Raise UsageError for a picture that cannot be drawn, before the work that it shows is done."""
    try:
        from torchmem.cli.whatif import plot

        plot.check(path)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{command} --plot", error.name or "", "plot") from error
