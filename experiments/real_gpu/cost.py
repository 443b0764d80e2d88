"""What torchmem costs beside a real GPU: step time, and the CPU time of the exporter."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from benchmarks.exporter_cost import PEER, Program, running, spent
from benchmarks.overhead.steps import WARM_UP_STEPS, compare, training_step
from experiments.real_gpu.figures import Figures
from experiments.real_gpu.machine import SITE

STEPS, PAIRS = 1000, 5
PHANTOM_STEPS = 20
MOST_SECONDS = 6.5
"""Of one turn, of which there are ten."""
MOST_RATIO = 1.02
IDLE_SECONDS, SCRAPES = 8.0, 30


def step_time(figures: Figures) -> None:
    """Train in turns with and without torchmem: a step of a small model is short."""
    step = training_step()
    for _ in range(WARM_UP_STEPS):
        step()
    began = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
    of_one = (time.perf_counter() - began) / WARM_UP_STEPS
    steps = PHANTOM_STEPS if figures.is_phantom else STEPS
    seconds = min(MOST_SECONDS, steps * of_one)
    figures.add("pairs", PAIRS)
    figures.add("steps of each turn, about", round(seconds / of_one))
    found = compare("torchmem", step, seconds, PAIRS)
    without = found["step_seconds"]
    assert isinstance(without, float)
    figures.add("step without torchmem", without, "seconds")
    for clock in ("wall", "cpu"):
        ratio = found[clock]
        assert isinstance(ratio, tuple)
        median, low, high = ratio
        is_judged = clock == "wall" and not figures.is_phantom
        figures.add(
            f"{clock} time with torchmem, as a ratio",
            median,
            "ratio",
            f"{low:.4f} to {high:.4f}",
            right=median <= MOST_RATIO if is_judged else None,
            note="" if is_judged else "not judged",
        )


def exporter(figures: Figures) -> None:
    """Compare the CPU time of exporters that do nothing, and that are scraped."""
    import os

    command = [sys.executable, "-m", "torchmem.cli", "exporter", "--listen", "127.0.0.1:PORT"]
    programs = {"torchmem": Program(command, os.environ)}
    peer = shutil.which(PEER) or str(SITE / "bin" / PEER)
    if Path(peer).exists():
        programs[PEER] = Program([sys.executable, peer, "--port", "PORT"], os.environ)
    else:
        figures.missing(PEER, "it is not installed")
    with running(programs) as servers:
        idle = spent(servers, lambda: time.sleep(IDLE_SECONDS))

        def scrape() -> None:
            for _ in range(SCRAPES):
                for server in servers.values():
                    server.scrape()
                time.sleep(0.1)

        scraped = spent(servers, scrape)
        series = {name: server.scrape().series for name, server in servers.items()}
    for name in programs:
        figures.add(f"{name}: series", series[name])
        figures.add(f"{name}: idle, of a core", idle[name] / IDLE_SECONDS, "share")
        per_scrape = scraped[name] / SCRAPES
        is_less = name == PEER or PEER not in scraped or per_scrape < scraped[PEER] / SCRAPES
        figures.add(f"{name}: CPU of a scrape", per_scrape, "seconds", right=is_less)
