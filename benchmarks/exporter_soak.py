"""Check that the exporter does not grow over days: 20,000 scrapes of a node that keeps changing.

    python -m benchmarks.exporter_soak    # about ten minutes; exit code 1 if anything grows

The node has two simulated H100 (tests/fake_nvml) behind the real nvidia-ml-py. Processes start and
end on both, ranks appear, are killed and expire, a GPU is lost and returns, and XID errors arrive.
The first run scrapes an exporter inside this process, whose clock advances 60 s at each scrape; the
second scrapes the real process over HTTP. The sizes are printed at a tenth, the middle and the end
of each run. From the middle to the end nothing may grow: Python objects (first run only), resident
memory, open files, threads. Every hundredth scrape checks that exactly the pids of live processes
are exported, and no expired ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path

from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.exporter_process import exporter_process
from support.exposition import Exposition
from support.fake_nvml import NO_PID, FakeNode
from support.publishing import own_process, own_sample, publish
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import RunDirectory

GPUS = 2
RANKS_PER_CHANGE = 2
SCRAPES_PER_CHANGE = 5
SCRAPES_PER_CHECK = 100
TTL_SECONDS = 900
STEP_SECONDS = 60  # the clock's advance at each scrape: a rank expires after 15 scrapes
MAX_FILES = 20  # more than are exported at a time
# A subscription to events that was replaced keeps its file until its wait in NVML ends (≤ 15 s). As
# simulated time passes much faster, two may wait at once.
REPLACED_SUBSCRIPTIONS = 2
XIDS = (13, 31, 63, 79)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Node:
    """The node and its ranks. `pids` are the processes that hold GPU memory now."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeNode(folder / "node", "h100_busy")
        self.run_dir = folder / "run"
        for gpu in range(GPUS, 8):
            self.fake.remove(f"gpu {gpu}")
        self._base = re.sub(r"^event\..*\n", "", self.fake.text, flags=re.MULTILINE)
        self._changes = 0
        self.pids: set[str] = set()
        self._published = deque[Path]()

    def change(self) -> None:
        """Change the processes of the GPUs, add killed ranks, lose or restore a GPU, add an XID."""
        self._changes += 1
        first = NO_PID + 1 + self._changes * GPUS
        self.pids = {str(first + gpu) for gpu in range(GPUS) if not self._is_lost(gpu)}
        sections = [self._section(gpu, first + gpu) for gpu in range(GPUS)]
        newest = range(max(1, self._changes - 20), self._changes + 1)
        events = "".join(
            f"event.{number} = 0 0x8 {XIDS[number % len(XIDS)]}\n" for number in newest
        )
        self.fake.write(f"{self._base}\n[node]\n{events}" + "".join(sections))
        for rank in range(RANKS_PER_CHANGE):
            number = self._changes * RANKS_PER_CHANGE + rank
            process = own_process(pid=NO_PID, start_ticks=number, rank=number)
            self._published.append(publish(self.run_dir, replace(own_sample(), process=process)))
        while len(self._published) > MAX_FILES:  # as the SDK of the next process does
            self._published.popleft().unlink()

    def _is_lost(self, gpu: int) -> bool:
        return gpu == GPUS - 1 and self._changes % 7 == 0

    def _section(self, gpu: int, pid: int) -> str:
        code = "gpu_is_lost" if self._is_lost(gpu) else "success"
        return f"[gpu {gpu}]\nerror = {code}\nComputeRunningProcesses = {pid}:1073741824\n"


@dataclass(frozen=True)
class Size:
    """The resources of a process."""

    resident_bytes: int
    files: int
    threads: int
    objects: int


def size_of(pid: int, objects: int = 0) -> Size:
    """Read resident memory, open files and threads of a process from /proc."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    files, threads = (len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task"))
    return Size(pages * PAGE_BYTES, files, threads, objects)


def own_size() -> Size:
    """Return the size of this process after a garbage collection."""
    gc.collect()
    return size_of(os.getpid(), len(gc.get_objects()))


def ranks_of(body: bytes) -> int:
    """Return the number of ranks that are exported."""
    return len(Exposition.of_text(body.decode()).matching("torchmem_process_state", state="killed"))


def check_processes(node: Node, body: bytes) -> None:
    """Exit unless exactly the live processes are exported."""
    exported = set(Exposition.of_text(body.decode()).by("pid", "nvml_process_memory_bytes"))
    if exported != node.pids:
        raise SystemExit(f"pids {exported} are exported, but {node.pids} are alive")


def in_process(folder: Path, scrapes: int) -> dict[str, object]:
    """Scrape an exporter in this process, whose clock advances at each scrape."""
    node = Node(folder)
    nvml = node.fake.nvml()
    del os.environ["FAKE_NVML_LOG"]  # the log of all calls would be very long
    ahead = [0.0]

    def clock() -> float:
        return time.time() + ahead[0]

    max_ranks = RANKS_PER_CHANGE * (TTL_SECONDS // STEP_SECONDS // SCRAPES_PER_CHANGE + 1)
    sizes, started = list[Size](), time.process_time()
    with closing(
        Exporter(nvml, RunDirectory(node.run_dir, TTL_SECONDS), 60.0, clock=clock)
    ) as exporter:
        for number in range(scrapes):
            ahead[0] += STEP_SECONDS
            if number % SCRAPES_PER_CHANGE == 0:
                node.change()
            body = generate_latest(exporter)
            if number % SCRAPES_PER_CHECK == 0:
                check_processes(node, body)
                if ranks_of(body) > max_ranks:
                    raise SystemExit(f"{ranks_of(body)} ranks are exported, more than {max_ranks}")
            if number in {scrapes // 10, scrapes // 2}:
                sizes.append(own_size())
        sizes.append(own_size())
    return report(scrapes, time.process_time() - started, sizes)


def over_http(folder: Path, scrapes: int) -> dict[str, object]:
    """Scrape the real process. Its clock cannot be moved, so its ranks expire after two seconds."""
    node = Node(folder)
    with exporter_process(
        node.fake, node.run_dir, {"FAKE_NVML_LOG": os.devnull}, ttl_seconds=2
    ) as exporter:
        pid = exporter.popen.pid
        connection = HTTPConnection(exporter.url.removeprefix("http://"))
        exporter.get()  # the first collection may have begun before the node's first change
        sizes, started = list[Size](), cpu_seconds(pid)
        for number in range(scrapes):
            if number % SCRAPES_PER_CHANGE == 0:
                node.change()
            connection.request("GET", "/metrics")
            body = connection.getresponse().read()
            if number % SCRAPES_PER_CHECK == 0:
                check_processes(node, body)
            if number in {scrapes // 10, scrapes // 2}:
                sizes.append(size_of(pid))
        sizes.append(size_of(pid))
        connection.close()
        figures = report(scrapes, cpu_seconds(pid) - started, sizes)
        until(lambda: ranks_of(exporter.get().encode()) == 0, pause=0.5)
    return figures


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(scrapes: int, cpu: float, sizes: list[Size]) -> dict[str, object]:
    """Return the figures, and what grew in the second half by more than normal variation."""
    _, middle, end = sizes
    half = scrapes - scrapes // 2
    grew = {
        "objects": end.objects > middle.objects + max(200, half // 10),
        "files": end.files > middle.files + REPLACED_SUBSCRIPTIONS,
        "threads": end.threads > middle.threads + 4,
        "resident": end.resident_bytes > middle.resident_bytes + max(2 << 20, half * 256),
    }
    return {
        "scrapes": scrapes,
        "cpu_milliseconds_per_scrape": round(1000 * cpu / scrapes, 2),
        "resident_mib": [round(size.resident_bytes / 2**20, 1) for size in sizes],
        "resident_bytes_per_scrape": round((end.resident_bytes - middle.resident_bytes) / half, 1),
        "files": [size.files for size in sizes],
        "threads": [size.threads for size in sizes],
        **({"objects": [size.objects for size in sizes]} if end.objects else {}),
        "grew": [name for name, has_grown in grew.items() if has_grown],
    }


def main() -> int:
    """Run both and print the figures as JSON; return 1 if anything grew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scrapes", type=int, default=20_000, help="in process (default 20000)")
    parser.add_argument("--http-scrapes", type=int, default=3_000, help="over HTTP (default 3000)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "in process": in_process(Path(folder, "in_process"), arguments.scrapes),
            "over HTTP": over_http(Path(folder, "over_http"), arguments.http_scrapes),
        }
    print(json.dumps(figures, indent=1))
    return int(any(part["grew"] for part in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
