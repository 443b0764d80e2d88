"""Why memory ran out, in at most three lines below the traceback of an OutOfMemoryError."""

from __future__ import annotations

import shlex
from pathlib import Path

from torchmem.allocator.sizes import format_size
from torchmem.explain.call_stack import FRAMEWORK, public_place
from torchmem.explain.headline import headline
from torchmem.explain.lines import LineUse
from torchmem.explain.oom_report import OomReport
from torchmem.sample.untrusted import printable

MIN_SHARE = 0.1
"""The share of the tensors' memory below which a line explains too little to be named."""


def note_lines(report: OomReport, path: Path) -> tuple[str, ...]:
    """Return the verdict, the line that holds the memory if known, and the command for the rest.

    `path` is the file of the report.
    """
    verdict = headline(report)
    command = shlex.join(["torchmem", "why", str(path.absolute())])
    found = verdict, _holding_line(report, verdict), f"`{command}` explains it"
    return tuple(printable(line) for line in found if line)


def _holding_line(report: OomReport, verdict: str) -> str:
    """Return the line with the most memory; "" if it is unknown, or if the verdict names one."""
    lines, allocator = report.lines, report.device.allocator
    if lines is None or allocator is None:
        return ""
    if any(_place(use) in verdict for use in (*lines.grown, *lines.held)):
        return ""
    allocated = allocator.allocated_bytes.total
    for use in lines.held:
        if use.frame.package not in FRAMEWORK and use.bytes >= MIN_SHARE * allocated > 0:
            share = f"{format_size(use.bytes)} ({use.bytes / allocated:.0%}) of the tensors"
            return f"{share} was allocated at {_place(use)}"
    return ""


def _place(use: LineUse) -> str:
    return " in ".join(public_place(use.frame))
