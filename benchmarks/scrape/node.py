"""A node to scrape: live processes, their ranks' samples, and GPUs, fake or real."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support import fake_nvml
from support.samples import full_sample

from torchmem.host.procfs import pid_namespace, start_ticks
from torchmem.sample.run_directory import sample_name
from torchmem.sample.sample import ByPool, DeviceSample, Sample, encode

MAX_LISTED = 90  # processes of one GPU that fit on one line of the fake's file
GIB = 1 << 30


class Ranks:
    """The processes `pids` spread over the GPUs with these UUIDs, a rank each, as they publish."""

    def __init__(self, folder: Path, uuids: Sequence[str], pids: Sequence[int]) -> None:
        self.run_dir = folder / "run"
        (self.run_dir / str(os.geteuid())).mkdir(0o755, parents=True)
        self._uuids = uuids
        self._samples = [self._sample(rank, pid) for rank, pid in enumerate(pids)]
        self._published = 0
        self.publish()

    def environment(self) -> Mapping[str, str]:
        """Return the variables of an exporter's environment."""
        return os.environ

    def publish(self) -> None:
        """Replace every rank's file, as ranks do once a second, so that every scrape reads them."""
        now = time.time()
        self._published += 1
        for sample in self._samples:
            process = sample.process
            name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
            path = self.run_dir / str(os.geteuid()) / name
            path.with_suffix(".new").write_bytes(encode(_later(sample, now, self._published)))
            path.with_suffix(".new").replace(path)

    def retract(self) -> None:
        """Remove every rank's file, as if no rank had run."""
        for path in (self.run_dir / str(os.geteuid())).iterdir():
            path.unlink()

    def _sample(self, rank: int, pid: int) -> Sample:
        sample = full_sample(rank, pid, self._uuids[rank % len(self._uuids)])
        own = replace(sample.process, pid_namespace=pid_namespace(), start_ticks=start_ticks(pid))
        return replace(sample, process=own)


class Node(Ranks):
    """Ranks on a number of H100 GPUs (`gpus`) of the fake NVML."""

    def __init__(self, folder: Path, gpus: int, pids: Sequence[int]) -> None:
        uuids = [f"GPU-{index:08x}-0000-4000-8000-00000000000a" for index in range(gpus)]
        super().__init__(folder, uuids, pids)
        self._fake = fake_nvml.FakeNode(folder, "h100_busy")
        self._fake.write(self._state(pids))

    def environment(self) -> Mapping[str, str]:
        """Return variables with which nvidia-ml-py finds these GPUs; calls are not logged."""
        return {
            name: value
            for name, value in self._fake.environment().items()
            if name != "FAKE_NVML_LOG"
        }

    def _state(self, pids: Sequence[int]) -> str:
        """Return the busy node of the tests with every GPU like its second one."""
        head, *sections = self._fake.text.split("\n[gpu ")
        shared, gpu = sections[0], sections[2].split("]\n", 1)[1]
        sections_by_gpu = [
            self._gpu(gpu, index, pids[index :: len(self._uuids)])
            for index in range(len(self._uuids))
        ]
        return "\n[gpu ".join([head, shared, *sections_by_gpu])

    def _gpu(self, text: str, index: int, pids: Sequence[int]) -> str:
        listed = pids[:MAX_LISTED]
        rows = " ".join(f"{pid}:{GIB}:0xffffffff:0xffffffff" for pid in listed)
        own = {
            "UUID": self._uuids[index],
            "PciInfo": f"00000000:{index + 16:02X}:00.0",
            "ComputeRunningProcesses": rows,
            "ProcessUtilization": " ".join(f"{pid}:now:1:1:0:0" for pid in listed),
        }
        lines = [line for line in text.splitlines() if line.split(" = ")[0] not in own]
        lines += [f"{key} = {value}" for key, value in own.items()]
        return f"{index}]\n" + "\n".join(lines) + "\n"


def _later(sample: Sample, now: float, number: int) -> Sample:
    """Return the sample with other values for everything that a second of training changes."""
    steps, cost = sample.steps, sample.cost
    counts = (*steps.duration_counts[:4], number, *steps.duration_counts[5:])
    return replace(
        sample,
        timestamp=now,
        devices=tuple(_later_device(device, now, number) for device in sample.devices),
        steps=replace(
            steps,
            count=number,
            duration_counts=counts,
            duration_sum_seconds=number / 4,
            last_timestamp=now,
            progress_timestamp=now,
        ),
        cost=replace(cost, cpu_seconds=number / 1000, stats_duration_seconds=number / 1e6),
    )


def _later_device(device: DeviceSample, now: float, number: int) -> DeviceSample:
    """Change the statistics, which a rank reads each second; its snapshots come later."""
    assert device.allocator
    more = (number % 512) << 20
    pools: dict[str, Any] = {
        name: ByPool(value.small, (value.large or 0) + more)
        for name in ("allocated_bytes", "active_bytes", "requested_bytes")
        if (value := getattr(device.allocator, name))
    }
    return replace(
        device,
        allocator=replace(device.allocator, **pools),
        driver_free_bytes=(8 << 30) - more,
        stats_timestamp=now,
        components=device.components | {"held": more},
    )
