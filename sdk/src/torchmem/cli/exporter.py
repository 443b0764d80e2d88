"""`torchmem exporter`: the node exporter, whose dependencies are imported only when it runs."""

from __future__ import annotations

from torchmem.exporter.command import HELP, add_arguments, run

__all__ = ["HELP", "add_arguments", "run"]
