"""The demo from start to end: rank processes, an exporter in this process, and a screen."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchmem.demo.ending import demo_line, explained, next_steps
from torchmem.demo.ranks import END_SIGNALS, DemoPlan, RankProcesses
from torchmem.demo.screen import last_picture, show
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import ExporterSettings
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, PortInUseError, serve
from torchmem.output.terminal import counted, interrupted_by
from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.simulator.scenarios import SCENARIOS
from torchmem.top.loop import plain_console

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
    address = ExporterSettings(listen=arguments.listen).address
    with ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchmem-demo-")))
        ranks = RankProcesses(plan, folder)
        # From here on, only `show` accepts these signals: a KeyboardInterrupt while something
        # starts or ends would leave processes and files behind. It must not be earlier, because
        # the process that multiprocessing starts for `RankProcesses` unblocks them again.
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        exporter = Exporter(ranks.gpus.nvml(), RunDirectory(folder / "run"))
        stack.enter_context(closing(exporter))
        server, note = _serve(exporter, *address, by_make=arguments.by_make)
        stack.enter_context(closing(server))
        stack.enter_context(closing(ranks))
        _run_ranks(plan, ranks, server.url, note)
        if sys.stdout.isatty():
            ranks.close()
            _stay(server.url, folder / "run")
        else:
            print(*explained(folder / "run"), sep="\n", flush=True)
    return 0


def _serve(
    exporter: Exporter, host: str, port: int, *, by_make: bool
) -> tuple[ExporterServer, str]:
    """Serve on the address, or on a free port if its port is in use; return what to say then."""
    try:
        return serve(exporter, host, port), ""
    except PortInUseError:
        server = serve(exporter, host, 0)
    other = demo_line("--listen HOST:PORT", by_make=by_make)
    print(f"Port {port} is in use. The exporter listens on {server.url}; `{other}` changes that.")
    return server, f"port {port} is in use"


def _stay(url: str, run_dir: Path) -> None:
    """Leave the last picture on the terminal with what to do next, and wait for Ctrl-C."""
    console = plain_console()
    lines = next_steps(url, run_dir)
    rows = sum(-(-len(line) // console.width) for line in lines)
    picture = last_picture(url, console, console.height - rows - 1)
    if picture:
        console.print(picture, end="")
    print(*lines, sep="\n", flush=True)
    signal.sigwait(END_SIGNALS)


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
    name, line = arguments.scenario, partial(demo_line, by_make=arguments.by_make)
    if name not in SCENARIOS:
        hint = did_you_mean(name, SCENARIOS, f"`{line('--list')}` lists them.")
        raise UsageError(f"there is no scenario {name!r}: {hint}")
    if not 1 <= arguments.ranks <= MAX_RANKS:
        bounds = f"between 1 and {MAX_RANKS}, not {arguments.ranks}"
        raise UsageError(f"--ranks must be {bounds}: write `{line('--ranks 4')}`.")
    if not 0 < arguments.duration < float("inf"):
        bounds = f"above 0 seconds, not {arguments.duration:g}"
        raise UsageError(f"--duration must be {bounds}: write `{line('--duration 300')}`.")
    return DemoPlan(
        scenario=arguments.scenario,
        ranks=arguments.ranks,
        duration=arguments.duration,
        seed=arguments.seed,
        loop=arguments.loop,
    )


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM, which `docker stop` sends, and a closed terminal like Ctrl-C: no traceback."""
    try:
        with interrupted_by(*END_SIGNALS):
            yield
    except KeyboardInterrupt:
        try:
            print("Stopped.", flush=True)
        except OSError:
            _drop_output()
    except OSError as error:  # a terminal that is gone accepts no text
        if error.errno != errno.EIO:
            raise
        _drop_output()


def _drop_output() -> None:
    """Drop what stdout still holds: Python would write it at its end, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_ranks(plan: DemoPlan, ranks: RankProcesses, url: str, note: str) -> None:
    gpus = f"on {counted(plan.ranks, 'simulated GPU')}, beside one more in MIG mode"
    print(f"Open {url} in a browser; Prometheus reads {url}/metrics", flush=True)
    print(f"torchmem demo: {plan.scenario} {gpus}", flush=True)
    while True:
        ranks.start()
        show(plan, ranks, url, note)
        for rank, line in ranks.last_lines().items():
            print(f"rank {rank}: {line}", flush=True)
        if not plan.loop:
            break
        ranks.close()
