"""Measure what a scrape costs the rank that serves its pod (the setting `leader_port`):

    PYTHONPATH=tests python -m benchmarks.leader

CPU milliseconds of the leader's process for one scrape of 1, 8 and 64 ranks that have published all
that a rank can publish, and for one turn of the election in a rank that does not lead. The client
is another process.
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
from support.stack import free_port

from torchmem.sdk._leader import Leader

SCRAPES, TURNS = 50, 2000
CLIENT = """
import sys, urllib.request
for _ in range(int(sys.argv[2])):
    urllib.request.urlopen(sys.argv[1]).read()
"""


def milliseconds(act: Callable[[], object], times: int) -> float:
    """Return the CPU time of this process for one of `times` acts."""
    before = time.process_time()
    act()
    return 1000 * (time.process_time() - before) / times


def main() -> None:
    """Print the figures."""
    for ranks in (1, 8, 64):
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                sample = own_sample(process=own_process(rank=rank))
                publish(Path(folder), sample, f"1-{rank + 1}-1.sample.json")
            directory, host = Path(folder) / str(os.geteuid()), sample.process.hostname
            leader = Leader(directory, host, "127.0.0.1", free_port())
            leader.campaign()
            command = [sys.executable, "-c", CLIENT, leader.url or "", str(SCRAPES)]
            subprocess.run([*command[:-1], "2"], check=True)
            spent = milliseconds(
                lambda command=command: subprocess.run(command, check=True), SCRAPES
            )
            print(f"a scrape of {ranks:2} ranks {spent:8.2f} ms CPU")
            leader.close()
    with tempfile.TemporaryDirectory() as folder:
        holder = [sys.executable, "-c", HOLDER, folder]
        with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout
            other.stdout.readline()
            leader = Leader(Path(folder), "host", "127.0.0.1", 1)
            spent = milliseconds(lambda: [leader.campaign() for _ in range(TURNS)], TURNS)
            print(f"a turn without the lock {1000 * spent:5.1f} us CPU")
            leader.close()


HOLDER = """
import sys
from pathlib import Path
from torchmem.sdk._leader import Leader
leader = Leader(Path(sys.argv[1]), "host", "127.0.0.1", 1)
try:
    leader.campaign()
except OSError:
    pass
print("holds", flush=True)
sys.stdin.read()
"""

if __name__ == "__main__":
    main()
