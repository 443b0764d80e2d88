"""A machine for launchers: phantom GPUs with UUIDs of their own, a run directory, an exporter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.stack import answers, free_port, running
from support.waiting import until

EXPORTER = (sys.executable, "-m", "torchmem.cli", "exporter")
SDK_SETTINGS = {"TORCHMEM_INTERVAL": "0.05", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


class Node:
    """A machine with `gpus` GPUs of 4 GiB; `number` gives them their UUIDs."""

    def __init__(self, folder: Path, number: int = 0, gpus: int = 2) -> None:
        self.folder = folder / f"node{number}"
        self.folder.mkdir(parents=True)
        self._flags = ["--memory", "4GiB", "--gpus", str(gpus), "--machine", str(number)]

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a process on this machine."""
        own = {"TORCHMEM_RUN_DIR": str(self.folder / "run"), "NODE_FOLDER": str(self.folder)}
        return os.environ | SDK_SETTINGS | own | variables

    def command(self, *command: str | Path) -> list[str]:
        """Return a command that runs on this machine's GPUs."""
        phantom = ["-m", "torchmem.phantom", *self._flags, "--state", str(self.folder / "gpus")]
        return [sys.executable, *phantom, "--", *map(str, command)]

    def monitored(self, *command: str | Path) -> list[str]:
        """Return the command under `torchmem run`."""
        return self.command(sys.executable, "-m", "torchmem.cli", "run", "--", *command)

    def samples(self) -> list[dict[str, Any]]:
        """Return what the processes have published, by rank."""
        files = (self.folder / "run").glob("*/*.sample.json")
        return sorted(
            (json.loads(file.read_text()) for file in files),
            key=lambda sample: int(sample["process"]["rank"]),
        )

    @contextmanager
    def exporting(self) -> Iterator[str]:
        """Run the exporter; yield HOST:PORT."""
        address = f"127.0.0.1:{free_port()}"
        exporter = self.command(*EXPORTER, "--listen", address)
        with running(exporter, self.folder / "exporter.log", self.environment()):
            until(lambda: answers(f"http://{address}/-/healthy"))
            yield address
