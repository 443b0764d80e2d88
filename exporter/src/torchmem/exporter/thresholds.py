"""The user's file of thresholds, which is YAML."""

from __future__ import annotations

from pathlib import Path

from torchmem.explain.thresholds import Thresholds, changed, defaults
from torchmem.exporter import strict_yaml


def load(file: Path | None) -> Thresholds:
    """Return the thresholds of a file, with shipped values for those it omits and without a file.

    Raises UsageError.
    """
    return changed(strict_yaml.read_plain(file), str(file)) if file else defaults()
