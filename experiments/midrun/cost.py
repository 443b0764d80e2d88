"""Measure the CPU time of inferring the memory before a trace:

    python -m experiments.midrun.cost FILE…

Files are snapshots, such as those of experiments.midrun.compare. Times are the best of three runs,
in microseconds of one core per event; the replay under the recorded settings is there to compare.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchmem.trace import read
from torchmem.whatif.inference import infer
from torchmem.whatif.reproduction import reproduce
from torchmem.whatif.run_facts import run_facts
from torchmem.whatif.settings import recorded_settings

RUNS = 3


def seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of the fastest of several calls."""
    times = []
    for _ in range(RUNS):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    """Print one line for each GPU of each file."""
    print(f"{'events':>9} {'compared':>9} {'order known':>12} {'unknown':>9} {'replay':>9}  file")
    for path in map(Path, sys.argv[1:]):
        for recording in read(path):
            config = recorded_settings(recording).config
            run = run_facts(recording, None, None, {})
            best = run.inferences[0]
            known = seconds(lambda: infer(recording, config, best.order))  # noqa: B023
            unknown = seconds(lambda: infer(recording, config, None))  # noqa: B023
            replay = seconds(
                lambda: reproduce(run, best, max_misses=run.events, on_sample=lambda _: None)  # noqa: B023
            )
            per_event = [f"{1e6 * each / run.events:9.2f}" for each in (known, unknown, replay)]
            print(
                f"{run.events:9,} {best.observations:9,}    {' '.join(per_event)}  {path}",
                flush=True,
            )


if __name__ == "__main__":
    main()
