"""How to start what a screen lacks: an exporter, or ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torchmem.cli.exporter import EXAMPLE

START = "Start it: `torchmem exporter`."

Way = tuple[str, str]
"""A line to type, and what it is for."""

EXPORTER_WAYS: Sequence[Way] = (
    ("torchmem exporter", "starts an exporter on this machine"),
    (f"torchmem top {EXAMPLE}", "shows the exporter of another machine"),
    ("torchmem demo", "starts one with a simulated training"),
)
RANK_WAYS: Sequence[Way] = (
    ("torchmem run -- python train.py", "any program, without changing it"),
    ("TORCHMEM=1 python train.py", "the same with a variable, for job templates"),
    ("from torchmem import sdk; sdk.instrument()", "one line in the training script"),
)
