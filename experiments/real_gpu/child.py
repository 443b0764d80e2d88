"""Run one subject in this process: `python -m experiments.real_gpu.child FIGURES NAME`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path

from experiments.real_gpu.figures import Figures
from experiments.real_gpu.registry import SUBJECTS


def main(path: str, name: str) -> None:
    """Run the subject, which adds its figures to the file."""
    (subject,) = (each for each in SUBJECTS if each.name == name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("its time is over"))  # ends what it started
    module = import_module(f"experiments.real_gpu.{subject.module}")
    getattr(module, subject.function)(Figures(Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
