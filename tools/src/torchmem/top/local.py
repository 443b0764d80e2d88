"""The ranks of a run directory, judged by the thresholds that the user has chosen."""

from __future__ import annotations

import os
from pathlib import Path

from torchmem.explain.thresholds import THRESHOLDS_VARIABLE, Thresholds, defaults
from torchmem.node.local import LocalRanks
from torchmem.sample.errors import MissingExtraError


def local_ranks(directory: Path, thresholds: Path | None = None) -> LocalRanks:
    """Return the ranks. Raise MissingExtraError or UsageError for a file of thresholds."""
    return LocalRanks(directory, chosen_thresholds(thresholds))


def chosen_thresholds(given: Path | None = None) -> Thresholds:
    """Return the thresholds of the file, else of TORCHMEM_THRESHOLDS, else the shipped ones.

    Raise MissingExtraError or UsageError.
    """
    file = given or os.environ.get(THRESHOLDS_VARIABLE)
    if not file:
        return defaults()
    try:
        from torchmem.exporter import thresholds
    except ModuleNotFoundError as error:
        raise MissingExtraError("why --thresholds", error.name or "") from error
    return thresholds.load(Path(file))
