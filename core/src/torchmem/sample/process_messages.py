"""Messages between a command and a training process, as files next to the process's sample.

The command, or another process of the same user, writes a request; the process writes an answer.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.untrusted import convert, printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

M = TypeVar("M")

MAX_MESSAGE_BYTES = 4096
MAX_REASON_LENGTH = 300  # characters


def sibling_path(sample: Path, suffix: str) -> Path:
    """Return the path of another file of the process that publishes the sample file `sample`."""
    return sample.with_name(sample.name.removesuffix(SAMPLE_SUFFIX) + suffix)


def encode(message: DataclassInstance) -> bytes:
    """Return the message as one line of JSON."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode(data: bytes, kind: type[M]) -> M:
    """Return a message; raise ValueError, with a sentence, if torchmem did not write it."""
    try:
        return convert(json.loads(data), kind)
    except (ValueError, RecursionError):
        raise ValueError("the message was not written by torchmem.") from None


def readable(text: str) -> str:
    """Return text of a message as printable text of bounded length."""
    return printable(text[:MAX_REASON_LENGTH])
