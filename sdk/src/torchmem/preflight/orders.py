"""What the parent tells the script's process, through one environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchmem.preflight.plan import Placement

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
        return cls(Path(fields["folder"]), fields["steps"], Placement(**placement) if placement else None)
