"""A node of H100 GPUs with one rank on each, served by the real exporter from made-up values.

NVML reports everything that it can for such a GPU, and each rank everything that the SDK can
know, so the node has the maximum number of series at default settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from prometheus_client import generate_latest
from support.idle_processes import idle_processes
from support.publishing import publish
from support.samples import full_sample

from torchmem.demo.h100 import LINK_ERRORS, LINKS, REASONS, THRESHOLDS
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity, Versions
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Ecc, Repairs
from torchmem.exporter.subjects.gpm import Gpm
from torchmem.exporter.subjects.memory import Bar1, MemoryInfo, UnifiedMemory
from torchmem.exporter.subjects.mig import Mig
from torchmem.exporter.subjects.nvlink import NvLink
from torchmem.exporter.subjects.pcie import Pcie, Traffic
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.processes import Processes, ProcessMemory, ProcessUtilization
from torchmem.exporter.subjects.temperature import Temperatures
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.host.procfs import pid_namespace, start_ticks
from torchmem.sample.sample import ByPool, FirstRead, Sample

GIB = 1 << 30
FIRST_DEAD_PID = 4_194_200  # with a start time that no running process has
EVENTS = (
    "xid",
    "single_bit_ecc_error",
    "double_bit_ecc_error",
    "non_fatal_poison_error",
    "fatal_poison_error",
    "gpu_unavailable_error",
    "gpu_recovery_action",
)
CLOCKS = ("graphics", "sm", "memory", "video")
NO_NVLINK_ERRORS = dict.fromkeys(product(range(LINKS), LINK_ERRORS), 0)
NO_ECC_ERRORS = dict.fromkeys(product(("corrected", "uncorrected"), ("volatile", "aggregate")), 0)


class H100Node:
    """GPUs with a running rank of `run` on each and, with `old_run`, one that ended before.

    `healthy`: no rank has a problem that an alert detects; otherwise each has as many as possible.
    """

    def __init__(
        self,
        folder: Path,
        uuids: Sequence[str],
        pids: Sequence[int],
        run: str,
        old_run: str | None,
        *,
        healthy: bool,
    ) -> None:
        self._folder, self._uuids, self.pids, self._run, self._old_run = (
            folder,
            uuids,
            pids,
            run,
            old_run,
        )
        self._healthy = healthy
        self._moment, self._random = 0.0, Random(0)
        self.exporter = Exporter(
            FakeNvml(self._gpus, Versions("580.95", "13.580.95", "13.0")), RunDirectory(folder)
        )

    def page(self, moment: float) -> str:
        """Return a scrape in the text format. Values depend on `moment` (seconds)."""
        self._moment, self._random = moment, Random(moment)
        for rank, pid in enumerate(self.pids):
            self._publish(self._sample(rank, pid, self._run, start_ticks=start_ticks(pid)))
            if self._old_run:
                ended = self._sample(rank, FIRST_DEAD_PID + rank, self._old_run, start_ticks=1)
                self._publish(replace(ended, ended="exited"))
        return generate_latest(self.exporter).decode()

    def _publish(self, sample: Sample) -> None:
        publish(self._folder, sample)

    def _sample(self, rank: int, pid: int, run: str, start_ticks: int | None) -> Sample:
        full = full_sample(rank, pid, self._uuids[rank], run)
        device = full.devices[0]
        assert device.allocator
        assert device.layout
        layout = replace(
            device.layout,
            timestamp=time.time(),
            stranded_bytes=self._bytes(6),
            releasable_bytes=self._bytes(4),
            headroom_bytes=self._bytes(3),
            headroom_flush_bytes=self._bytes(9),
            pending_free_bytes=self._bytes(7),
        )
        allocator = replace(
            device.allocator,
            allocated_bytes=ByPool(1 << 20, self._bytes(20)),
            active_bytes=ByPool(1 << 20, self._bytes(20)),
            requested_bytes=ByPool(1 << 20, self._bytes(20)),
        )
        first_read = FirstRead(time.time(), allocator.reserved_bytes.total, self._free)
        counters = replace(
            device.counters,
            alloc_retries=int(self._moment / 60),
            device_allocs=int(self._moment / 20),
        )
        device = replace(
            device,
            allocator=allocator,
            layout=layout,
            counters=counters,
            stats_timestamp=first_read.timestamp,
            driver_free_bytes=first_read.driver_free_bytes,
            first_read=first_read,
        )
        process = replace(full.process, pid_namespace=pid_namespace(), start_ticks=start_ticks)
        steps = replace(full.steps, count=int(self._moment * 2), duration_sum_seconds=self._moment)
        sample = replace(
            full, timestamp=time.time(), process=process, devices=(device,), steps=steps
        )
        return _without_troubles(sample) if self._healthy else sample

    @property
    def _free(self) -> int:
        """What the driver has free on each GPU, when the ranks read it and when NVML does."""
        return 17 * GIB + Random(self._moment).randrange(GIB)

    def _bytes(self, max_gib: int) -> int:
        return self._random.randrange(max_gib * GIB // 2, max_gib * GIB, 512)

    def _gpus(self) -> list[FakeGpu]:
        return [self._gpu(index) for index in range(len(self._uuids))]

    def _gpu(self, index: int) -> FakeGpu:
        chance, pid = self._random.uniform, self.pids[index] if self.pids else None
        used, moved = 79 * GIB - self._free, int(self._moment * 1e9)
        memory = MemoryInfo(80 * GIB, used, self._free, GIB)
        utilization = Utilization(chance(0.5, 1), chance(0, 1), 0, 0, 0)
        power = Power(chance(400, 700), 700, 700, self._moment * 600)
        sensors = {"gpu": int(chance(50, 70)), "memory": int(chance(60, 80))}
        clocks = self._clocks()
        at_work = {pid: ProcessUtilization(chance(0.5, 1), chance(0, 1))} if pid else {}
        listed = [ProcessMemory(pid, used)] if pid else []
        ratios = (chance(0, 1), chance(0, 1), chance(0, 1), chance(0, 1))
        return FakeGpu(
            self._identity(index),
            memory,
            UnifiedMemory(False),
            Bar1(128 * GIB, GIB),
            utilization,
            power,
            Temperatures(sensors, THRESHOLDS),
            clocks,
            Pcie(5, 5, 16, 16, 0),
            NvLink(dict.fromkeys(range(LINKS), True), NO_NVLINK_ERRORS, Traffic(moved, moved)),
            Ecc(True, NO_ECC_ERRORS),
            Repairs({"correctable": 0, "uncorrectable": 0}, False, False, recovery_action="none"),
            Mig(False),
            Processes(listed, at_work, memory, {None: memory.free}),
            Gpm(*ratios, Traffic(moved, 1e9), Traffic(1e9, 1e9)),
            event_kinds=EVENTS,
        )

    def _identity(self, index: int) -> GpuIdentity:
        bus = f"00000000:{index:02X}:00.0"
        name, uuid = "NVIDIA H100 80GB HBM3", self._uuids[index]
        return GpuIdentity(index, uuid, name, bus, "580.95", "96.00", "default", "enabled")

    def _clocks(self) -> Clocks:
        hertz = dict.fromkeys(CLOCKS, int(self._random.uniform(14, 19)) * 1e8)
        return Clocks(hertz, dict.fromkeys(CLOCKS, 1.98e9), dict.fromkeys(REASONS, False), 0)


def _without_troubles(sample: Sample) -> Sample:
    """Return a training rank for which no alert fires, with as many series as possible."""
    device = sample.devices[0]
    assert device.layout
    assert device.growth
    layout = replace(
        device.layout, stranded_bytes=GIB, headroom_bytes=15 * GIB, headroom_flush_bytes=20 * GIB
    )
    counters = replace(device.counters, alloc_retries=0, ooms={})
    releases = {tier: replace(done, given_up=False) for tier, done in device.releases.items()}
    device = replace(
        device,
        layout=layout,
        counters=counters,
        last_oom=None,
        releases=releases,
        growth=replace(device.growth, bytes_per_step=1.0),
        engine=None,
    )
    heeded = dict.fromkeys(sample.settings_ignored, False)
    return replace(
        sample, devices=(device,), settings_ignored=heeded, cost=replace(sample.cost, errors={})
    )


@contextmanager
def h100_node(
    uuids: Sequence[str],
    ranks: int,
    run: str = "night",
    old_run: str | None = None,
    *,
    healthy: bool = False,
) -> Iterator[H100Node]:
    """A node with these GPUs and a running rank on each of the first `ranks`."""
    with TemporaryDirectory() as folder, idle_processes(ranks) as pids:
        node = H100Node(Path(folder), uuids, pids, run, old_run, healthy=healthy)
        try:
            yield node
        finally:
            node.exporter.close()


def series(page: str) -> int:
    """Count the series of an exposition."""
    return sum(1 for line in page.splitlines() if line and not line.startswith("#"))
