"""The parts of a GPU in Prometheus and on the page add up to what NVML says, in every state.

Ranks and processes of many kinds are put on GPUs at random. The real exporter reads them through a
fake NVML, and Prometheus' rule engine evaluates the rules over what it serves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from rules.test_scenarios import evaluated
from support.idle_processes import idle_processes
from support.publishing import own_process, publish
from support.samples import full_sample
from support.simulated_time import series_name

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.live.state import node_state
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.dead_processes import MIN_SECONDS, DeadProcesses
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.host.procfs import start_ticks
from torchmem.metrics.memory_parts import COMPONENTS
from torchmem.sample.engine import Engine
from torchmem.sample.libraries import Communicator, RmmMemory
from torchmem.sample.sample import (
    ASLEEP,
    MAX_PID,
    Allocator,
    ByPool,
    DeviceSample,
    Layout,
    Sample,
)

MIB, GIB = 1 << 20, 1 << 30
TOTAL, DRIVER = 80 * GIB, GIB
CARD = TOTAL - DRIVER
GPUS = 60
MAX_RANKS = 2
DEAD_PID = MAX_PID - 1
TENSORS = {*COMPONENTS, "in_use"}
PARTS = "gpu:torchmem_memory_bytes:sum"
FOUND = re.compile(r"\{([^}]*)\} ([-+.eE\d]+)")
PAGE = 4096
READ = ("torchmem_", "nvml_memory", "nvml_dead")
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds on a GPU: its sample, the bytes that NVML lists, and those it does not."""

    device: DeviceSample
    bytes: int
    unlisted: int = 0


class Drawn:
    """A GPU in some state: ranks of all kinds, a neighbor, a dead process."""

    def __init__(self, draw: Random, number: int) -> None:
        self.draw, self.number, self.uuid = draw, number, f"GPU-{number:04}"
        self.kinds = draw.choices(list(KINDS), k=draw.randint(0, MAX_RANKS))
        self.ranks = [KINDS[kind](self) for kind in self.kinds]
        self.neighbor = draw.choice([0, self.some(10 * GIB)])
        self.dead = draw.choice([0, 0, self.some(5 * GIB)])
        held = sum(rank.bytes + rank.unlisted for rank in self.ranks)
        self.used = held + self.neighbor + self.dead
        self.memory = MemoryInfo(TOTAL, self.used, CARD - self.used, DRIVER)

    def some(self, most: int) -> int:
        """Return a size that a driver gives out."""
        return self.draw.randint(1, most // (2 * MIB)) * 2 * MIB

    def of_pytorch(self) -> DeviceSample:
        """Return a rank of PyTorch's allocator: with or without a snapshot, which may be old."""
        reserved = self.some(20 * GIB)
        active = self.draw.randint(0, reserved // 512) * 512
        small = self.draw.choice([None, 0])
        used, held = ByPool(small, small, active), ByPool(small, small, reserved)
        known = Allocator(used, used, held, None, None, active, active, reserved)
        snapshot = self.draw.choice([None, reserved, reserved, self.some(20 * GIB)])
        layout = None if snapshot is None else self._layout(snapshot)
        return DeviceSample(0, self.uuid, "GPU", CARD, known, layout=layout)

    def _layout(self, size: int) -> Layout:
        cuts = sorted(self.draw.randint(0, size // 512) * 512 for _ in range(3))
        in_use, releasable, stranded, private = (
            end - start for start, end in zip([0, *cuts], [*cuts, size], strict=True)
        )
        known = full_sample().devices[0].layout
        assert known is not None
        return replace(
            known,
            timestamp=time.time(),
            releasable_bytes=releasable,
            stranded_bytes=stranded,
            private_free_bytes=private,
            private_used_bytes=0,
            in_use_bytes=in_use,
            pending_free_bytes=0,
        )

    def nvml(self, pids: Sequence[int], neighbor: int, *, listed: bool) -> FakeGpu:
        """Return the GPU as NVML reports it, with or without its processes."""
        rows = [ProcessMemory(pid, rank.bytes) for pid, rank in zip(pids, self.ranks, strict=False)]
        rows += [ProcessMemory(neighbor, self.neighbor)] if self.neighbor else []
        rows += [ProcessMemory(DEAD_PID, self.dead)] if self.dead else []
        known = Processes(rows, memory=self.memory, free={None: self.memory.free})
        identity = GpuIdentity(self.number, self.uuid)
        return FakeGpu(identity, self.memory, known if listed else None)

    def samples(self, pids: Sequence[int]) -> list[Sample]:
        """Return what the ranks publish now."""
        return [
            _published(rank.device, pid, place, self.memory.free)
            for place, (pid, rank) in enumerate(zip(pids, self.ranks, strict=False))
        ]


def _published(device: DeviceSample, pid: int, rank: int, free: int) -> Sample:
    now = time.time()
    process = own_process(pid=pid, start_ticks=start_ticks(pid), rank=rank, local_rank=rank)
    own = replace(device, stats_timestamp=now, driver_free_bytes=free)
    return replace(full_sample(), timestamp=now, process=process, devices=(own,))


def _plain(gpu: Drawn) -> Held:
    device = gpu.of_pytorch()
    assert device.allocator is not None
    return Held(device, device.allocator.reserved_bytes.total + gpu.some(2 * GIB))


def _with_components(gpu: Drawn) -> Held:
    held = _plain(gpu)
    assert held.device.allocator is not None
    active = held.device.allocator.active_bytes.total
    parts = {"parameters": active // 3, "held": active // 3, "step": active - 2 * (active // 3)}
    return replace(held, device=replace(held.device, components=parts))


def _with_libraries(gpu: Drawn) -> Held:
    """NCCL, and RMM beside PyTorch; what they count may be more than what is outside."""
    held = _plain(gpu)
    groups = {
        "default_pg": Communicator(gpu.some(GIB), 0, gpu.some(GIB)),
        "tp": Communicator(0, gpu.some(GIB)),
    }
    has_nccl, has_rmm = gpu.draw.choice([(True, True), (True, False), (False, True)])
    rmm = RmmMemory(gpu.some(2 * GIB)) if has_rmm else None
    device = replace(held.device, communicators=groups if has_nccl else {}, rmm=rmm)
    return replace(held, device=device)


def _of_rmm(gpu: Drawn) -> Held:
    """RMM is PyTorch's allocator, which has no statistics then."""
    pool = gpu.some(20 * GIB)
    rmm = RmmMemory(*gpu.draw.choice([(pool, pool // 2), (None, pool)]), serves_pytorch=True)
    return Held(replace(gpu.of_pytorch(), allocator=None, layout=None, rmm=rmm), pool)


def _asleep(gpu: Drawn) -> Held:
    """An engine has given memory back, which PyTorch still counts."""
    held = _plain(gpu)
    assert held.device.allocator is not None
    active = held.device.allocator.active_bytes.total
    asleep = active // (4 * MIB) * 2 * MIB
    engine = Engine("vllm", asleep={"weights": asleep})
    parts = {ASLEEP: asleep, "held": active - asleep}
    device = replace(held.device, components=parts, engine=engine, layout=None)
    return Held(device, held.bytes - asleep)


def _managed(gpu: Drawn) -> Held:
    """A paged optimizer, whose bytes on the device NVML counts to no process."""
    held = _plain(gpu)
    size = gpu.some(4 * GIB)
    return replace(held, device=replace(held.device, managed_bytes=size), unlisted=size)


KINDS = {
    "plain": _plain,
    "components": _with_components,
    "libraries": _with_libraries,
    "RMM": _of_rmm,
    "asleep": _asleep,
    "managed": _managed,
}


def _grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts as the dashboards have them, which do not divide tensors."""
    tensors = sum(size for name, size in parts.items() if name in TENSORS)
    return {"in_use": tensors} | {n: size for n, size in parts.items() if n not in TENSORS}


@pytest.mark.stack
@pytest.mark.parametrize("nvml", ["nvml", "nvml_without_processes", "no_nvml"])
def test_prometheus_and_the_page_show_the_same_parts(nvml: str, tmp_path: Path) -> None:
    """Each part has the same bytes in both, and together they are what the GPU has."""
    gpus = [Drawn(Random(f"{nvml} {number}"), number) for number in range(GPUS)]
    assert {kind for gpu in gpus for kind in gpu.kinds} == set(KINDS)

    page, series = _scraped(gpus, nvml, tmp_path / "run")
    recorded = _recorded(evaluated(series.items(), [PARTS], tmp_path, SECONDS))

    known = [gpu for gpu in gpus if nvml != "no_nvml" or gpu.ranks]
    assert recorded.keys() == page.keys() == {gpu.uuid for gpu in known}
    for gpu in known:
        assert _rounded(recorded[gpu.uuid]) == _rounded(page[gpu.uuid]), gpu.kinds
        total = CARD if nvml == "no_nvml" else TOTAL
        assert sum(page[gpu.uuid].values()) == total
        assert page[gpu.uuid].get("dead_processes", 0) == (gpu.dead if nvml == "nvml" else 0)
        assert abs(sum(recorded[gpu.uuid].values()) - total) < PAGE


def _scraped(
    gpus: Sequence[Drawn], nvml: str, run_dir: Path
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return the parts of each GPU on the page, and what Prometheus scrapes from the exporter."""
    with idle_processes(GPUS * MAX_RANKS + 1) as pids:
        *own, neighbor = pids
        each = {gpu.uuid: own[MAX_RANKS * gpu.number :][:MAX_RANKS] for gpu in gpus}
        listed = nvml == "nvml"
        fakes = [gpu.nvml(each[gpu.uuid], neighbor, listed=listed) for gpu in gpus]
        driver = FakeNvml.down("no driver") if nvml == "no_nvml" else FakeNvml.of(*fakes)
        for gpu in gpus:
            for sample in gpu.samples(each[gpu.uuid]):
                publish(run_dir, sample)
        dead = DeadProcesses(DEAD_PID.__eq__, iter((0.0, MIN_SECONDS)).__next__)
        with closing(Exporter(driver, RunDirectory(run_dir), 120, dead=dead)) as exporter:
            exporter.collect()
            found = [sample for family in exporter.collect() for sample in family.samples]
            shown = node_state(exporter.found()).gpus
    page = {gpu.uuid: _grouped({part.name: part.bytes for part in gpu.parts}) for gpu in shown}
    return page, {
        series_name("node", each.name, *each.labels.items()): f"{each.value}x20"
        for each in found
        if each.name.startswith(READ) and "bucket" not in each.name
    }


def _recorded(output: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    got = output.partition("got:")[2]
    for text, value in FOUND.findall(got):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        if float(value):
            found.setdefault(labels["uuid"], {})[labels["part"]] = float(value)
    return found


def _rounded(parts: Mapping[str, float]) -> dict[str, int]:
    """Return sizes in pages: one side divides integers, the other floats."""
    pages = {name: round(size / PAGE) for name, size in parts.items()}
    return {name: number for name, number in pages.items() if number}
