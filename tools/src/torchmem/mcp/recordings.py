"""Answers about snapshot files, by the code of `torchmem why` and `torchmem whatif`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.trace.lifetimes import At
from torchmem.whatif import page as whatif_page
from torchmem.whatif import question
from torchmem.whatif.result import whatif_values
from torchmem.why.answer import NodeAnswer
from torchmem.why.snapshot import SnapshotAnswer, SnapshotView

MAX_FILE_BYTES = 256 << 20
"""Larger files take longer than an assistant waits; the commands read up to 1 GiB."""
MAX_ROWS = 50
MAX_SETTINGS = 8
NARROW = "Pass `gpu` or fewer `rows`."


def read_snapshot(
    file: str, at: At | None, gpu: int | None, rows: int, *, only_leaks: bool
) -> NodeAnswer:
    """Return what `torchmem why` prints. Raise UsageError."""
    path = _checked(file, "why")
    view = SnapshotView(at, gpu, rows, only_leaks)
    answer = SnapshotAnswer(path, view)
    documents = list(map(json.loads, answer.json_lines()))
    return NodeAnswer(answer.words(), {"gpus": documents}, NARROW)


def what_if(
    file: str, settings: Sequence[str], gpu_model: str | None, gpu: int | None
) -> NodeAnswer:
    """Return what `torchmem whatif` prints. Raise UsageError."""
    path = _checked(file, "whatif")
    question.check_settings(settings)
    model = question.gpu_model(gpu_model) if gpu_model else None
    results = list(question.results(path, question.WhatIfQuestion(gpu, model, tuple(settings))))
    pages = map(whatif_page.page, results)
    return NodeAnswer("\n".join(pages), {"gpus": list(map(whatif_values, results))}, "Pass `gpu`.")


def _checked(file: str, command: str) -> Path:
    """Return the path of a file that is not too large; others are refused when they are read."""
    path = Path(file)
    with suppress(OSError, ValueError):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(
                f"{sanitize_text(file)} is larger than {MAX_FILE_BYTES >> 20} MiB: run `torchmem "
                f"{command}` in a terminal."
            )
    return path
