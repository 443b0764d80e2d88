"""The process's series as a file for node_exporter's textfile collector."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.exposition import generate_latest

from torchmem.core.sample import Sample
from torchmem.sdk._publish import replace_file
from torchmem.sdk._series import registry

# Rendering the series costs milliseconds, and node_exporter itself is rarely scraped more often.
REFRESH_SECONDS = 10.0


class Textfile:
    """One .prom file; a directory gets one file for each rank. Removed at a clean end, so nothing lives on in it."""

    def __init__(self, path: Path, rank: int) -> None:
        self._written = 0.0
        self.path = path if path.suffix == ".prom" else path / f"torchmem-rank{rank}.prom"

    def write(self, sample: Sample) -> None:
        """Replace the file; raises OSError when the directory cannot be written."""
        replace_file(self.path, generate_latest(registry(lambda: sample)))
        self._written = sample.timestamp

    def refresh(self, sample: Sample) -> None:
        """Replace the file when it has grown old; raises OSError when the directory cannot be written."""
        if abs(sample.timestamp - self._written) >= REFRESH_SECONDS:
            self.write(sample)

    def remove(self) -> None:
        """Remove the file; raises OSError."""
        self.path.unlink(missing_ok=True)
