"""From one snapshot file to what is printed and drawn about it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchmem.cli.output import write_out
from torchmem.cli.whatif import text
from torchmem.cli.whatif.document import document
from torchmem.cli.whatif.progress import Progress
from torchmem.cli.whatif.wanted import Wanted
from torchmem.core.errors import UsageError
from torchmem.core.untrusted import harmless
from torchmem.simulator.card import CONTEXT_BYTES
from torchmem.simulator.recording import read
from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.whatif.engine import what_if
from torchmem.simulator.whatif.result import WhatIf


def answer(path: Path, wanted: Wanted, *, is_first: bool) -> bool:
    """Print the answer for each device of a snapshot; whether there was a verdict for all. Raises UsageError.

    A page that is not the first one begins with an empty line.
    """
    recordings = _selected(read(path), path, wanted)
    decided = True
    for number, recording in enumerate(recordings):
        with Progress(f"replaying {harmless(recording.name)}") as progress:
            result = what_if(
                recording,
                card_bytes=None if wanted.card_bytes is None else wanted.card_bytes - CONTEXT_BYTES,
                total_bytes=wanted.card_bytes,
                settings=wanted.settings or None,
                progress=progress,
            )
        write_out(document(result) if wanted.json else "\n" * (number > 0 or not is_first) + text.page(result))
        if wanted.plot:
            _draw(result, wanted.plot)
        decided &= result.verdict.decision != "none"
    return decided


def _draw(result: WhatIf, path: Path) -> None:
    from torchmem.cli.whatif import plot

    if result.verdict.decision == "none":
        print("torchmem: no picture is drawn, as the replay does not repeat the recording.", file=sys.stderr)
    else:
        plot.draw(result, path)


def _selected(recordings: Sequence[Recording], path: Path, wanted: Wanted) -> Sequence[Recording]:
    devices = ", ".join(str(recording.device) for recording in recordings)
    if wanted.device is not None:
        recordings = [recording for recording in recordings if recording.device == wanted.device]
        if not recordings:
            raise UsageError(
                f"{harmless(str(path))} holds no allocation trace of GPU {wanted.device}: choose with --device among "
                f"{devices}."
            )
    if wanted.plot and len(recordings) > 1:
        raise UsageError(f"--plot draws one GPU: choose with --device among {devices}.")
    return recordings
