"""What the demo says about how to start it, and what to do after it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchmem.explain.headline import headline
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import gain_sentence
from torchmem.node.reports import load_all
from torchmem.output.terminal import wrapped
from torchmem.sample.errors import UsageError
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
        *[f"  {command} why --run-dir {run_dir}"] * any(run_dir.glob(f"*/*{REPORT_SUFFIX}")),
        f"  {command} top --exporter {url}",
        f"and in a browser: {url}",
    ]


def explained(run_dir: Path) -> Iterator[str]:
    """Yield lines that say why ranks ran out of memory, and what to do first."""
    with suppress(UsageError):  # no rank did
        for _, report in reversed(load_all(run_dir, own_only=True)):
            yield from wrapped(f"{headline(report)}.", f"rank {report.process.rank}: ")
            for remedy in remedies(report)[:1]:
                yield from wrapped(f"{remedy.text}{gain_sentence(remedy)}", "  ")
                yield from (f"    {line}" for line in remedy.lines)
