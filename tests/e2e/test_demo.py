"""The main path with nothing faked but the hardware: demo → exporter → Prometheus → Alertmanager → webhook."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import QUERIES, filled_in
from support.stack import Prometheus, Receiver, answers, free_port, full_stack, get, running
from support.waiting import until

from torchmem.sample.procfs import start_ticks
from torchmem.simulator.scenarios import SCENARIOS

DEMO = [sys.executable, "-m", "torchmem.cli", "demo"]


def children(pid: int) -> set[int]:
    """Living processes that descend from `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # anybody's process may end meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Receiver]]:
    """A demo of two and a half minutes with three ranks, watched by the real stack with its shipped configuration."""
    folder = tmp_path_factory.mktemp("demo")
    address = f"127.0.0.1:{free_port()}"
    command = [*DEMO, "--ranks", "3", "--duration", "150", "--seed", "1", "--listen", address]
    with running(command, folder / "demo.log"):
        until(lambda: answers(f"http://{address}/-/ready"), pause=0.2)
        with full_stack(folder, address) as stack:
            yield stack


def received(webhook: Receiver, name: str) -> list[dict[str, Any]]:
    """Firing alerts of this name that reached the webhook."""
    return [
        a for a in webhook.alerts if a["labels"]["alertname"] == name and a["status"] == "firing"
    ]


@pytest.mark.stack
def test_the_fragmentation_alert_reaches_the_webhook(watched: tuple[Prometheus, Receiver]) -> None:
    """Fragmentation that rises in the ranks becomes a message that names rank, bytes and remedy."""
    _, webhook = watched

    alert = until(lambda: received(webhook, "TorchmemFragmentationHigh"), 150, 0.5)[0]

    assert "warning" == alert["labels"]["severity"]
    assert re.search(
        r"rank \d: GPU memory is fragmented, [\d.]+GiB stranded", alert["annotations"]["summary"]
    )
    assert "expandable_segments:True" in alert["annotations"]["description"]


@pytest.mark.stack
def test_one_rank_dies_of_fragmentation_and_is_still_shown(
    watched: tuple[Prometheus, Receiver],
) -> None:
    """Exactly one rank ends in OutOfMemoryError with free memory to spare; its last state stays, the others run."""
    prometheus, webhook = watched
    then = prometheus.when(
        lambda then: then.value('count(torchmem_process_state{state="oom"} == 1)') == 1
    )

    (dead,) = then.query('torchmem_process_state{state="oom"} == 1')
    rank = dead["metric"]["rank"]
    free = then.value(f'torchmem_free_bytes{{rank="{rank}",state="stranded"}}')
    requested = then.value(f'torchmem_last_oom_requested_bytes{{rank="{rank}"}}')
    assert free is not None
    assert requested is not None
    assert free > requested
    assert 1 == then.value(f'torchmem_ooms_total{{rank="{rank}",cause="fragmentation"}}')
    assert 2 == then.value('count(torchmem_process_state{state="running"} == 1)')
    assert (
        rank
        == until(lambda: received(webhook, "TorchmemOutOfMemory"), pause=0.5)[0]["labels"]["rank"]
    )


# What the demo has no case of, by panel and letter of the query. Parts of a device: memory cached before a rank's first
# snapshot, and memory of GPUs without NVML. A trend needs 30 minutes, idleness 10, a falling headroom and an alert come
# and go; the ranks name no phases and report no samples; nothing else goes wrong.
WITHOUT_DATA = (
    r"Memory of .* [EI]|by cause [ACD]|Growth of the peak per hour A|Settings that PyTorch ignored A"
    r"|First runs out in A|Headroom used up in A|Tightest ranks C|Alerts that fire now [AB]|Held but idle A"
    r"|GPUs with wasted memory [BC]|Peak by phase A|Samples per second A|Files refused per minute A"
    r"|Nodes without NVML A|Errors by stage A"
)
# Simulated cards have memory and nothing else: the dashboard of what the driver tells has a test of its own.
DASHBOARDS_OF_RANKS = {"fleet", "training-memory", "oom", "self"}


@pytest.mark.stack
def test_every_query_of_the_dashboards_returns_data(watched: tuple[Prometheus, Receiver]) -> None:
    """Each query of the dashboards that show ranks had an answer lately, but for cases that the demo does not have."""
    prometheus, _ = watched
    until(lambda: prometheus.value("sum(torchmem_ooms_total)"), 150, 0.5)
    until(lambda: prometheus.query("rank:torchmem_alloc_retries:increase10m"), pause=0.5)
    wanted = {
        name: filled_in(text, span="1m", compare="demo-fragmentation")
        for name, text in QUERIES.items()
        if name.partition(":")[0] in DASHBOARDS_OF_RANKS
        and not re.search(f"({WITHOUT_DATA})$", name)
    }

    def answered(text: str) -> bool:
        # What a rank held is gone after its end, and is what the dashboard shows from before it.
        return bool(prometheus.query(text) or prometheus.query(f"last_over_time(({text})[2m:2s])"))

    def empty() -> list[str]:
        return [name for name, text in wanted.items() if not answered(text)]

    with suppress(AssertionError):
        until(lambda: not empty(), pause=1)
    assert [] == empty()


@pytest.mark.stack
def test_the_parts_of_every_card_add_up(watched: tuple[Prometheus, Receiver]) -> None:
    """What the dashboard stacks for a card sums to the card's memory, unless a rank gave memory back between its own
    reading and the driver's, which the next readings mend.
    """
    prometheus, _ = watched
    until(lambda: prometheus.query("gpu:torchmem_memory_bytes:sum"), pause=0.5)

    difference = (
        "sum without (part) (gpu:torchmem_memory_bytes:sum) - gpu:torchmem_memory_total_bytes:max"
    )
    until(lambda: 3 == len(prometheus.query(f"{difference} == 0")), pause=0.5)


def test_an_interrupt_ends_everything() -> None:
    """Ctrl-C leaves no process, no port and no traceback behind, whatever the moment."""
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

    assert 0 == process.returncode
    assert "Traceback" not in errors
    until(lambda: not any(start_ticks(pid) for pid in started))
    assert not answers(f"http://{address}/-/healthy")


def test_it_ends_by_itself(tmp_path: Path) -> None:
    """`--duration` ends the demo, which prints where the numbers are and leaves no file behind."""
    address = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [*DEMO, "--ranks", "2", "--duration", "3", "--listen", address], capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)}, timeout=300, check=False,
    )  # fmt: skip

    assert (0, "") == (done.returncode, done.stderr)
    assert f"http://{address}/metrics" in done.stdout
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [70, 160])
def test_the_list_fits_the_terminal(columns: int) -> None:
    """`--list` names every scenario with its story, number and source, wrapped to the terminal's width."""
    environment = os.environ | {"COLUMNS": str(columns)}
    done = subprocess.run(
        [*DEMO, "--list"], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    words = re.findall(r"[^\s│]+", done.stdout)

    assert 0 == done.returncode
    assert columns == max(len(line) for line in done.stdout.splitlines())
    assert "simulated" in words
    for scenario in SCENARIOS.values():
        assert scenario.name in words
        assert set(f"{scenario.summary} {scenario.reproduces}".split()) <= set(words)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scenario", "fragmentaton"], "did you mean 'fragmentation'"),
        (["--scenario", "neighbour", "--real"], "without --real"),
        (["--ranks", "0"], "--ranks"),
        (["--listen", "nowhere"], "HOST:PORT"),
    ],
)
def test_bad_flags_are_one_sentence(arguments: list[str], sentence: str) -> None:
    """A wrong flag is answered in a sentence that says what to do, with exit code 2."""
    done = subprocess.run(
        [*DEMO, *arguments], capture_output=True, text=True, timeout=300, check=False
    )

    assert 2 == done.returncode
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    """When something else listens there, the demo says so and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*DEMO, "--listen", address], capture_output=True, text=True, timeout=300, check=False
        )

    assert 2 == done.returncode
    assert "--listen" in done.stderr
    assert 1 == len(done.stderr.strip().splitlines())
