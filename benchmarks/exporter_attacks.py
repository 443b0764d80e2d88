"""Measure the exporter under attacks by local users: its memory, and the honest scrapes it answers.

    sudo nice python -m benchmarks.exporter_attacks --seconds 30            # each attack, and all
    sudo nice python -m benchmarks.exporter_attacks unread map --seconds 30

The attacks are defined in tests/support/attacks.py. Two users publish pages of 8 MB each. A
Prometheus server scrapes every 2 s with a timeout of 10 s. Needs root, to publish as several users.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.attacks import USERS, Attack, attackers, attacks, honest_scrape, peak_mib, publish
from support.exporter_process import ExporterProcess, exporter_process
from support.fake_nvml import FakeNode

from torchmem.sample.run_directory import RUN_DIR_MODE

SCRAPE_SECONDS = 2.0


def measure(name: str, exporter: ExporterProcess, wanted: Sequence[Attack], seconds: float) -> None:
    """Attack, scrape, and print a row of Markdown."""
    process = psutil.Process(exporter.popen.pid)
    answered = scrapes = 0
    longest = peak = 0.0
    cpu = process.cpu_times()
    with attackers(exporter.url, wanted):
        end = time.monotonic() + seconds
        while time.monotonic() < end and exporter.popen.poll() is None:
            is_answered, took = honest_scrape(exporter.url)
            scrapes, answered, longest = scrapes + 1, answered + is_answered, max(longest, took)
            with contextlib.suppress(psutil.Error, OSError):
                peak = max(peak, peak_mib(process.pid))
            time.sleep(max(0.0, SCRAPE_SECONDS - took))
    ended = exporter.popen.poll()
    used = 0.0
    with contextlib.suppress(psutil.Error):
        after = process.cpu_times()
        used = after.user + after.system - cpu.user - cpu.system
    state = "yes" if ended is None else f"no: {ended}"
    print(
        f"| {name} | {peak:.0f} | {answered} of {scrapes} | {longest:.1f} | {used:.0f} | {state} |",
        flush=True,
    )


def run(name: str, wanted: Sequence[Attack], seconds: float) -> None:
    """Measure an exporter of its own under some attacks."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        run_dir = folder / "run"
        run_dir.mkdir()
        run_dir.chmod(RUN_DIR_MODE)
        for user in USERS:
            publish(run_dir, user)
        node = FakeNode(folder / "node", "h100_busy")
        exporter = stack.enter_context(exporter_process(node, run_dir, scrape_deadline_seconds=5))
        honest_scrape(exporter.url)
        measure(name, exporter, wanted, seconds)


def main() -> None:
    """Run the attacks."""
    known = attacks()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join([*known, "all"]))
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("acting as several users of the machine needs root")
    print("| attack | peak RSS, MiB | honest scrapes answered | longest, s | CPU, s | runs on |")
    print("|---|---|---|---|---|---|")
    for name in arguments.attacks or ["none", *known, "all"]:
        wanted = {"none": [], "all": list(known.values())}
        run(name, wanted[name] if name in wanted else [known[name]], arguments.seconds)


if __name__ == "__main__":
    main()
