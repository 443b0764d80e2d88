"""Measure what a flood of requests on its port costs a training process (the setting `port`):

    python -m benchmarks.endpoint

The loop computes in Python, so that it needs the GIL all the time, over a simulated GPU. The ratio
compares its steps per second while two clients flood its port with its steps per second while they
flood the port of another process, so that the clients' own CPU time cancels out. It is the median
of several turns. The clients open connections without a pause: they send a request and read, send a
request and do not read, or send nothing. Threads and descriptors are the highest numbers that the
loop has seen. *CPU* is the CPU time of all threads except the loop's during a flood, as a share of
one core.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from torchmem import sdk
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

TURNS, SECONDS, STEP_ITEMS = 7, 2.0, 60_000
KINDS = ("ask and read", "ask and do not read", "send nothing")
FLOOD = """
import socket, sys
address, kind, kept = ("127.0.0.1", int(sys.argv[1])), sys.argv[2], []
while True:
    client = socket.socket()
    client.settimeout(1)
    try:
        client.connect(address)
        if kind != "send nothing":
            client.sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
        while kind == "ask and read" and client.recv(65536): pass
    except OSError:
        pass
    kept.append(client)
    if kind == "ask and read" or len(kept) > 1000:
        kept.pop(0).close()
"""


class Loop:
    """A training loop that counts its steps, threads and descriptors."""

    def __init__(self, backend: SimulatedBackend) -> None:
        self._backend = backend
        self.threads = self.descriptors = 0
        self.others = 0.0

    def steps_per_second(self, seconds: float) -> float:
        """Run for that time."""
        steps, started, spent = 0, time.perf_counter(), 0.0
        before = time.process_time() - time.thread_time()
        while spent < seconds:
            sum(range(STEP_ITEMS))
            self._backend.step()
            steps, spent = steps + 1, time.perf_counter() - started
            self.threads = max(self.threads, len(os.listdir("/proc/self/task")))  # noqa: PTH208
            self.descriptors = max(self.descriptors, len(os.listdir("/proc/self/fd")))  # noqa: PTH208
        self.others = (time.process_time() - time.thread_time() - before) / spent
        return steps / spent


@contextlib.contextmanager
def flood(url: str, kind: str) -> Iterator[None]:
    """Let clients of that kind connect until the end of the block."""
    port = url.rpartition(":")[2].partition("/")[0]
    clients = [subprocess.Popen([sys.executable, "-c", FLOOD, port, kind]) for _ in range(2)]
    try:
        yield
    finally:
        for client in clients:
            client.kill()
            client.wait()


def measure(loop: Loop, url: str, other: str, kind: str) -> str:
    """Return one row: the ratio, and what the process holds."""
    ratios, others = [], []
    loop.threads = loop.descriptors = 0
    for _ in range(TURNS):
        with flood(other, kind):
            without = loop.steps_per_second(SECONDS)
        with flood(url, kind):
            ratios.append(loop.steps_per_second(SECONDS) / without)
            others.append(loop.others)
    ratio, share = statistics.median(ratios), statistics.median(others)
    return f"{kind:20} {ratio:6.3f} {share:7.2%} {loop.threads:8} {loop.descriptors:12}"


def monitored(folder: str) -> tuple[sdk.Session, SimulatedBackend]:
    """Return a session with a port."""
    gpu = SimulatedGpu(1 << 30, context_bytes=0, uuid="GPU-1")
    backend = SimulatedBackend([DeviceCachingAllocator(gpu)])
    session = sdk.instrument(backend=backend, port=0, run_dir=Path(folder))
    session.step()
    while session.url is None:
        time.sleep(0.01)
    return session, backend


def main() -> None:
    """Print the table; with an argument, be the other process."""
    if len(sys.argv) > 1:
        session, _ = monitored(sys.argv[1])
        print(session.url, flush=True)
        sys.stdin.read()
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.endpoint", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other,
    ):
        assert other.stdout
        report(folder, other.stdout.readline().strip())


def report(folder: str, other: str) -> None:
    """Print the table; `other` is the URL of the other process."""
    session, backend = monitored(folder)
    loop = Loop(backend)
    loop.steps_per_second(SECONDS)
    print(f"without clients: {loop.threads} threads, {loop.descriptors} descriptors")
    print("clients               steps     CPU  threads  descriptors")
    for kind in KINDS:
        print(measure(loop, session.url or "", other, kind), flush=True)
    session.close()


if __name__ == "__main__":
    main()
