"""The page and the JSON document of `torchmem compare`, described in docs/compare.md."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.compare import markdown
from torchmem.compare.baseline import Outcome as MarkdownOutcome
from torchmem.compare.markdown import ComparedRow, code, escaped
from torchmem.compare.measured import Measured, Side
from torchmem.compare.peak_lines import change_lines, change_values, signed
from torchmem.compare.peak_memory import peak_values
from torchmem.compare.verdict import Comparison, Outcome, PartResult
from torchmem.explain.run_summary import RunSummary
from torchmem.output.terminal import MAX_COLUMNS, aligned, counted, joined, wrapped
from torchmem.sample.untrusted import sanitize_text

SCHEMA = 1
MAX_DETAILED = 3
"""Parts of which the page shows what changed."""
MAX_FACT = 70
TITLES: dict[Outcome, str] = {
    "regression": "Regression",
    "improvement": "Improvement",
    "unchanged": "No regression",
}
MARKDOWN_OUTCOMES: dict[Outcome, MarkdownOutcome] = {
    "regression": "more",
    "improvement": "less",
    "unchanged": "same",
}
WORDS: dict[Outcome, str] = {"regression": "worse", "improvement": "better", "unchanged": "same"}


def page(found: Comparison) -> str:
    """Return the page for a terminal."""
    details = [part for part in found.parts if part.outcome != "unchanged"] or found.parts[:1]
    rows = _single_rows(found.parts[0]) if len(found.parts) == 1 else _many_rows(found)
    return joined(
        [
            wrapped(sentence(found)),
            [*_side("Before", found.before), *_side("After", found.after)],
            list(aligned(list(rows))),
            *(_changes(part, found) for part in details[:MAX_DETAILED]),
            _facts(found),
            _notes(found),
        ]
    )


def sentence(found: Comparison) -> str:
    """Return the verdict on all parts."""
    title = TITLES[found.outcome]
    if len(found.parts) == 1:
        return f"{title}: {_lowered(found.parts[0].sentence)}"
    counts = [
        f"{sum(part.outcome == outcome for part in found.parts):,} {word}"
        for outcome, word in WORDS.items()
        if any(part.outcome == outcome for part in found.parts)
    ]
    worst = found.parts[0]
    first = f" {worst.label}: {_lowered(worst.sentence)}" if worst.outcome != "unchanged" else ""
    return f"{title}: of {counted(len(found.parts), 'part')}, {', '.join(counts)}.{first}"


def document(found: Comparison) -> str:
    """Return one line of JSON."""
    values = {
        "schema": SCHEMA,
        "outcome": found.outcome,
        "sentence": sentence(found),
        "max_peak_increase": found.tolerance,
        "before": _side_values(found.before),
        "after": _side_values(found.after),
        "parts": [_part_values(part) for part in found.parts],
        "only_before": list(found.only_before),
        "only_after": list(found.only_after),
        "differences": [
            {"name": name, "before": before, "after": after}
            for name, before, after in found.differences
        ],
        "notes": _note_texts(found),
    }
    return json.dumps(values, allow_nan=False) + "\n"


def comment(found: Comparison) -> str:
    """Return Markdown for the comment of a pull request."""
    rows = (
        ComparedRow(
            part.label,
            MARKDOWN_OUTCOMES[part.outcome],
            part.before.memory.peak_allocated,
            part.after.memory.peak_allocated,
            part.diff,
        )
        for part in found.parts
    )
    sides = ("Before", found.before), ("After", found.after)
    verdicts = [
        escaped(f"{when}, {side.noun}: {side.verdict}") for when, side in sides if side.verdict
    ]
    facts = [
        f"- {escaped(name)}: {code(before)} before, {code(after)} after"
        for name, before, after in found.differences
    ]
    differing = ["What else differs:\n\n" + "\n".join(facts)] if facts else []
    notes = [*verdicts, *differing, *map(escaped, _note_texts(found))]
    title, _, reason = sentence(found).partition(": ")
    head = f"{title}\n\n{escaped(reason[:1].upper() + reason[1:])}"
    return markdown.comment(head, rows, notes)


def listing(found: Sequence[tuple[Path, RunSummary]]) -> str:
    """Return a table of the summaries in a run directory."""
    rows = [
        ("  ended", "run", "rank", "state", "steps", "peak allocated", "peak reserved", "file"),
        *(_listed(path, summary) for path, summary in found),
    ]
    return "\n".join(aligned(rows)) + "\n"


def _side(when: str, side: Side) -> list[str]:
    return wrapped(f"{when}, {side.noun}: {side.verdict}") if side.verdict else []


def _side_values(side: Side) -> dict[str, Any]:
    return {"file": side.name, "is": side.noun, "verdict": side.verdict or None}


def _listed(path: Path, summary: RunSummary) -> tuple[str, ...]:
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.timestamp))
    allocated = [device.allocated_peak_bytes for device in summary.devices]
    reserved = [device.reserved_peak_bytes for device in summary.devices]
    return (
        f"  {ended}",
        summary.process.run,
        str(summary.process.rank),
        summary.state,
        f"{summary.steps:,}",
        _size(max(filter(None, allocated), default=None)),
        _size(max(filter(None, reserved), default=None)),
        sanitize_text(str(path)),
    )


def _single_rows(part: PartResult) -> Iterator[tuple[str, ...]]:
    before, after = part.before, part.after
    yield "", "before", "after", "change"
    pairs = (
        ("peak allocated", before.memory.peak_allocated, after.memory.peak_allocated),
        ("peak reserved", before.memory.peak_reserved, after.memory.peak_reserved),
        ("headroom", before.headroom, after.headroom),
    )
    for name, first, second in pairs:
        if first is not None or second is not None:
            yield f"  {name}", _size(first), _size(second), _difference(first, second)
    for name, first, second in (
        ("retries", before.retries, after.retries),
        ("steps", before.steps, after.steps),
    ):
        if first is not None or second is not None:
            yield f"  {name}", _number(first), _number(second), ""
    if before.step_seconds is not None and after.step_seconds is not None:
        yield "  seconds a step", f"{before.step_seconds:.3g}", f"{after.step_seconds:.3g}", ""


def _many_rows(found: Comparison) -> Iterator[tuple[str, ...]]:
    yield "", "before", "after", "change", ""
    for part in found.parts:
        first, second = _peaks(part.before), _peaks(part.after)
        change = _difference(first, second)
        yield f"  {part.label}", _size(first), _size(second), change, _word(part)


def _word(part: PartResult) -> str:
    if part.after.fits is False and part.before.fits is not False:
        return "does not fit"
    return WORDS[part.outcome]


def _peaks(measured: Measured) -> int | None:
    memory = measured.memory
    return memory.peak_reserved if memory.peak_allocated is None else memory.peak_allocated


def _difference(first: int | None, second: int | None) -> str:
    if first is None or second is None or first == second:
        return ""
    share = f" ({(second - first) / first:+.1%})" if first > 0 else ""
    return f"{signed(second - first)}{share}"


def _changes(part: PartResult, found: Comparison) -> list[str]:
    lines = list(change_lines(part.diff))
    if lines and len(found.parts) > 1:
        return [f"{part.label}: {_lowered(lines[0])}", *lines[1:]]
    return lines


def _facts(found: Comparison) -> list[str]:
    if not found.differences:
        return []
    width = max(len(name) for name, _, _ in found.differences)
    rows = (_fact(name, before, after, width) for name, before, after in found.differences)
    return ["What else differs:", *(line for row in rows for line in row)]


def _fact(name: str, before: str, after: str, width: int) -> list[str]:
    """Return one fact, in two lines if it is too long for one."""
    before, after = _short(before), _short(after)
    line = f"  {name:<{width}}  {before} before, {after} after"
    if len(line) <= MAX_COLUMNS:
        return [line]
    return [f"  {name:<{width}}  before: {before}", f"  {'':<{width}}  after:  {after}"]


def _notes(found: Comparison) -> list[str]:
    texts = _note_texts(found)
    return ["Notes", *(line for text in texts for line in wrapped(text, "  - "))] if texts else []


def _note_texts(found: Comparison) -> list[str]:
    return [
        *_cut_off("Before", [part.before for part in found.parts]),
        *_cut_off("After", [part.after for part in found.parts]),
        *_missing("before", found.only_before),
        *_missing("after", found.only_after),
    ]


def _cut_off(when: str, parts: Sequence[Measured]) -> Iterator[str]:
    cut = [part for part in parts if not part.is_whole_peak]
    if cut:
        number = f"{len(cut):,} of {len(parts):,} runs" if len(parts) > 1 else "the run"
        ran_out = all(part.ending == "oom" for part in cut)
        why = "ran out of memory" if ran_out else "did not reach an end of its own"
        yield f"{when}: {number} {why}, so the peak is that up to then."


def _missing(when: str, labels: Sequence[str]) -> Iterator[str]:
    if labels:
        yield f"Only {when}: {', '.join(labels[:8])}{', …' if len(labels) > 8 else ''}."


def _part_values(part: PartResult) -> dict[str, Any]:
    return {
        "label": part.label,
        "outcome": part.outcome,
        "sentence": part.sentence,
        "change_ratio": part.change,
        "before": _measured_values(part.before),
        "after": _measured_values(part.after),
        "changes": change_values(part.diff),
    }


def _measured_values(measured: Measured) -> dict[str, Any]:
    return {
        **peak_values(measured.memory),
        "ending": measured.ending,
        "fits": measured.fits,
        "total": measured.total,
        "headroom": measured.headroom,
        "retries": measured.retries,
        "steps": measured.steps,
        "step_seconds": measured.step_seconds,
    }


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _size(size: int | None) -> str:
    return "" if size is None else format_size(size)


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _short(text: str) -> str:
    text = sanitize_text(text)
    return text if len(text) <= MAX_FACT else f"{text[: MAX_FACT - 1]}…"
