"""Measure what users who rewrite 1,024 ranks each without a pause cost: the exporter, and others.

    sudo nice python -m benchmarks.hostile_users --seconds 60

Three users replace their files as fast as they can, each as a process of its own user ID. A fourth
user publishes one rank. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.exporter_process import ExporterProcess, exporter_process
from support.exposition import Exposition
from support.fake_nvml import FakeNode
from support.publishing import own_sample

from torchmem.sample.run_directory import RUN_DIR_MODE, SAMPLE_SUFFIX, replace_file
from torchmem.sample.sample import Process, encode

HONEST, FIRST_ATTACKER, ATTACKERS = 61001, 61011, 3
RANKS = 1024
SCRAPE_SECONDS = 5.0
GONE = Process(pid=4_000_000, pid_namespace=None, start_ticks=1, hostname="h", run="night", rank=0)


def start(user: int, run_dir: Path, ranks: int, pause: float) -> int:
    """Start a process of this user that rewrites its samples, and return its pid."""
    pid = os.fork()
    if pid == 0:
        os.setgid(user)
        os.setuid(user)
        _rewrite(run_dir / str(user), user, ranks, pause)
    return pid


def _rewrite(folder: Path, user: int, ranks: int, pause: float) -> NoReturn:
    folder.mkdir(mode=0o755, exist_ok=True)
    sample = own_sample()
    for count in itertools.count(1):
        for rank in range(ranks):
            process = replace(GONE, pid=GONE.pid + rank, rank=rank, run=f"run-{user}")
            changed = replace(
                sample,
                process=process,
                steps=replace(sample.steps, count=count),
                timestamp=time.time(),
                ended="exited",
            )
            replace_file(folder / f"0-{rank}-1{SAMPLE_SUFFIX}", encode(changed))
        time.sleep(pause)
    raise AssertionError


def honest_series(page: Exposition) -> list[str]:
    """Return the names of the honest rank's series, one for each series."""
    run = ("run", f"run-{HONEST}")
    return [name for name, series in page.series.items() for labels in series if run in labels]


def measure(exporter: ExporterProcess, run_dir: Path, seconds: float) -> None:
    """Attack, scrape, and print a row of Markdown."""
    process = psutil.Process(exporter.popen.pid)
    alone = len(honest_series(exporter.scrape()))
    attackers = [start(FIRST_ATTACKER + number, run_dir, RANKS, 0.0) for number in range(ATTACKERS)]
    before, end = process.cpu_times(), time.monotonic() + seconds
    complete = scrapes = size = 0
    peak, longest = 0, 0.0
    try:
        while time.monotonic() < end:
            begun = time.monotonic()
            text = exporter.get()
            longest = max(longest, time.monotonic() - begun)
            scrapes += 1
            size = max(size, len(text))
            complete += len(honest_series(Exposition.of_text(text))) == alone
            peak = max(peak, process.memory_info().rss)
            time.sleep(max(0.0, SCRAPE_SECONDS - (time.monotonic() - begun)))
        after = process.cpu_times()
    finally:
        for pid in attackers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    cpu = after.user + after.system - before.user - before.system
    print("| scrapes | honest rank complete | longest | CPU of a scrape | RAM at most | page |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {scrapes} | {complete} ({alone} series) | {longest:.1f} s | {cpu / scrapes:.2f} s "
        f"| {peak / 1e6:.0f} MB | {size / 1e6:.1f} MB |"
    )


def main() -> None:
    """Run the attack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("acting as several users of the machine needs root")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        run_dir = folder / "run"
        run_dir.mkdir()
        run_dir.chmod(RUN_DIR_MODE)
        honest = start(HONEST, run_dir, 1, 1.0)
        stack.callback(os.waitpid, honest, 0)
        stack.callback(os.kill, honest, signal.SIGKILL)
        time.sleep(2)
        node = FakeNode(folder / "node", "h100_busy")
        exporter = stack.enter_context(exporter_process(node, run_dir))
        measure(exporter, run_dir, arguments.seconds)


if __name__ == "__main__":
    main()
