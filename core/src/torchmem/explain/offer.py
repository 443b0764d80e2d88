"""What to enable so that the next report of a growing job names its lines."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.explain.oom_report import OomReport

GROWING = frozenset({"leak", "larger_step"})


def offer(report: OomReport) -> Iterator[str]:
    """Yield the lines to add to a job whose memory grew, if no line that grew is known.

    A single step that needs more comes without a warning, so it would not be recorded.
    """
    why = report.verdict.why if report.verdict else None
    is_sudden = why is not None and why.bytes_per_step is None
    if report.oom.onset not in GROWING or is_sudden:
        return
    if report.lines is None:
        yield "To see which lines hold the memory at the next OutOfMemoryError"
        yield from _ways('"oom"')
    elif not report.lines.grown and report.oom.onset == "leak":
        yield "The recording began too late to tell which lines grew. To record from the start"
        yield from _ways("True")


def _ways(value: str) -> Iterator[str]:
    call = f"sdk.instrument(history={value})"
    yield f"         {call:<33}# in the script, or"
    variable = value.strip('"').lower()
    yield f"         TORCHMEM_HISTORY={variable} torchmem run -- COMMAND"
