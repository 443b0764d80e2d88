"""What is to be tried: a command, a card, a place among ranks.

What the parent tells the script's process, through one environment variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchmem.phantom.cards import Card


@dataclass(frozen=True, slots=True)
class Placement:
    """One process of a distributed run, as torchrun would number it."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def local_rank(self) -> int:
        """Rank within the node."""
        return self.rank % self.local_world_size

    def environment(self) -> dict[str, str]:
        """What torchrun gives its processes (torch/distributed/elastic/agent/server/local_elastic_agent.py, 2.13)."""
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
class Plan:
    """One run of a command on a phantom card.

    command: program and arguments, run as they stand. devices: cards of the node. steps: optimizer steps after which
    the script is stopped. alloc_conf: PYTORCH_CUDA_ALLOC_CONF, None for what the environment says. placement: None for
    a script that is not distributed. run: the label `run` under which it is published.
    """

    command: tuple[str, ...]
    card: Card
    devices: int = 1
    steps: int = 20
    alloc_conf: str | None = None
    placement: Placement | None = None
    run: str | None = None


VARIABLE = "TORCHMEM_PREFLIGHT"
PROGRESS_FILE = "progress"
REPORT_SUFFIX = ".report.json"
SNAPSHOT_SUFFIX = ".snapshot.pickle"
OOM_SUFFIX = ".oom.json"


@dataclass(frozen=True, slots=True)
class Orders:
    """Stop after `steps` optimizer steps; write into `folder`; be the rank that `placement` says."""

    folder: Path
    steps: int
    placement: Placement | None = None

    def environment(self) -> dict[str, str]:
        """The variable that carries these orders."""
        return {VARIABLE: json.dumps(asdict(self) | {"folder": str(self.folder)})}

    @classmethod
    def given(cls, environment: Mapping[str, str]) -> Orders | None:
        """The orders of this process; None where there are none."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        placement = fields["placement"]
        return cls(
            Path(fields["folder"]), fields["steps"], Placement(**placement) if placement else None
        )
