"""What is asked about a snapshot: which GPU, how large it is, and which settings are tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.allocator.settings import rejection_reason
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import printable, sanitize_text

if TYPE_CHECKING:
    from torchmem.phantom.gpus import GpuModel
    from torchmem.trace.recording import Recording
    from torchmem.whatif.result import WhatIf

MAX_REASON = 400


@dataclass(frozen=True, slots=True)
class WhatIfQuestion:
    """One device or, with None, each; `gpu` is None if the trace determines its memory.

    Without `settings`, the usual ones are tried.
    """

    device: int | None = None
    gpu: GpuModel | None = None
    settings: Sequence[str] = ()


def check_settings(settings: Sequence[str]) -> None:
    """Raise UsageError if PyTorch would refuse one of the settings."""
    for text in settings:
        reason = rejection_reason(text)
        if reason is not None:
            raise UsageError(f"--setting: {printable(reason[:MAX_REASON])}")


def gpu_model(text: str) -> GpuModel:
    """Return a model by name or size. Raise UsageError."""
    from torchmem.phantom.gpus import parse_usable_gpu_model

    try:
        return parse_usable_gpu_model(text)
    except UsageError as error:
        raise UsageError(f"--gpu-model: {sanitize_text(str(error))}") from None


def results(path: Path, question: WhatIfQuestion) -> Iterator[WhatIf]:
    """Yield the answer for each device of a file. Raise UsageError."""
    from torchmem.trace import read

    for recording in _selected(read(path), path, question):
        yield replayed(recording, question)


def _selected(
    recordings: Sequence[Recording], path: Path, question: WhatIfQuestion
) -> Sequence[Recording]:
    devices = ", ".join(str(recording.device) for recording in recordings)
    if question.device is not None:
        recordings = [recording for recording in recordings if recording.device == question.device]
        if not recordings:
            raise UsageError(
                f"{sanitize_text(str(path))} has no allocation trace of cuda:{question.device}: "
                f"pass --gpu with one of {devices}."
            )
    return recordings


def replayed(recording: Recording, question: WhatIfQuestion) -> WhatIf:
    """Return the answer for one device, and show the progress. Raise UsageError."""
    from torchmem.whatif.engine import what_if
    from torchmem.whatif.page import Progress

    gpu = question.gpu
    with Progress(f"replaying {sanitize_text(recording.name)}") as progress:
        return what_if(
            recording,
            gpu_bytes=None if gpu is None else gpu.memory_bytes - gpu.context_bytes,
            total_bytes=None if gpu is None else gpu.memory_bytes,
            settings=question.settings or None,
            progress=progress,
        )
