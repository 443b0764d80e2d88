"""The plan of a run, and what parent and child process share: configuration and file names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchmem.phantom.gpus import GpuModel

VARIABLE = "TORCHMEM_PREFLIGHT"
"""Environment variable that carries the `ChildConfig`."""
MAX_RUNS = 256
"""Runs of a script in one table."""
PROGRESS_FILE = "progress"
REPORT_SUFFIX = ".report.json"
SNAPSHOT_SUFFIX = ".snapshot.pickle"
OOM_SUFFIX = ".oom.json"


@dataclass(frozen=True, slots=True)
class Placement:
    """One process of a distributed run, numbered as torchrun numbers it."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def local_rank(self) -> int:
        """Rank within the node."""
        return self.rank % self.local_world_size

    def environment(self) -> dict[str, str]:
        """Return the variables that torchrun sets for this process.

        Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, PyTorch 2.13.
        """
        nodes = -(-self.world_size // self.local_world_size)
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.rank // self.local_world_size),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "preflight",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run of a command on a phantom GPU.

    command: program and arguments, run unchanged. devices: number of GPUs on the node. steps: the
    script is stopped after this many optimizer steps. alloc_conf: PYTORCH_CUDA_ALLOC_CONF, or None
    to keep the one in the environment. placement: None if the script is not distributed.
    environment: variables that are added to those of the caller.
    """

    command: tuple[str, ...]
    gpu: GpuModel
    devices: int = 1
    steps: int = 20
    alloc_conf: str | None = None
    placement: Placement | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """Configuration of the code inside the script's process.

    folder: directory for its output files. steps: optimizer steps after which it stops the script.
    placement: the rank it runs as, None if the script is not distributed.
    """

    folder: Path
    steps: int
    placement: Placement | None = None

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable that carries this configuration."""
        return {VARIABLE: json.dumps(asdict(self) | {"folder": str(self.folder)})}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ChildConfig | None:
        """Return the configuration of this process, or None if it is not part of a preflight."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        placement = fields["placement"]
        return cls(
            Path(fields["folder"]), fields["steps"], Placement(**placement) if placement else None
        )
