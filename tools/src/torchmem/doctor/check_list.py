"""The checks as a table for terminals, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from torchmem.doctor.check import Check
from torchmem.output.terminal import counted, wrapped

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
    yield from wrapped(check.found, first, WIDTH)
    if check.next_step:
        yield from wrapped(check.next_step, f"{_INDENT}→ ", WIDTH)


def _summary(checks: Sequence[Check]) -> str:
    count = Counter(check.status for check in checks)
    problems, notes = count["problem"], count["note"]
    if not problems:
        return f"No problem found, {counted(notes, 'note')}."
    return f"{counted(problems, 'problem')}, {counted(notes, 'note')}."
