"""Answers about texts: an error message, or a log, by the code of `torchmem why`."""

from __future__ import annotations

import io
from pathlib import Path

from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.why.answer import NodeAnswer
from torchmem.why.file_kind import TEXT, kind_of_path
from torchmem.why.text import TextAnswer, explain_files, explain_stream

MAX_CHARACTERS = 200_000
"""Of a text that is passed itself; larger ones are files."""
MAX_LOG_BYTES = 2 << 30
"""Larger logs take longer than an assistant waits; the command reads any size."""
NARROW = "Pass a shorter part of the log."


def explain_text(text: str | None, file: str | None) -> NodeAnswer:
    """Return what `torchmem why` prints about a text, or about a file of text. Raise UsageError."""
    if (text is None) == (file is None):
        raise UsageError("pass `text` or `file`, one of them.")
    found = explain_stream(io.BytesIO(text.encode()), "text") if text is not None else _file(file)
    return NodeAnswer(found.words(), found.document(), NARROW)


def _file(file: str | None) -> TextAnswer:
    path = Path(file or "")
    if kind_of_path(path) is not TEXT:
        raise UsageError(
            f"{sanitize_text(str(path))} is not a text: call explain_oom or read_snapshot."
        )
    if path.stat().st_size > MAX_LOG_BYTES:
        raise UsageError(
            f"{sanitize_text(str(path))} is larger than {MAX_LOG_BYTES >> 30} GiB: run `torchmem "
            "why` in a terminal."
        )
    return explain_files([path])
