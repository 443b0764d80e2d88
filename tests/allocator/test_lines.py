"""Lines that hold memory: complete sums, the user's own lines, and what grew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchmem.explain.call_stack import Frame
from torchmem.explain.lines import (
    MAX_CALLERS,
    MAX_DIVIDED,
    MAX_LINES,
    MAX_PARTS,
    LineUse,
    divided,
    grown,
    leaking_line,
    lines,
    uses_by_line,
)

TORCH = {"filename": "/v/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"}
frame = st.fixed_dictionaries(
    {
        "filename": st.sampled_from(["/home/ann/a.py", "/home/ann/b.py", TORCH["filename"]]),
        "line": st.integers(1, 9),
        "name": st.just("forward"),
    }
)
block = st.fixed_dictionaries(
    {
        "address": st.just(0),
        "size": st.integers(512, 1 << 30),
        "requested_size": st.just(0),
        "state": st.sampled_from(["active_allocated", "active_pending_free", "inactive"]),
    },
    optional={"frames": st.lists(frame, max_size=3)},
)
segment = st.fixed_dictionaries(
    {"device": st.integers(0, 1), "blocks": st.lists(block, max_size=9)}
)
snapshots: Any = st.lists(segment, max_size=9)


def _segments(*sizes: tuple[int, list[dict[str, object]] | None]) -> Any:
    blocks = [
        {"size": size, "state": "active_allocated"} | ({} if frames is None else {"frames": frames})
        for size, frames in sizes
    ]
    return [{"device": 0, "blocks": blocks}]


def _own(line: int, function: str = "forward") -> dict[str, object]:
    return {"filename": "/home/ann/model.py", "line": line, "name": function}


@given(snapshots)
def test_the_parts_add_up(segments: Any) -> None:
    """Named, other and unknown lines together hold exactly the bytes in use."""
    used = sum(
        block["size"]
        for segment in segments
        if segment["device"] == 0
        for block in segment["blocks"]
        if block["state"] != "inactive"
    )
    found = lines(segments, 0)

    if found is not None:
        named = [use.bytes for use in found.held]
        assert used == sum(named) + found.other_bytes + found.unknown_bytes
        assert named == sorted(named, reverse=True)
        assert 0 < len(named) <= MAX_LINES


@given(snapshots, snapshots)
def test_growth_is_the_difference(before: Any, after: Any) -> None:
    """A line that grew holds its growth more than before, and no line that shrank is named."""
    first, last = uses_by_line(before, 0), uses_by_line(after, 0)
    for use in grown(first, last):
        earlier = first[use.frame].bytes if use.frame in first else 0
        assert last[use.frame].bytes - earlier == use.bytes > 0


def test_the_line_is_the_users_own() -> None:
    """Of a stack, the innermost line outside of PyTorch counts, and else the innermost."""
    found = lines(_segments((5, [TORCH, _own(8), _own(60)]), (3, [TORCH]), (2, []), (1, None)), 0)

    assert found is not None
    assert [("/home/ann/model.py", 8, 5), (TORCH["filename"], 9, 3)] == [
        (use.frame.file, use.frame.line, use.bytes) for use in found.held
    ]
    assert found.unknown_bytes == 3


def test_nothing_without_stacks() -> None:
    """A snapshot without recorded stacks names no lines."""
    assert lines(_segments((5, []), (1, None)), 0) is None


def test_a_line_that_is_new_has_grown() -> None:
    """A line that held nothing before has grown by all that it holds."""
    before = uses_by_line(_segments((5, [_own(8)])), 0)
    after = uses_by_line(_segments((5, [_own(8)]), (7, [_own(9, "log")])), 0)

    (use,) = grown(before, after)
    assert (Frame("/home/ann/model.py", 9, "log"), 7, 1) == (use.frame, use.bytes, use.blocks)


@given(snapshots)
def test_parts_of_a_line_hold_no_more_than_the_line(segments: Any) -> None:
    """They are the largest first, and all of the line where they are few."""
    found = lines(segments, 0)
    if found is not None:
        for use in divided(found, segments, 0, lambda frames: str(len(frames))).held[:MAX_DIVIDED]:
            sizes = [part.bytes for part in use.parts]
            assert sizes == sorted(sizes, reverse=True)
            assert sum(sizes) <= use.bytes
            assert len(sizes) == MAX_PARTS or sum(sizes) == use.bytes


def test_a_line_is_divided_by_caller_and_module() -> None:
    """A helper's line is told apart by who called it; callers are the user's own, without loops."""
    helper, again = _own(5, "log"), _own(7, "again")
    encoder = [TORCH, helper, TORCH, _own(20, "encode"), again, again, _own(99, "main")]
    decoder = [TORCH, helper, _own(30, "decode"), _own(99, "main")]
    segments = _segments((6, encoder), (6, encoder), (4, decoder), (1, [TORCH]))
    found = lines(segments, 0)
    assert found is not None
    by_depth = {len(encoder): "encoder.*", len(decoder): "decoder"}
    use, foreign = divided(found, segments, 0, lambda frames: by_depth.get(len(frames))).held
    shown = [
        (part.bytes, part.blocks, part.module, [frame.line for frame in part.callers])
        for part in use.parts
    ]

    assert shown == [(12, 2, "encoder.*", [20, 7, 99]), (4, 1, "decoder", [30, 99])]
    assert len(use.parts[0].callers) == MAX_CALLERS
    assert [part.callers for part in foreign.parts] == [()]


def test_the_line_that_explains_a_growth() -> None:
    """It is named only if it has most of the growth in the steps between the two looks."""
    leak, other = Frame("/home/ann/a.py", 3, "log"), Frame("/home/ann/a.py", 9, "f")
    found = lines(_segments((5, [_own(1)])), 0)
    assert found is not None
    with_growth = replace(
        found, grown=(LineUse(leak, 80, 10), LineUse(other, 9, 1)), grown_steps=10
    )

    assert leak == leaking_line(with_growth, 8.0)
    assert [
        leaking_line(with_growth, 20.0),
        leaking_line(found, 8.0),
        leaking_line(None, 8.0),
    ] == [None] * 3


def test_a_line_that_reads_a_checkpoint_is_known() -> None:
    """It calls torch.load or safetensors, at any depth; other lines do not."""
    inner = {"filename": "/v/site-packages/torch/_utils.py", "line": 2, "name": "_rebuild"}
    load = {"filename": "/v/site-packages/torch/serialization.py", "line": 9, "name": "load"}
    segments = _segments((512, [inner, load, _own(3)]), (512, [TORCH, _own(4)]))
    found = lines(segments, 0)

    assert found
    assert {use.frame.line: use.loads for use in found.held} == {3: True, 4: False}
