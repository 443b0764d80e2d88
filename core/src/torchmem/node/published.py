"""The processes of a node with their newest samples, and what else is known of them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args

from torchmem.explain.thresholds import Limits, Thresholds, defaults
from torchmem.host.process_table import ProcessKey
from torchmem.metrics.families import ProcessView
from torchmem.node.gpu_holders import GpuHolders
from torchmem.sample.sample import DeviceSample, Sample, State

KillCause = Literal["host_memory", "signal"]
KILL_CAUSES: tuple[KillCause, ...] = get_args(KillCause)

DeviceProcess = tuple[str, ProcessKey]
"""UUID of the GPU or name of the MIG device, and the process on it."""


@dataclass(frozen=True, slots=True)
class Published:
    """One process with its newest sample.

    `pid` is the pid in the reader's own pid namespace. `attributed` is True when the process
    with that pid is certain to be the one that wrote the sample. `pid_label` is the label `pid`
    where that number is not unique: pid, pid namespace and user. `uid` is the user who owns the
    sample file, None if unknown; `path` is that of the file in the run directory.
    """

    sample: Sample
    pid: int
    state: State
    attributed: bool
    pid_label: str | None = None
    uid: int | None = None
    path: str = ""

    @property
    def id(self) -> str:
        """16 hex digits that name the process in URLs; equal after a restart of the exporter."""
        return blake2b(os.fsencode(self.path), digest_size=8).hexdigest()

    def view(self, gpus: Mapping[str, str]) -> ProcessView:
        """Return the process as its series show it; `gpus`: NVML indices by UUID."""
        return ProcessView(self.sample, self.pid_label or self.pid, self.state, gpus)

    def rank_labels(self) -> Mapping[str, str]:
        """Return the labels rank, run and, if it is known, launch."""
        process = self.sample.process
        launch = {"launch": process.launch} if process.launch else {}
        return {"rank": str(process.rank), "run": process.run, **launch}

    def device(self, uuid: str) -> DeviceSample | None:
        """Return what the process says of a device, which has no UUID if `uuid` is empty."""
        return next((each for each in self.sample.devices if uuid == (each.uuid or "")), None)


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The processes of a node at one moment, and what is known of them beside their samples.

    `time`: when they were read, in Unix seconds. `gpus`: NVML's indices by UUID, and those of the
    GPUs of MIG devices by the names of these devices. `outside`: bytes outside the allocator by
    device and process; below zero, that many reserved bytes are not on the device. `kill_causes`:
    what killed a process, where it is known. `thresholds` were in force. `run_dir`: where the
    processes were found. `missing`: why processes are missing and what to do, if some are.
    `holders`: the processes that NVML lists on the GPUs; empty if they cannot be joined.
    """

    time: float
    published: Sequence[Published] = ()
    gpus: Mapping[str, int] = field(default_factory=dict)
    outside: Mapping[DeviceProcess, int] = field(default_factory=dict)
    kill_causes: Mapping[ProcessKey, KillCause] = field(default_factory=dict)
    thresholds: Thresholds = field(default_factory=defaults)
    run_dir: Path | None = None
    missing: str | None = None
    holders: GpuHolders = field(default_factory=GpuHolders)

    def limits(self, item: Published) -> Limits:
        """Return the thresholds for a process."""
        return self.thresholds.limits(item.sample.process.run, platform.node())
