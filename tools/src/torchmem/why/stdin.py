"""The answer about stdin: a text of any size, or a file of another kind that is piped."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import HEAD_BYTES
from torchmem.why.answer import Answer
from torchmem.why.file_kind import TEXT, WANTED, kind_of_head
from torchmem.why.text import explain_stream


def stdin_answer(stream: BinaryIO) -> Answer:
    """Return the answer about a stream. Raise UsageError."""
    head = _read(stream, HEAD_BYTES)
    if not head:
        raise UsageError(f"stdin is empty: pipe {WANTED}.")
    if kind_of_head(head) is TEXT:
        return explain_stream(_Rest(head, stream))
    from torchmem.why.file import file_answer
    from torchmem.why.snapshot import SnapshotView

    with tempfile.NamedTemporaryFile(prefix="torchmem-stdin-") as file:
        file.write(head)
        shutil.copyfileobj(stream, file)
        file.flush()
        return _Kept(file_answer(Path(file.name), SnapshotView(), None))


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read until `size` bytes are there: a pipe gives less at a time."""
    parts, left = list[bytes](), size
    while left > 0 and (part := stream.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


class _Rest:
    """A stream with its beginning, which was read already."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = io.BytesIO(head), stream

    def read(self, size: int, /) -> bytes:
        return self._head.read(size) or self._stream.read(size)


class _Kept:
    """An answer that is made while the file exists."""

    def __init__(self, answer: Answer) -> None:
        self._words, self._json = answer.words(), answer.json_lines()
        try:
            self._page: bytes | None = answer.page()
        except UsageError as error:
            self._page, self._problem = None, str(error)

    def words(self) -> str:
        return self._words

    def json_lines(self) -> list[str]:
        return self._json

    def page(self) -> bytes:
        if self._page is None:
            raise UsageError(self._problem)
        return self._page
