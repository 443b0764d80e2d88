"""The demo from start to end: rank processes, an exporter in this process, and a screen."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchmem.cli.terminal import interrupted_by
from torchmem.demo import real
from torchmem.demo.ranks import END_SIGNALS, DemoPlan, RankProcesses, simulated_rank
from torchmem.demo.screen import show
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import ExporterSettings
from torchmem.exporter.driver import PyNvml
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.simulator.scenarios import SCENARIOS

MAX_RANKS = 64
CAPTION = (
    "These numbers are from publications; the demo reproduces them with a simulated allocator."
)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo until its end, or until SIGINT or SIGTERM. Raise UsageError."""
    if arguments.list:
        Console().print(scenario_table())
        return 0
    plan = demo_plan(arguments)
    if plan.real:
        real.check()
    address = ExporterSettings(listen=arguments.listen).address
    with ExitStack() as stack:
        stack.enter_context(_interrupted_by_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchmem-demo-")))
        ranks = RankProcesses(plan, folder, real.real_rank if plan.real else simulated_rank)
        # From here on, only `show` accepts these signals: a KeyboardInterrupt while something
        # starts or ends would leave processes and files behind. It must not be earlier, because
        # the process that multiprocessing starts for `RankProcesses` unblocks them again.
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        nvml = PyNvml() if plan.real else ranks.gpus.nvml()
        exporter = stack.enter_context(closing(Exporter(nvml, RunDirectory(folder / "run"))))
        server = stack.enter_context(closing(serve(exporter, *address)))
        stack.enter_context(closing(ranks))
        _run_ranks(plan, ranks, server.url)
    return 0


def scenario_table() -> Table:
    """Return a table of all scenarios, as wide as the terminal."""
    table = Table(
        expand=True, header_style="bold", caption=CAPTION, caption_justify="left", show_lines=True
    )
    table.add_column("scenario", no_wrap=True, style="cyan")
    table.add_column("what happens", ratio=3)
    table.add_column("number that it reproduces, and its source", ratio=3)
    for name, scenario in SCENARIOS.items():
        number = Text.assemble(f"{scenario.reproduces}\n", (scenario.source, "dim"))
        table.add_row(name, scenario.summary, number)
    return table


def demo_plan(arguments: argparse.Namespace) -> DemoPlan:
    """Check the flags and return the plan. Raise UsageError."""
    if arguments.scenario not in SCENARIOS:
        hint = did_you_mean(arguments.scenario, SCENARIOS, "`torchmem demo --list` lists them.")
        raise UsageError(f"there is no scenario {arguments.scenario!r}: {hint}")
    if arguments.real and SCENARIOS[arguments.scenario].neighbors:
        raise UsageError(f"{arguments.scenario} simulates other processes: run it without --real.")
    if not 1 <= arguments.ranks <= MAX_RANKS:
        raise UsageError(f"--ranks must be between 1 and {MAX_RANKS}, not {arguments.ranks}.")
    if not 0 < arguments.duration < float("inf"):
        raise UsageError(f"--duration must be above 0 seconds, not {arguments.duration:g}.")
    return DemoPlan(
        scenario=arguments.scenario,
        ranks=arguments.ranks,
        duration=arguments.duration,
        seed=arguments.seed,
        real=arguments.real,
        loop=arguments.loop,
    )


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM, which `docker stop` sends, like Ctrl-C; end without a traceback on both."""
    try:
        with interrupted_by(signal.SIGTERM):
            yield
    except KeyboardInterrupt:
        print("Stopped.")


def _run_ranks(plan: DemoPlan, ranks: RankProcesses, url: str) -> None:
    title = f"torchmem demo: {plan.scenario}, {'real tensors' if plan.real else 'simulated'}"
    print(f"Open {url} in a browser; Prometheus reads {url}/metrics\n{title}", flush=True)
    while True:
        ranks.start()
        show(plan, ranks, url)
        for rank, line in ranks.last_lines().items():
            print(f"rank {rank}: {line}", flush=True)
        if not plan.loop:
            break
        ranks.close()
    if sys.stdout.isatty():
        ranks.close()
        print(f"The training has ended. {url} shows its last state until Ctrl-C.", flush=True)
        signal.sigwait(END_SIGNALS)
