"""What a run used, its JSON form, and the difference of two."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from torchmem.compare.peak_memory import (
    Change,
    PeakMemory,
    SourceLine,
    Use,
    diff,
    exceeds,
    merged,
    peak_of,
    peak_values,
)

MIB = 1 << 20
ATTENTION = SourceLine("model.py", 31, "forward", "weights = scores.softmax(-1)")
UP = SourceLine("model.py", 40, "forward", "x = self.up(x)")
USAGE = PeakMemory(
    peak_allocated=100 * MIB,
    peak_reserved=120 * MIB,
    leaked=0,
    uses=(
        Use("parameters", 20 * MIB, "up", SourceLine("model.py", 12, "__init__")),
        Use("activations", 50 * MIB, "layers.*.attention", ATTENTION),
        Use("activations", 29 * MIB, "layers.*.up", UP),
        Use("rounding", 1 * MIB),
    ),
)


def test_json_keeps_all() -> None:
    """A peak is the same after a round trip through JSON, which leaves out what is unknown."""
    text = json.dumps(peak_values(USAGE))
    assert peak_of(json.loads(text)) == USAGE
    assert peak_values(PeakMemory(peak_reserved=5)) == {"peak_reserved": 5}
    assert peak_of({}) == PeakMemory()


@pytest.mark.parametrize(
    "values", [[], {"peak_allocated": "6 GiB"}, {"peak_reserved": -1}, {"uses": [{"bytes": 1}]}]
)
def test_json_refused(values: object) -> None:
    """A value that does not describe a peak is rejected."""
    with pytest.raises(ValueError, match=r"\w"):
        peak_of(values)


def test_by_component() -> None:
    """The components add up to the peak and have one order."""
    shuffled = replace(USAGE, uses=USAGE.uses[::-1])
    assert list(shuffled.by_component.items()) == [
        ("parameters", 20 * MIB),
        ("activations", 79 * MIB),
        ("rounding", 1 * MIB),
    ]


def test_growth_is_named_by_component_module_and_line() -> None:
    """The difference names what grew most first, with the place it has in the second peak."""
    moved = replace(ATTENTION, line=35)
    grown = replace(USAGE.uses[1], bytes=80 * MIB, line=moved)
    shrunk = replace(USAGE.uses[2], bytes=19 * MIB)
    after = replace(
        USAGE, peak_allocated=120 * MIB, uses=(USAGE.uses[0], grown, shrunk, USAGE.uses[3])
    )
    found = diff(USAGE, after)
    assert found.peak_allocated == 20 * MIB
    assert found.by_component == (Change(79 * MIB, 99 * MIB, "activations"),)
    sizes = (50 * MIB, 80 * MIB), (29 * MIB, 19 * MIB)
    assert found.by_module == (
        Change(*sizes[0], "activations", "layers.*.attention"),
        Change(*sizes[1], "activations", "layers.*.up"),
    )
    assert found.by_line == (
        Change(*sizes[0], "activations", "layers.*.attention", moved),
        Change(*sizes[1], "activations", "layers.*.up", UP),
    )


def test_lines_that_only_moved_are_no_change() -> None:
    """Lines that have other numbers, because of lines above them, are the same lines."""
    lower = [
        replace(use, line=replace(use.line, line=99)) if use.line and use.line.code else use
        for use in USAGE.uses
    ]
    found = diff(USAGE, replace(USAGE, uses=tuple(lower)))
    assert (found.by_component, found.by_module, found.by_line) == ((), (), ())


def test_an_edited_line_is_one_line() -> None:
    """An edited line of a function counts as one line: neither as growth nor as a decrease."""
    edited = replace(ATTENTION, line=32, code="weights = F.softmax(scores, -1)")
    same = replace(USAGE.uses[1], line=edited)
    found = diff(USAGE, replace(USAGE, uses=(USAGE.uses[0], same, *USAGE.uses[2:])))
    assert found.by_line == ()
    more = replace(same, bytes=60 * MIB)
    found = diff(USAGE, replace(USAGE, uses=(USAGE.uses[0], more, *USAGE.uses[2:])))
    assert found.by_line == (
        Change(50 * MIB, 60 * MIB, "activations", "layers.*.attention", edited),
    )


def test_other_lines_are_not_paired() -> None:
    """If more lines came than went, each is a change of its own."""
    added = [replace(ATTENTION, line=line, code=f"line {line}") for line in (31, 32)]
    uses = [replace(USAGE.uses[1], line=line, bytes=40 * MIB) for line in added]
    found = diff(USAGE, replace(USAGE, uses=(USAGE.uses[0], *uses, *USAGE.uses[2:])))
    assert [(each.before, each.after) for each in found.by_line] == [
        (0, 40 * MIB),
        (0, 40 * MIB),
        (50 * MIB, 0),
    ]


def test_unknown_parts_are_not_compared() -> None:
    """If it is unknown what used the memory in one of two runs, only peaks are compared."""
    found = diff(replace(USAGE, uses=()), USAGE)
    assert (found.by_component, found.peak_allocated) == ((), 0)


def test_condensed() -> None:
    """Small uses are added up per component, so that the file of a large model stays short."""
    small = tuple(Use("activations", 1000, f"layers.{index}") for index in range(500))
    condensed = replace(USAGE, uses=(*USAGE.uses, *small)).condensed()
    assert condensed.uses == merged((*USAGE.uses, Use("activations", 500_000)))
    assert condensed.by_component["activations"] == 79 * MIB + 500_000


def test_exceeds() -> None:
    """A growth counts if it is above the tolerance, not at it."""
    assert not exceeds(100, 102, 0.02)
    assert exceeds(100, 103, 0.02)
    assert not exceeds(100, 50, 0.0)
