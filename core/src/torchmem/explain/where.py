"""Where in the program an OutOfMemoryError came from, as text: the user's own line first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torchmem.explain.activity import is_in_optimizer
from torchmem.explain.call_stack import CallStack, Frame, Origin
from torchmem.explain.oom_report import OomReport

MAX_PLACE = 60
"""Columns for a file and a line; longer paths show their end."""
MAX_OWN_FRAMES = 12
MAX_PACKAGES = 3
TITLE = "Where the memory was requested"


def where(report: OomReport) -> Iterator[str]:
    """Yield the lines of the section; none if the report has no stack."""
    origin = report.origin
    if origin is None or not (origin.stack.frames or origin.main_stack):
        return
    circumstances = ", ".join(_circumstances(report, origin))
    yield f"{TITLE}{circumstances and f' ({circumstances})'}"
    yield from _frames(origin.stack)
    if origin.main_stack and (origin.stack.own is None or origin.backward is not None):
        yield f"  {_thread(origin)} requested it while the main thread was at"
        yield from _frames(origin.main_stack)


def _circumstances(report: OomReport, origin: Origin) -> Iterator[str]:
    if report.steps.count:
        yield f"step {report.steps.count + 1:,}"
    if origin.phase:
        yield f"phase {origin.phase}"
    if origin.thread:
        yield f"thread {origin.thread}"
    if origin.backward is not None:
        yield f"backward pass, {origin.backward}" if origin.backward else "backward pass"
    if is_in_optimizer(origin):
        yield "optimizer step"
    elif report.gradients_enabled is False and origin.backward is None:
        yield "without gradients"


def _thread(origin: Origin) -> str:
    if origin.thread:
        return f"Thread {origin.thread}"
    return "PyTorch's backward thread" if origin.backward is not None else "Another thread"


def _frames(stack: CallStack) -> Iterator[str]:
    own = stack.own
    start = stack.frames.index(own) if own else 0
    if own:
        yield f"  → {place(own)}"
    if start:
        yield f"      in {place(stack.frames[0])}"
    yield from _callers(stack.frames[start + (own is not None) :], stack.omitted)


def _callers(frames: Sequence[Frame], omitted: int) -> Iterator[str]:
    """Yield the user's frames in full, and runs of other frames as one line."""
    run: list[Frame] = []
    shown = 0
    for frame in frames:
        if frame.package is not None or shown == MAX_OWN_FRAMES:
            run.append(frame)
            continue
        if run:
            yield f"    … {_packages(run)}"
            run = []
        shown += 1
        yield f"    {place(frame)}"
    if run:
        yield f"    … {_packages(run)}"
    if omitted:
        yield f"    … {omitted:,} left out"


def _packages(frames: Sequence[Frame]) -> str:
    """Return how many frames belong to which packages."""
    counts = Counter(frame.package or "the script" for frame in frames).most_common()
    named = ", ".join(f"{count} of {package}" for package, count in counts[:MAX_PACKAGES])
    others = sum(count for _, count in counts[MAX_PACKAGES:])
    return f"{named}, {others} of others" if others else named


def short_place(frame: Frame) -> str:
    """Return the name of the file, and the line."""
    name = frame.file.rpartition("/")[2]
    return name if frame.line is None else f"{name}:{frame.line}"


def place(frame: Frame) -> str:
    """Return file, line and function; files of packages start with the package."""
    text = frame.place
    if frame.package is not None:
        text = text[text.rfind("/" if frame.package == "python" else f"/{frame.package}/") + 1 :]
    if len(text) > MAX_PLACE:
        text = "…" + text[1 - MAX_PLACE :]
    return f"{text}  {frame.function}"
