"""A training process that pauses at chosen steps, and the Prometheus that scrapes it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.stack import Prometheus
from support.waiting import until


@dataclass
class Training:
    """One training process on a phantom GPU, and the Prometheus that scrapes its exporter."""

    process: subprocess.Popen[bytes]
    prometheus: Prometheus
    folder: Path

    def truth(self, step: int) -> dict[str, Any]:
        """Return PyTorch's own numbers after `step`, while training is paused."""
        path = self.folder / f"truth-{step}.json"
        until(lambda: path.exists() or self.process.poll() is not None, 600)
        assert path.exists(), self.log()
        truth: dict[str, Any] = json.loads(path.read_text())
        return truth

    def go_on(self, step: int) -> None:
        """Let training continue."""
        (self.folder / f"go-{step}").touch()

    def log(self) -> str:
        """Return the output of the script."""
        return (self.folder / "training.log").read_text()
