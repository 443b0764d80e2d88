"""Ask a running process for something: write a request next to its sample, and read its answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torchmem.node.ranks import TrainingProcess
from torchmem.sample.errors import UsageError
from torchmem.sample.process_messages import MAX_MESSAGE_BYTES, encode, sibling_path
from torchmem.sample.run_directory import replace_file
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted_directory, read_untrusted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class AnswerMessage(Protocol):
    """Every answer contains the modification time of the request file that it belongs to."""

    @property
    def request_ns(self) -> int:
        """Modification time in nanoseconds."""


A = TypeVar("A", bound=AnswerMessage)


@contextmanager
def opened(process: TrainingProcess) -> Iterator[Path]:
    """Yield a path of the process's sample that leads through its open directory.

    The directory's owner may replace it at any time with a link to another one, in which root must
    not write. Raises UsageError if the directory is not the owner's.
    """
    folder = process.sample.parent
    try:
        with open_untrusted_directory(folder, process.uid) as (descriptor, _):
            yield Path(f"/proc/self/fd/{descriptor}") / process.sample.name
    except UntrustedFileError as error:
        raise UsageError(f"the directory {folder} of {process} {error}.") from None


@dataclass(frozen=True, slots=True)
class Exchange(Generic[A]):
    """One kind of request: the suffixes of its files, and how its answer is decoded.

    `name` is for people. A request counts as abandoned after `max_seconds`.
    """

    name: str
    request_suffix: str
    answer_suffix: str
    decode: Callable[[bytes], A]
    max_seconds: float

    @contextmanager
    def asked(
        self, process: TrainingProcess, sample: Path, message: DataclassInstance
    ) -> Iterator[int]:
        """Write a request and yield its modification time; on exit, remove request and answer.

        Raises UsageError if another request is in progress, or if it cannot be written.
        """
        path, shown = (sibling_path(file, self.request_suffix) for file in (sample, process.sample))
        with contextlib.suppress(FileNotFoundError):
            if abs(time.time() - path.lstat().st_mtime) < self.max_seconds:
                raise UsageError(
                    f"another {self.name} of {process} is in progress; if it was aborted, remove "
                    f"{shown}."
                )
        try:
            replace_file(path, encode(message))
            request_ns = path.lstat().st_mtime_ns
        except OSError as error:
            raise UsageError(f"the request {shown} cannot be written ({error.strerror}).") from None
        try:
            yield request_ns
        finally:
            for file in (path, sibling_path(sample, self.answer_suffix)):
                with contextlib.suppress(OSError):
                    file.unlink()

    def answer(self, process: TrainingProcess, sample: Path, request_ns: int) -> A | None:
        """Return the process's answer to this request, or None if there is none yet."""
        path = sibling_path(sample, self.answer_suffix)
        try:
            answer = self.decode(read_untrusted(path, MAX_MESSAGE_BYTES, process.uid)[0])
        except (FileNotFoundError, UntrustedFileError, ValueError):
            return None
        return answer if answer.request_ns == request_ns else None
