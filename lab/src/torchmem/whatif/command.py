"""`torchmem whatif`: a job's own allocations under other allocator settings.

Needs no extra, except for `--plot`. Modules that take long to import are imported when needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.allocator.settings import rejection_reason
from torchmem.cli import plots
from torchmem.cli.terminal import write_out
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import printable, sanitize_text

if TYPE_CHECKING:
    from torchmem.phantom.gpus import GpuModel
    from torchmem.recording.recording import Recording
    from torchmem.whatif.result import WhatIf

HELP = "replay a memory snapshot's allocations under other allocator settings"
EPILOG = """\
Examples:
  torchmem whatif snapshot.pickle
  torchmem whatif snapshot.pickle --gpu-model t4 --setting max_split_size_mb:256

Exit code: 0 if there is a recommendation for each GPU, 1 if one has none, 2 if
a file or a flag cannot be used.
"""
MAX_REASON = 400
NO_RECOMMENDATION = 1
"""Exit code if a file was read but its replay does not reproduce it; like grep's for no match."""


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """The checked flags; `gpu` is None if the trace determines its memory."""

    device: int | None
    gpu: GpuModel | None
    settings: Sequence[str]
    plot: Path | None
    json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "snapshots",
        metavar="SNAPSHOT",
        nargs="+",
        type=Path,
        help="a file of torch.cuda.memory._dump_snapshot or `torchmem capture`",
    )
    parser.add_argument(
        "--gpu",
        type=int,
        metavar="N",
        help="only cuda:N (default: all that have a trace)",
    )
    parser.add_argument(
        "--gpu-model",
        metavar="MODEL",
        help="a name from `torchmem preflight --list-gpu-models`, or a size: 24GB (10^9), "
        "22.5GiB (2^30) (default: from an OOM in the trace, otherwise unlimited)",
    )
    parser.add_argument(
        "--setting",
        metavar="CONF",
        action="append",
        default=[],
        help="try this instead of the usual settings, such as 'max_split_size_mb:256'; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON per device")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="plot memory over the trace, as .png or .svg"
    )


def check_settings(settings: Sequence[str]) -> None:
    """Raise UsageError if PyTorch would refuse one of the settings."""
    for text in settings:
        reason = rejection_reason(text)
        if reason is not None:
            raise UsageError(f"--setting: {printable(reason[:MAX_REASON])}")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer for each snapshot and return the exit code.

    A file that cannot be used is reported on stderr, and the other files are still answered.

    Raises:
        UsageError: a flag cannot be used.
    """
    options = _options(arguments)
    codes = [
        _answer_or_report(path, options, is_first=number == 0)
        for number, path in enumerate(arguments.snapshots)
    ]
    return max(codes)


def _options(arguments: argparse.Namespace) -> WhatIfOptions:
    if arguments.plot:
        if len(arguments.snapshots) > 1:
            raise UsageError("--plot draws one snapshot: name only one.")
        plots.check(arguments.plot, "whatif")
    gpu = gpu_model(arguments.gpu_model) if arguments.gpu_model else None
    check_settings(arguments.setting)
    return WhatIfOptions(
        arguments.gpu, gpu, tuple(arguments.setting), arguments.plot, arguments.json
    )


def gpu_model(text: str) -> GpuModel:
    """Return a model by name or size. Raise UsageError."""
    from torchmem.phantom.gpus import parse_usable_gpu_model

    try:
        return parse_usable_gpu_model(text)
    except UsageError as error:
        raise UsageError(f"--gpu-model: {sanitize_text(str(error))}") from None


def _answer_or_report(path: Path, options: WhatIfOptions, *, is_first: bool) -> int:
    try:
        return 0 if _answer(path, options, is_first=is_first) else NO_RECOMMENDATION
    except UsageError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code


def _answer(path: Path, options: WhatIfOptions, *, is_first: bool) -> bool:
    """Print the answer for each device; return whether all devices have a recommendation.

    Pages after the first one start with an empty line.
    """
    from torchmem.whatif.result import document
    from torchmem.whatif.text import page

    decided = True
    for result in results(path, options):
        write_out(document(result) if options.json else "\n" * (not is_first) + page(result))
        is_first = False
        if options.plot:
            _draw(result, options.plot)
        decided &= result.verdict.decision != "none"
    return decided


def results(path: Path, options: WhatIfOptions) -> Iterator[WhatIf]:
    """Yield the answer for each device of a file. Raise UsageError."""
    from torchmem.recording import read

    for recording in _selected(read(path), path, options):
        yield _replay(recording, options)


def _selected(
    recordings: Sequence[Recording], path: Path, options: WhatIfOptions
) -> Sequence[Recording]:
    devices = ", ".join(str(recording.device) for recording in recordings)
    if options.device is not None:
        recordings = [recording for recording in recordings if recording.device == options.device]
        if not recordings:
            raise UsageError(
                f"{sanitize_text(str(path))} has no allocation trace of cuda:{options.device}: "
                f"pass --gpu with one of {devices}."
            )
    if options.plot and len(recordings) > 1:
        raise UsageError(f"--plot draws one GPU: pass --gpu with one of {devices}.")
    return recordings


def _replay(recording: Recording, options: WhatIfOptions) -> WhatIf:
    from torchmem.whatif.engine import what_if
    from torchmem.whatif.text import Progress

    gpu = options.gpu
    with Progress(f"replaying {sanitize_text(recording.name)}") as progress:
        return what_if(
            recording,
            gpu_bytes=None if gpu is None else gpu.memory_bytes - gpu.context_bytes,
            total_bytes=None if gpu is None else gpu.memory_bytes,
            settings=options.settings or None,
            progress=progress,
        )


def _draw(result: WhatIf, path: Path) -> None:
    from torchmem.whatif import plot

    if result.verdict.decision == "none":
        message = "torchmem: no plot is drawn: the replay does not reproduce the recording."
        print(message, file=sys.stderr)
    else:
        plot.draw(result, path)
