"""The checks as a table for terminals, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from torchmem.doctor.check import Check

WIDTH = 88
SIGNS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
SUBJECT_COLUMNS = 26
_INDENT = " " * (9 + SUBJECT_COLUMNS)


def page(checks: Sequence[Check]) -> str:
    """Return a row for each check with the next step below it, and a summary."""
    lines = [line for check in checks for line in _row(check)]
    return "\n".join([*lines, "", _summary(checks)]) + "\n"


def document(checks: Sequence[Check]) -> str:
    """Return the checks as one line of JSON."""
    return json.dumps([asdict(check) for check in checks]) + "\n"


def _row(check: Check) -> Iterator[str]:
    first = f"{SIGNS[check.status]:<9}{check.subject:<{SUBJECT_COLUMNS}}"
    yield from textwrap.wrap(
        check.found, WIDTH, initial_indent=first, subsequent_indent=_INDENT, break_on_hyphens=False
    )
    if check.next_step:
        yield from textwrap.wrap(
            f"→ {check.next_step}",
            WIDTH,
            initial_indent=_INDENT,
            subsequent_indent=f"{_INDENT}  ",
            break_on_hyphens=False,
        )


def _summary(checks: Sequence[Check]) -> str:
    count = Counter(check.status for check in checks)
    problems, notes = count["problem"], count["note"]
    if not problems:
        return f"No problem found, {_number(notes, 'note')}."
    return f"{_number(problems, 'problem')}, {_number(notes, 'note')}."


def _number(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
