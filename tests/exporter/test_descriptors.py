"""An exporter without file descriptors says so, and its clients cannot take them all."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from support.exposition import Exposition
from support.publishing import own_process, own_sample, publish
from support.raw_http import ask, connect
from support.stack import free_port, running
from support.waiting import until

RANKS = 3
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
FEW = """
import json, os, resource, sys
from pathlib import Path
from support.exposition import scrape
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.state import node_state
from torchmem.exporter.sample_files import RunDirectory

def collected(free):
    exporter = Exporter(FakeNvml.of(), RunDirectory(Path(sys.argv[1])))
    if free is not None:
        first = os.dup(0)
        os.close(first)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, hard))
    page = scrape(exporter)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    reason = {"reason": "no_descriptors"}
    first = {
        state: sum(page.matching("torchmem_process_state", state=state).values())
        for state in ("running", "killed")
    } | {
        "success": page.value("torchmem_exporter_collector_success", collector="samples"),
        "missed": page.value("torchmem_exporter_rejected_samples_total", **reason),
        "missing": node_state(exporter.found()).missing,
    }
    again = scrape(exporter)
    recovered = sum(again.matching("torchmem_process_state", state="running").values())
    exporter.close()
    return first, recovered

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
collected(None)
json.dump([collected(free) for free in range(12)] + [collected(None)], sys.stdout)
"""


def publish_ranks(run_dir: Path) -> None:
    """Publish some ranks of this process."""
    for rank in range(RANKS):
        publish(run_dir, own_sample(process=own_process(rank=rank)), f"{rank}.sample.json")


def test_a_rank_is_never_missing_in_silence(run_dir: Path, root: Path) -> None:
    """With any number of free descriptors, ranks are there, or a series and the page say why not.

    None of them counts as killed, and the next scrape has them all.
    """
    publish_ranks(run_dir)
    done = subprocess.run(
        [sys.executable, "-c", FEW, str(run_dir)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root / "tests")},
    )

    outcomes = json.loads(done.stdout)
    whole = [first["running"] == RANKS for first, _ in outcomes]
    assert whole[-1]
    assert not all(whole)
    for first, recovered in outcomes:
        is_whole = first["running"] == RANKS
        assert (first["success"], bool(first["missed"]), bool(first["missing"])) == (
            (1.0, False, False) if is_whole else (0.0, True, True)
        ), first
        assert not first["killed"]
        assert recovered == RANKS


def test_clients_leave_descriptors_for_the_ranks(run_dir: Path, tmp_path: Path) -> None:
    """With 64 descriptors and more clients than that, a scrape has every rank."""
    publish_ranks(run_dir)
    listen = f"127.0.0.1:{free_port()}"
    program = f"ulimit -n 64; exec {sys.executable} -m torchmem.cli exporter"
    command = ["sh", "-c", f"{program} --listen {listen} --run-dir {run_dir}"]
    with running(command, tmp_path / "log"), ExitStack() as stack:
        until(lambda: can_connect(listen))
        clients = [stack.enter_context(connect(f"http://{listen}")) for _ in range(100)]
        assert clients
        for _ in range(3):
            answer = ask(f"http://{listen}", GET % b"/metrics")
            page = Exposition.of_text(answer.partition(b"\r\n\r\n")[2].decode())
            shown = sum(page.matching("torchmem_process_state", state="running").values())
            succeeded = page.value("torchmem_exporter_collector_success", collector="samples")

            assert (shown, succeeded) == (RANKS, 1.0)


def can_connect(listen: str) -> bool:
    """Return whether the exporter answers."""
    try:
        return b"Healthy" in ask(f"http://{listen}", GET % b"/-/healthy")
    except OSError:
        return False
