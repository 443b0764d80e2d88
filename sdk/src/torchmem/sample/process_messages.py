"""Messages between a command and a training process, as files next to the process's sample.

The command, or another process of the same user, writes a request; the process writes an answer.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.untrusted import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_MESSAGE_BYTES = 4096
MAX_REASON_LENGTH = 300  # characters


def sibling_path(sample: Path, suffix: str) -> Path:
    """Return the path of another file of the process that publishes the sample file `sample`."""
    return sample.with_name(sample.name.removesuffix(SAMPLE_SUFFIX) + suffix)


def encode(message: DataclassInstance) -> bytes:
    """Return the message as one line of JSON."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_object(data: bytes) -> dict[str, Any]:
    """Return the fields of a message; raise ValueError, with a sentence, for anything else."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError("the file is not a JSON object.")  # noqa: TRY004 - a bad value
    return fields


def decode_reason(value: object) -> str | None:
    """Return the reason in an answer as printable text of bounded length, or None."""
    return None if value is None else printable(str(value)[:MAX_REASON_LENGTH])
