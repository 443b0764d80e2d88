"""Unpickling with distrust: builtins only, and every way to fail is one sentence."""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

from torchmem.simulator.recording.refusal import HOW_TO_RECORD, RefusedError

_FOREIGN = {
    b"\x1f\x8b": "is compressed: unpack it first with gunzip.",
    b"PK": "is a zip archive, as torch.save writes it, not a memory snapshot: write it with _dump_snapshot(FILE).",
}

_ENDS_EARLY = "ends too early: it was not written or copied completely; copy it again or record another."


class _BuiltinsOnly(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse every class and function, so that no code of the file runs."""
        raise RefusedError(
            f"refers to code ({module_name[:80]}.{global_name[:80]}), which no memory snapshot does: do not open it "
            "with anything else, and record a snapshot of your own."
        )


def load(file: BinaryIO) -> object:
    """The value that the file holds, made of builtins; raises RefusedError, and MemoryError when it is too large."""
    _look_at_beginning(file)
    try:
        value: object = _BuiltinsOnly(file).load()
    except (RefusedError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - an unpickler raises whatever the bytes make it raise
        if isinstance(error, EOFError) or "truncated" in str(error):
            raise RefusedError(_ENDS_EARLY) from None
        raise _not_a_snapshot() from None
    return value


def _look_at_beginning(file: BinaryIO) -> None:
    beginning = file.read(2)
    file.seek(0)
    if not beginning:
        raise RefusedError(f"is empty; to record a snapshot, {HOW_TO_RECORD}.")
    if beginning in _FOREIGN:
        raise RefusedError(_FOREIGN[beginning])
    if beginning[:1] != b"\x80":  # every pickle since protocol 2 begins so
        raise _not_a_snapshot()


def _not_a_snapshot() -> RefusedError:
    return RefusedError(f"is not a memory snapshot of PyTorch; to record one, {HOW_TO_RECORD}.")
