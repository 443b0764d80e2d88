"""Lines that hold memory: complete sums, the user's own lines, and what grew."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.call_stack import Frame
from torchmem.allocator.lines import MAX_LINES, grown, lines, uses_by_line

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
    assert 3 == found.unknown_bytes


def test_nothing_without_stacks() -> None:
    """A snapshot without recorded stacks names no lines."""
    assert lines(_segments((5, []), (1, None)), 0) is None


def test_a_line_that_is_new_has_grown() -> None:
    """A line that held nothing before has grown by all that it holds."""
    before = uses_by_line(_segments((5, [_own(8)])), 0)
    after = uses_by_line(_segments((5, [_own(8)]), (7, [_own(9, "log")])), 0)

    (use,) = grown(before, after)
    assert (Frame("/home/ann/model.py", 9, "log"), 7, 1) == (use.frame, use.bytes, use.blocks)
