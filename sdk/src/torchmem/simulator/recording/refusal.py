"""Why a file is no recording: the end of a sentence that begins with the file's name."""

from __future__ import annotations

HOW_TO_RECORD = (
    "call torch.cuda.memory._record_memory_history(max_entries=1_000_000) before training and "
    "torch.cuda.memory._dump_snapshot(FILE) after some steps, or run `torchmem capture --rank N`"
)


class RefusedError(Exception):
    """A snapshot that cannot be used; its text says why, and what to do."""


def damaged(what: str) -> RefusedError:
    """The snapshot contradicts what every supported version of PyTorch writes."""
    return RefusedError(
        f"is not a snapshot as PyTorch 2.1 and newer write it ({what}): record one again with an unchanged file from "
        "torch.cuda.memory._dump_snapshot."
    )
