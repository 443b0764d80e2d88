"""What a phantom cannot know, and what else a reader should hear."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.cli.preflight.growth import growth
from torchmem.cli.preflight.single import ROOMIER, Report
from torchmem.core.sizes import format_size

ALWAYS = (
    "A phantom GPU computes nothing: values read from it are zero, time on it means nothing, and the workspaces of "
    "some libraries are estimates."
)


def notes(report: Report) -> Iterator[str]:
    """Sentences, the gravest first."""
    yield from _growth(report)
    yield from _values(report)
    yield from _lacking(report)
    if report.need is not None:
        yield (
            f"What it needs was seen in a second run, on a phantom with {ROOMIER} times the memory; the replays are of "
            "that run."
        )
    if report.comparison and report.comparison.method == "replayed":
        yield (
            "Replays take it that the script asks for the same sizes in the same order; on other cards, that kernels "
            "and workspaces are those of this one."
        )
    yield ALWAYS


def _growth(report: Report) -> Iterator[str]:
    for device in report.outcome.devices:
        per_step = growth(device.steps)
        if per_step:
            left = max(0, device.headroom) // per_step
            yield (
                f"Memory on GPU {device.device} grows by {format_size(per_step)} with each step: a leak, or something "
                f"that is still being gathered. At this rate the card is full after {left:,} more steps."
            )


def _values(report: Report) -> Iterator[str]:
    times = report.outcome.values_read
    if times:
        yield (
            f"The script read values from the card {times:,} time{'s' * (times != 1)}, as Tensor.item() does, and got "
            "zeros. Where it decides by them (loss scaling, early stopping, sizes that depend on data) a real run may "
            "go another way."
        )


def _lacking(report: Report) -> Iterator[str]:
    names = list(dict.fromkeys(report.outcome.lacking))
    if names:
        yield f"The phantom GPU does not have {', '.join(names)}; the script went on without."
