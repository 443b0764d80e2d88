"""The table of messages as JSON, for the page, which explains texts in the browser.

The page has its own code for what `numbers`, `log_lines`, `scan` and `judgment` do; the patterns,
the bounds and the words are those of this table.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from torchmem.allocator.oom_cause import COMMUNICATORS_ALLOWANCE_BYTES, CONTEXT_ALLOWANCE_BYTES
from torchmem.explain.texts import judgment, log_lines
from torchmem.explain.texts.advice import advice, by_cause, next_command
from torchmem.explain.texts.formats import FORMATS, TextFormat
from torchmem.explain.texts.judgment import Judged
from torchmem.explain.texts.numbers import MAX_BYTES, Message, Numbers
from torchmem.explain.texts.scan import NEAR_BYTES
from torchmem.explain.texts.words import NUMBER_WORDS, PHRASES, TEXT_CAUSES
from torchmem.explain.verdict import CAUSE_BY_CHANGE, MIN_ROOM_RATIO, NEW_RATIO


def page_table() -> bytes:
    """Return the table."""
    table = {
        "formats": [_format(known) for known in FORMATS],
        "labels": [[_pattern(label.pattern), _flags(label.pattern)] for label in log_lines.LABELS],
        "json_texts": log_lines.JSON_TEXTS,
        "json_ranks": log_lines.JSON_RANKS,
        "numbers": NUMBER_WORDS,
        "causes": TEXT_CAUSES,
        "phrases": PHRASES,
        "advice": {cause: _cause_advice(Judged(cause)) for cause in TEXT_CAUSES},
        "advice_if": {cause: by_cause([cause])[0].text for cause in PHRASES},
        "next": {
            cause or "unknown": _next(FORMATS[0], Judged(cause)) for cause in (None, *TEXT_CAUSES)
        },
        "cause_by_change": CAUSE_BY_CHANGE,
        "bounds": {
            "min_room": MIN_ROOM_RATIO,
            "large_room": NEW_RATIO,
            "context": CONTEXT_ALLOWANCE_BYTES,
            "communicators": COMMUNICATORS_ALLOWANCE_BYTES,
            "own_extra": judgment.OWN_EXTRA_BYTES,
            "waiting": judgment.WAITING_RATIO,
            "printed": judgment.PRINTED,
            "slack": judgment.SLACK_BYTES,
            "max_bytes": MAX_BYTES,
            "label_columns": log_lines.LABEL_COLUMNS,
            "near": NEAR_BYTES,
        },
    }
    return json.dumps(table, separators=(",", ":")).encode()


def _format(known: TextFormat) -> dict[str, Any]:
    judged = Judged(known.cause)
    return {
        "name": known.name,
        "triggers": known.triggers,
        "pattern": _pattern(known.pattern),
        "meaning": known.meaning,
        "summary": known.summary,
        "role": known.role,
        "cause": known.cause,
        "chains": [
            [{**asdict(clause), "pattern": _pattern(clause.pattern)} for clause in chain]
            for chain in known.chains
        ],
        "advice": [] if known.chains else _advice(known, judged),
        "next": None if known.chains else _next(known, judged),
    }


def _pattern(pattern: str) -> str:
    """Return a pattern in JavaScript's syntax."""
    return pattern.removeprefix("(?i)").replace("(?P<", "(?<")


def _flags(pattern: str) -> str:
    return "gi" if pattern.startswith("(?i)") else "g"


def _cause_advice(judged: Judged) -> list[dict[str, Any]]:
    return _advice(FORMATS[0], judged)


def _advice(known: TextFormat, judged: Judged) -> list[dict[str, Any]]:
    return [{"text": each.text, "lines": each.lines} for each in advice(_message(known), judged)]


def _next(known: TextFormat, judged: Judged) -> dict[str, str]:
    return asdict(next_command(_message(known), judged))


def _message(known: TextFormat) -> Message:
    return Message(known, Numbers(), 0, 0, is_whole=True)
