"""What the demo says about how to start it, and what to do after it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from torchmem.sample.run_directory import REPORT_SUFFIX


def demo_line(flags: str, *, by_make: bool) -> str:
    """Return the command that starts a demo with these flags."""
    return f"make demo ARGS='{flags}'" if by_make else f"torchmem demo {flags}"


def torchmem_command() -> str:
    """Return how to call torchmem in another terminal: by its path if it is not on PATH."""
    this = Path(sys.argv[0])
    is_path = this.name == "torchmem" and not shutil.which("torchmem")
    return str(this) if is_path else "torchmem"


def next_steps(url: str, run_dir: Path) -> list[str]:
    """Return what to look at while the exporter at `url` still serves the last state."""
    command = torchmem_command()
    return [
        "The training has ended. Its last state stays until Ctrl-C, in another terminal:",
        *[f"  {command} oom --run-dir {run_dir}"] * any(run_dir.glob(f"*/*{REPORT_SUFFIX}")),
        f"  {command} top --exporter {url}",
        f"and in a browser: {url}",
    ]
