"""What the flags of `torchmem whatif` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wanted:
    """Flags, checked. `card_bytes`: None when it is to be found in the trace."""

    device: int | None
    card_bytes: int | None
    settings: Sequence[str]
    plot: Path | None
    json: bool
