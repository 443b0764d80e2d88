"""The text of an exception as a message, if it says that memory ran out past PyTorch's observer."""

from __future__ import annotations

import re

from torchmem.explain.texts.formats import FORMATS
from torchmem.explain.texts.judgment import judge_message
from torchmem.explain.texts.numbers import Message, read_message
from torchmem.sample.sample import OOM_CAUSES, OomCause

_UNSEEN = [known for known in FORMATS if known.in_process]


def unseen_oom(text: str) -> Message | None:
    """Return the first message in a text that says so; None if none does."""
    found = [
        (match.start(), order, known, match)
        for order, known in enumerate(_UNSEEN)
        if (match := re.search(known.pattern, text))
    ]
    if not found:
        return None
    _, _, known, match = min(found, key=lambda each: each[:2])
    return read_message(known, match, text)


def cause_of(message: Message) -> OomCause | None:
    """Return the cause that a message tells, among those of a verdict; None if it does not."""
    cause = judge_message(message).cause
    return cause if cause in OOM_CAUSES else None
