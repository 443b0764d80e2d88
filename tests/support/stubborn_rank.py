"""A rank of the demo that does not end when it is asked to."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from torchmem.demo.gpus import RankGpu
from torchmem.demo.ranks import DemoPlan, log_path


def stubborn_rank(_plan: DemoPlan, rank: int, folder: Path, _gpu: RankGpu) -> None:
    """Ignore SIGTERM, write a line to the rank's log, and sleep."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_path(folder, rank).write_text("ignores SIGTERM\n")
    while True:
        time.sleep(60)
