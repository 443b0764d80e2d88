"""Several processes on one GPU: their contexts, one that is killed, and clients of MPS."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from experiments.real_gpu.figures import Figures
from experiments.real_gpu.processes_on_gpu import MIB, exporter, other_process
from support.exposition import Exposition

TRAINING = """
import sys, time, torch
from torchmem import sdk
session = sdk.instrument(interval=0.1, run=sys.argv[1])
held = torch.empty(int(sys.argv[2]) << 20, dtype=torch.uint8, device="cuda")
weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
optimizer = torch.optim.SGD([weight], 0.1)
for number in range(1_000_000):
    weight.sum().backward()
    optimizer.step()
    if number == 3: print(flush=True)
    time.sleep(0.02)
"""
HELD_MIB = {"first": 1000, "second": 500}
FREED_SECONDS, WATCHED_SECONDS = 5.0, 13.0
"""By when the driver has taken a killed process's memory back; a process that is still listed 10 s
after its end counts as dead."""
TOLERANCE = 64 * MIB
MPS = "nvidia-cuda-mps-control"


def processes(figures: Figures) -> None:
    """Run two processes, kill one, and follow what the exporter says."""
    with exporter() as scrape, ExitStack() as running:
        empty = _used(scrape())
        pids = {
            name: running.enter_context(other_process(TRAINING, name, str(size)))
            for name, size in HELD_MIB.items()
        }
        time.sleep(2.0)
        page = scrape()
        for name, process in pids.items():
            _context(figures, page, name, process.pid)
        sizes = page.by("pid", "nvml_process_memory_bytes")
        both = sum(sizes.get(str(process.pid), 0.0) for process in pids.values())
        figures.close("used by both, beside NVML's sum", _used(page) - empty, both, relative=0.1)
        first = pids["first"]
        before = _used(page)
        first.kill()
        first.wait()
        _killed(figures, before - sizes.get(str(first.pid), 0.0), scrape)


def _context(figures: Figures, page: Exposition, name: str, pid: int) -> None:
    """What is outside a process's allocator is what NVML counts, less what it reserved."""
    listed = page.value("nvml_process_memory_bytes", pid=str(pid))
    reserved = sum(page.matching("torchmem_reserved_bytes", run=name).values())
    outside = page.value("torchmem_outside_allocator_bytes", run=name)
    beside = None if listed is None else listed - reserved
    figures.close(f"outside the allocator of the {name}", outside, beside, absolute=TOLERANCE)


def _killed(figures: Figures, expected: float, scrape: object) -> None:
    """After SIGKILL the memory is soon free again; what stays is a dead process's."""
    assert callable(scrape)
    killed, freed, dead = time.monotonic(), None, 0.0
    while time.monotonic() < killed + WATCHED_SECONDS:
        page: Exposition = scrape()
        if freed is None and _used(page) <= expected + TOLERANCE:
            freed = time.monotonic() - killed
        dead = max(dead, *page.matching("nvml_dead_process_memory_bytes").values(), 0.0)
        time.sleep(0.25)
    if freed is None:
        figures.missing("until its memory was free", f"it was not after {WATCHED_SECONDS:.0f} s")
    else:
        figures.add("until its memory was free", freed, "seconds", right=freed < FREED_SECONDS)
    figures.add("nvml_dead_process_memory_bytes, its most", dead, "bytes", right=not dead)
    killed_ranks = page.matching("torchmem_process_state", run="first", state="killed")
    states = [
        dict(labels)["state"]
        for labels, value in page.matching("torchmem_process_state", run="first").items()
        if value
    ]
    figures.add("its state", ", ".join(states), "text", right=any(killed_ranks.values()))


def _used(page: Exposition) -> float:
    return page.by("gpu", "nvml_memory_used_bytes").get("0", 0.0)


def mps(figures: Figures) -> None:
    """Run two processes through MPS, whose server is listed in their place by some drivers."""
    if figures.is_phantom or not shutil.which(MPS):
        figures.missing("MPS", "the phantom has no MPS" if figures.is_phantom else f"no {MPS}")
        return
    with ExitStack() as running:
        try:
            environment = running.enter_context(_mps_server())
        except subprocess.SubprocessError as error:
            figures.missing("MPS", f"its server does not start: {error}")
            return
        _clients(figures, environment)


def _clients(figures: Figures, environment: Mapping[str, str]) -> None:
    with exporter() as scrape, ExitStack() as running:
        for name, size in HELD_MIB.items():
            running.enter_context(other_process(TRAINING, name, str(size), environment=environment))
        time.sleep(2.0)
        page = scrape()
        figures.close("nvml_up", page.value("nvml_up"), 1, "count")
        for labels, used in page.matching("nvml_process_memory_bytes").items():
            figures.add(f"nvml_process_memory_bytes, process {dict(labels)['pid']}", used, "bytes")
        for name, held in HELD_MIB.items():
            reserved = sum(page.matching("torchmem_reserved_bytes", run=name).values())
            figures.close(f"reserved by the {name}", reserved, held * MIB, absolute=4 * MIB)
            outside = page.value("torchmem_outside_allocator_bytes", run=name)
            if outside is None:
                figures.missing(f"outside the allocator of the {name}", "it is not exported")
            else:
                figures.add(f"outside the allocator of the {name}", outside, "bytes")
        dead = sum(page.matching("nvml_dead_process_memory_bytes").values())
        figures.add("nvml_dead_process_memory_bytes", dead, "bytes", right=not dead)


@contextmanager
def _mps_server() -> Iterator[dict[str, str]]:
    """Run a server of MPS of our own, which the settings of the GPU do not notice."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([MPS, "-d"], env=os.environ | own, check=True, timeout=10)
        try:
            yield own
        finally:
            subprocess.run(
                [MPS], input="quit\n", text=True, env=os.environ | own, check=False, timeout=10
            )
