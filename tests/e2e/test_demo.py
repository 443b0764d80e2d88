"""The demo from end to end: ranks, exporter, Prometheus, Alertmanager and a webhook."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import pytest
from support.dashboards import QUERIES, filled_in
from support.stack import Prometheus, Receiver, answers, free_port, full_stack, get, running
from support.waiting import until

from torchmem.host.procfs import start_ticks
from torchmem.simulator.gpu import CONTEXT_BYTES

DEMO = [sys.executable, "-m", "torchmem.cli", "demo"]


def demo(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        [*DEMO, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | (environment or {}),
        timeout=300,
        check=False,
    )


def children(pid: int) -> set[int]:
    """Return the ids of all processes that descend from `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process may end at any time
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while new := {child for child, parent in parents.items() if parent in family} - family:
        family |= new
    return family - {pid}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Receiver]]:
    """Run a demo of 240 s with three ranks under Prometheus and Alertmanager as configured here."""
    folder = tmp_path_factory.mktemp("demo")
    address = f"127.0.0.1:{free_port()}"
    command = [*DEMO, "--ranks", "3", "--duration", "240", "--seed", "1", "--listen", address]
    with running(command, folder / "demo.log"):
        until(lambda: answers(f"http://{address}/-/ready"), pause=0.2)
        with full_stack(folder, address) as stack:
            yield stack


def received(webhook: Receiver, name: str) -> list[dict[str, Any]]:
    """Return the firing alerts of this name that reached the webhook."""
    return [
        alert
        for alert in webhook.alerts
        if alert["labels"]["alertname"] == name and alert["status"] == "firing"
    ]


@pytest.mark.stack
def test_the_fragmentation_alert_reaches_the_webhook(
    monitored: tuple[Prometheus, Receiver],
) -> None:
    """Rising fragmentation leads to a notification with rank, stranded bytes and remedy."""
    _, webhook = monitored

    alert = until(lambda: received(webhook, "TorchmemFragmentationHigh"), 240, 0.5)[0]

    assert alert["labels"]["severity"] == "warning"
    assert re.search(
        r"rank \d: fragmentation: [\d.]+GiB is free but stranded", alert["annotations"]["summary"]
    )
    assert "expandable_segments:True" in alert["annotations"]["description"]


@pytest.mark.stack
def test_the_parts_of_every_gpu_add_up(monitored: tuple[Prometheus, Receiver]) -> None:
    """The stacked parts of each GPU add up to its memory, and none is negative.

    A scrape that Prometheus stores in the middle of an evaluation shows in some of the rules only,
    so a tenth of the moments may differ. What is outside the allocator is the CUDA context, which
    counts as another process's before the first moment at which both sides of the difference are
    known.
    """
    prometheus, _ = monitored
    parts, total = "gpu:torchmem_memory_bytes:sum", "gpu:torchmem_memory_total_bytes:max"
    outside = f'{parts}{{part="outside_allocator"}}'
    # Not the newest evaluation, of which some rules may be missing.
    window = "[30s:1s] offset 5s"
    until(lambda: len(prometheus.query(f"count_over_time(({outside}){window}) > 25")) == 3, pause=1)

    def usually_at_most(expression: str) -> float:
        rows = prometheus.query(f"quantile_over_time(0.9, ({expression}){window})")
        return max(float(row["value"][1]) for row in rows)

    lowest = prometheus.query(f"min_over_time(({parts}){window})")
    assert min(float(row["value"][1]) for row in lowest) == 0
    assert usually_at_most(f"abs(sum without (part) ({parts}) - {total})") < 1
    assert usually_at_most(outside) <= 1.1 * CONTEXT_BYTES
    others = f'{parts}{{part="other_processes"}} and on (uuid) {outside}'
    # While a rank grows on a busy machine, its sample is older than what the driver says.
    until(lambda: usually_at_most(others) <= 1.1 * CONTEXT_BYTES, pause=1)


@pytest.mark.stack
def test_one_rank_runs_out_of_memory_and_stays_visible(
    monitored: tuple[Prometheus, Receiver],
) -> None:
    """One rank ends with an OOM although enough memory is free; its last state stays visible."""
    prometheus, webhook = monitored
    then = prometheus.when(
        lambda then: then.value('count(torchmem_process_state{state="oom"} == 1)') == 1
    )

    (ended,) = then.query('torchmem_process_state{state="oom"} == 1')
    rank = ended["metric"]["rank"]
    free = then.value(f'torchmem_free_bytes{{rank="{rank}",state="stranded"}}')
    requested = then.value(f'torchmem_last_oom_requested_bytes{{rank="{rank}"}}')
    assert free is not None
    assert requested is not None
    assert free > requested
    assert then.value(f'torchmem_ooms_total{{rank="{rank}",cause="fragmentation"}}') == 1
    assert then.value('count(torchmem_process_state{state="running"} == 1)') == 2
    alert = until(lambda: received(webhook, "TorchmemOutOfMemory"), pause=0.5)[0]
    assert rank == alert["labels"]["rank"]


# Queries without data in the demo, by panel and letter. Of the parts of a device: private pools,
# memory cached before the first snapshot, other and dead processes, and GPUs without NVML. A trend
# needs 30 minutes, idleness and the pace of headroom 10. Falling headroom, alerts and marks are
# temporary. No rank is stalled, killed or started with advice, and the ranks have no components,
# phases, samples, pinned memory, private pools, libraries or errors other than an OOM. The only run
# ends with that OOM, no launch follows, and no engine serves.
WITHOUT_DATA = (
    r"Memory of .* [D-JL]|Where the memory is [D-JL]|NCCL by process group A"
    r"|What the tensors are [A-J]|Rank .shown [BEF]"
    r"|Ranks by state [B-F]|Ranks [B-F]|[Bb]y cause [ACDEF]|Peak by phase A"
    r"|Pinned memory A|Memory released A"
    r"|Growth of the peak per hour A"
    r"|Allocator settings B|Out of memory in A|Ranks with the least headroom [EF]"
    r"|Deviation from the usual [ABC]|Samples per second A"
    r"|Ranks with the least headroom B|Firing alerts [AB]|Cost .* [A-E]"
    r"|GPUs that waste most [A-F]|CUDA graphs and MemPools A|Given back while asleep A"
    r"|Files rejected per minute A"
    r"|Collectors that failed A|SDK errors by stage A"
    r"|Start .mark.|Killed or failed .mark.|Alert .mark.|Advice .mark."
    r"|Pressure hook dropped .mark.|Active peak E|Left at the peak E"
    r"|Headroom [FG]"
    r"|GPU-hours by .* [BDE]|Room at the peak [ABC]"
    r"|What the engine holds [A-F]|KV cache in use [AB]|Planned and actual [A-D]"
    r"|Free beyond what wakes up A|Left after a sleep A|Sleeps and preemptions [AB]"
)
# The end of queries for the band of all ranks, beyond those that have a line.
OF_MANY_RANKS = " > 10"
# The dashboard of the GPUs has a test of its own, with nodes that report more than the demo.
RANK_DASHBOARDS = {"fleet", "training-memory", "oom", "self"}


def test_every_exception_names_a_query() -> None:
    """Each alternative of WITHOUT_DATA matches a query of the dashboards."""
    assert [
        pattern
        for pattern in WITHOUT_DATA.split("|")
        if not any(re.search(f"{pattern}$", name) for name in QUERIES)
    ] == []


@pytest.mark.stack
def test_every_query_of_the_dashboards_returns_data(monitored: tuple[Prometheus, Receiver]) -> None:
    """Each query of the dashboards of ranks has returned data, except for those listed above."""
    prometheus, _ = monitored
    until(lambda: prometheus.value("sum(torchmem_ooms_total)"), 150, 0.5)
    until(lambda: prometheus.query("rank:torchmem_alloc_retries:increase10m"), pause=0.5)
    queries = {
        name: filled_in(text, compare="demo-fragmentation")
        for name, text in QUERIES.items()
        if name.partition(":")[0] in RANK_DASHBOARDS
        and not re.search(f"({WITHOUT_DATA})$", name)
        and not text.endswith(OF_MANY_RANKS)
    }

    def answered(text: str) -> bool:
        # The series of a rank end with it; the dashboard then shows their last values.
        return bool(prometheus.query(text) or prometheus.query(f"last_over_time(({text})[2m:2s])"))

    def empty() -> list[str]:
        return [name for name, text in queries.items() if not answered(text)]

    with suppress(AssertionError):
        until(lambda: not empty(), pause=1)
    assert empty() == []


def test_an_interrupt_ends_everything() -> None:
    """After Ctrl-C there is no process, no open port and no traceback."""
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [*DEMO, "--ranks", "2", "--listen", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: answers(f"http://{address}/-/ready"), pause=0.1)
    until(lambda: b"torchmem_process_state{" in get(f"http://{address}/metrics"), pause=0.1)
    started = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 0
    assert "Traceback" not in errors
    until(lambda: not any(start_ticks(pid) for pid in started))
    assert not answers(f"http://{address}/-/healthy")


def test_it_ends_by_itself(tmp_path: Path) -> None:
    """The demo ends after its scenario, prints the address of the metrics, and leaves no file."""
    address = f"127.0.0.1:{free_port()}"
    arguments = ["--ranks", "2", "--duration", "3", "--listen", address]
    done = demo(*arguments, environment={"TMPDIR": str(tmp_path)})

    assert (done.returncode, done.stderr) == (0, "")
    assert f"http://{address}/metrics" in done.stdout
    assert list(tmp_path.iterdir()) == []


ENDED = re.compile(rb'"state":"oom"')


def _lines_before(text: bytes, screen: IO[bytes]) -> str:
    """Return the lines up to the one with a text, which is read, too."""
    lines = iter(screen.readline, b"")
    before = list(takewhile(lambda line: text not in line, lines))
    return b"".join(before).decode()


def test_on_a_terminal_the_page_stays() -> None:
    """After the training has ended, the page and the last picture show its state until Ctrl-C."""
    address = f"127.0.0.1:{free_port()}"
    ours, theirs = pty.openpty()
    arguments = [*DEMO, "--ranks", "1", "--duration", "6", "--listen", address]
    terminal = os.environ | {"TERM": "xterm-256color"}
    with (
        os.fdopen(ours, "rb") as screen,
        subprocess.Popen(arguments, stdout=theirs, env=terminal) as process,
    ):
        os.close(theirs)  # so that reading fails when the demo ends
        try:
            assert f"Open http://{address} in" in screen.readline().decode()
            screens = _lines_before(b"until Ctrl-C", screen)
            assert "running" not in screens.rpartition("\x1b[?1049l")[2]
            assert f"top --exporter http://{address}" in _lines_before(b"in a browser", screen)
            until(lambda: ENDED.search(get(f"http://{address}/api/v1/state")))
        finally:
            process.send_signal(signal.SIGINT)

    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ([], "torchmem demo --listen HOST:PORT"),
        (["--by-make"], "make demo ARGS='--listen HOST:PORT'"),
    ],
    ids=["torchmem", "make"],
)
def test_a_port_in_use(flags: list[str], command: str) -> None:
    """If the port is in use, the demo takes a free one, and says so and how to choose another."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["--ranks", "1", "--duration", "0.1", "--listen", f"127.0.0.1:{port}"]
        done = demo(*flags, *arguments)

    assert (done.returncode, done.stderr) == (0, "")
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith(f"Port {port} is in use. The exporter listens on http://127.0.0.1:")
    assert f"`{command}`" in first
    assert second.split()[1] == first.split()[9].rstrip(";")
