"""`torchmem demo --list`: what the scenarios do, and the published numbers they arrive at.

The demo from start to end: ranks as processes, the exporter in this one, and a screen that reads it.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchmem.demo.ranks import ENDING, Plan, Ranks
from torchmem.demo.screen import Exposition, Heading, plain, screen
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import Settings
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.rundir import RunDirectory
from torchmem.exporter.serve import serve
from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.simulator.scenarios import SCENARIOS

CAPTION = "The numbers were published by others; the demo reaches them with a simulated allocator."


def listing() -> Table:
    """A table as wide as the terminal."""
    table = Table(
        expand=True, header_style="bold", caption=CAPTION, caption_justify="left", show_lines=True
    )
    table.add_column("scenario", no_wrap=True, style="cyan")
    table.add_column("what happens", ratio=3)
    table.add_column("number it reproduces, and its source", ratio=3)
    for name, scenario in SCENARIOS.items():
        number = Text.assemble(f"{scenario.reproduces}\n", (scenario.source, "dim"))
        table.add_row(name, scenario.summary, number)
    return table


REFRESH_SECONDS = 1.0
PLAIN_SECONDS = 10.0
MOST_RANKS = 64


def run(arguments: argparse.Namespace) -> int:
    """Show the demo; Ctrl-C and SIGTERM end everything it started. Raises UsageError."""
    if arguments.list:
        Console().print(listing())
        return 0
    plan = _plan(arguments)
    if plan.real:
        from torchmem.demo.real import check

        check()
    address = Settings(listen=arguments.listen).address
    with ExitStack() as stack:
        stack.enter_context(_interrupted_by_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchmem-demo-")))
        ranks = Ranks(plan, folder)
        # From here on asked for in `_pause` alone: a KeyboardInterrupt in the midst of starting and ending would leave
        # ranks, files and tracebacks behind. Not earlier: what multiprocessing starts for `Ranks` lets them in again.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        nvml = PyNvml() if plan.real else ranks.cards.nvml()
        exporter = stack.enter_context(closing(Exporter(nvml, RunDirectory(folder / "run"))))
        server = stack.enter_context(closing(serve(exporter, *address)))
        stack.enter_context(closing(ranks))
        _play(plan, ranks, server.url)
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.scenario not in SCENARIOS:
        hint = did_you_mean(arguments.scenario, SCENARIOS, "torchmem demo --list shows them.")
        raise UsageError(f"There is no scenario {arguments.scenario!r}: {hint}")
    if arguments.real and SCENARIOS[arguments.scenario].neighbours:
        raise UsageError(
            f"--real cannot bring other processes: run {arguments.scenario} without --real."
        )
    if not 1 <= arguments.ranks <= MOST_RANKS:
        raise UsageError(
            f"--ranks {arguments.ranks} is not possible: give a number from 1 to {MOST_RANKS}."
        )
    if not 0 < arguments.duration < float("inf"):
        raise UsageError(
            f"--duration {arguments.duration:g} is not possible: give a number of seconds above 0."
        )
    return Plan(
        arguments.scenario,
        arguments.ranks,
        arguments.duration,
        arguments.seed,
        arguments.real,
        arguments.loop,
    )


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM, as docker stop sends it, ends the demo like Ctrl-C; either way without a traceback."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print("Ended.")
    finally:
        signal.signal(signal.SIGTERM, before)


def _play(plan: Plan, ranks: Ranks, url: str) -> None:
    title = f"torchmem demo: {plan.scenario}, {'real tensors' if plan.real else 'simulated'}"
    print(f"{title}; metrics at {url}/metrics", flush=True)
    while True:
        ranks.start()
        _show(plan, ranks, title, url)
        for rank, words in ranks.last_words().items():
            print(f"rank {rank} said: {words}", flush=True)
        if not plan.loop:
            return
        ranks.close()


def _pause(seconds: float) -> None:
    if signal.sigtimedwait(ENDING, seconds) is not None:
        raise KeyboardInterrupt


def _show(plan: Plan, ranks: Ranks, title: str, url: str) -> None:
    console = Console()
    started = time.monotonic()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    pause = REFRESH_SECONDS if live else min(PLAIN_SECONDS, plan.duration / 3)
    with live or ExitStack():
        while (elapsed := time.monotonic() - started) < plan.duration and ranks.alive():
            _pause(min(pause, plan.duration - elapsed))
            heading = Heading(title, url, time.monotonic() - started, plan.duration)
            try:
                readings = Exposition.scrape(url).ranks(ranks.pids)
            except (
                OSError
            ):  # too many scrapes at once, or the machine is too busy: the next one may do
                continue
            if live:
                live.update(screen(heading, readings), refresh=True)
            else:
                print(plain(heading, readings), flush=True)
