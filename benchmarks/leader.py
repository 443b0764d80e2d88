"""Measure what serving its pod costs a rank (the setting `leader_port`):

    PYTHONPATH=tests python -m benchmarks.leader

CPU milliseconds of the leader's process for the page of 1, 8 and 64 ranks that have published
everything that a rank can publish, and for one turn of the election in a rank that does not lead.
`benchmarks.endpoint` measures the cost of requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from support.publishing import own_process, own_sample, publish

from torchmem.sdk.publish.leader import Leader, registry
from torchmem.sdk.publish.page import Page
from torchmem.sdk.safety.errors import Errors

PAGES, TURNS = 50, 2000


def cpu_milliseconds(act: Callable[[], object], times: int) -> float:
    """Return the CPU time of this process for one of `times` acts."""
    before = time.process_time()
    act()
    return 1000 * (time.process_time() - before) / times


def page_milliseconds(ranks: int, folder: Path) -> float:
    """Return the cost of rendering the page."""
    for rank in range(ranks):
        sample = own_sample(process=own_process(rank=rank))
        publish(folder, sample, f"1-{rank + 1}-1.sample.json")
    served = registry(folder / str(os.geteuid()), sample.process.hostname)

    def render() -> None:
        for _ in range(PAGES):
            Page(served).body(openmetrics=True, compressed=True)

    return cpu_milliseconds(render, PAGES)


def turn_milliseconds(folder: Path) -> float:
    """Return the cost of a turn of the election while another process holds the lock."""
    holder = [sys.executable, "-c", HOLDER, str(folder)]
    leader = Leader(folder, "host", "127.0.0.1", 1, Errors())

    def campaign() -> None:
        for _ in range(TURNS):
            leader.campaign()

    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        return cpu_milliseconds(campaign, TURNS)


def main() -> None:
    """Print the figures."""
    for ranks in (1, 8, 64):
        with tempfile.TemporaryDirectory() as folder:
            spent = page_milliseconds(ranks, Path(folder))
            print(f"a page of {ranks:2} ranks       {spent:8.2f} ms CPU")
    with tempfile.TemporaryDirectory() as folder:
        print(f"a turn without the lock {turn_milliseconds(Path(folder)):8.4f} ms CPU")


HOLDER = """
import sys
from pathlib import Path
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.publish.leader import Leader
leader = Leader(Path(sys.argv[1]), "host", "127.0.0.1", 1, Errors())
try:
    leader.campaign()
except OSError:
    pass
print("holds", flush=True)
sys.stdin.read()
"""

if __name__ == "__main__":
    main()
