"""The thresholds that the user has chosen: the same for screens, commands, exporter and rules."""

from __future__ import annotations

import os
from pathlib import Path

from torchmem.explain.thresholds import THRESHOLDS_VARIABLE, Thresholds, changed, defaults
from torchmem.sample import strict_yaml
from torchmem.sample.errors import MissingExtraError


def chosen(given: Path | None = None, command: str = "why --thresholds") -> Thresholds:
    """Return the thresholds of the file, else of TORCHMEM_THRESHOLDS, else the shipped ones.

    Raises MissingExtraError, which names the `command`, without a YAML parser, or UsageError.
    """
    file = given or os.environ.get(THRESHOLDS_VARIABLE)
    if not file:
        return defaults()
    try:
        return changed(strict_yaml.read_plain(Path(file)), str(file))
    except ModuleNotFoundError as error:
        raise MissingExtraError(command, error.name or "") from error
