"""The memory map beside a report: read with suspicion, and thinned to the room that a page has."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.maps import FREE, USED, device_of, full_map
from support.snapshots import segment

from torchmem.allocator.sizes import MIB
from torchmem.pages.memory_map import MIN_BLOCKS, drawn, read
from torchmem.sample.memory_map import MAX_JSON_BYTES, encode


def document() -> dict[str, Any]:
    """Return a valid map as JSON."""
    found: dict[str, Any] = json.loads(gzip.decompress(encode(full_map())))
    return found


def changed(**changes: Any) -> bytes:
    """Return the file of a map whose first segment has changes."""
    content = document()
    content["devices"][0]["segments"][0] |= changes
    return gzip.compress(json.dumps(content).encode())


def test_the_map_is_the_one_that_was_written(tmp_path: Path) -> None:
    """What the SDK publishes is read as it was, except for the order of equal segments."""
    path = tmp_path / "map"
    path.write_bytes(encode(full_map()))

    assert full_map() == read(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        gzip.compress(b"{}"),
        gzip.compress(b"[" * 100_000),
        gzip.compress(b" " * (MAX_JSON_BYTES + 1)),
        encode(full_map())[:-9],
        gzip.compress(json.dumps(document() | {"schema": 9}).encode()),
        gzip.compress(json.dumps(document() | {"timestamp": float("nan")}).encode()),
        changed(sizes=[1]),
        changed(states="axp"),
        changed(sizes=[1, -2, 3]),
        changed(sizes=[1 << 60, 1, 1]),
        changed(sizes=[True, 1, 1]),
        changed(address=-1),
        changed(address=1 << 60),
        changed(pool="<b>"),
        changed(pool_id=[0, 0, 0]),
    ],
    ids=range(17),
)
def test_a_map_that_cannot_be_used_is_none(tmp_path: Path, content: bytes) -> None:
    """Damage, bombs and impossible numbers cost the map, and nothing else."""
    path = tmp_path / "map"
    path.write_bytes(content)

    assert read(path) is None


def test_no_map_is_none(tmp_path: Path) -> None:
    """Most processes leave no map, and a directory is none."""
    assert (read(tmp_path / "map"), read(tmp_path)) == (None, None)


def test_a_large_map_is_thinned() -> None:
    """It fits the room, and the bytes of each state stay the same until too little is left."""
    blocks = [(64 << 10, USED if number % 3 else FREE) for number in range(320)]
    mapped = device_of([segment(number << 40, "large", blocks) for number in range(1, 200)])
    whole = drawn(mapped, 10 * MIB)
    thinned = drawn(mapped, 100_000)

    assert whole is not None
    assert thinned is not None
    assert len(json.dumps(thinned, separators=(",", ":"))) <= 100_000
    assert 0 == thinned["omitted_bytes"] < thinned["merged_blocks"]
    assert sums(whole) == sums(thinned)
    assert drawn(mapped, 10 * MIN_BLOCKS) is None


def sums(found: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of each state in a map."""
    totals: dict[str, int] = {}
    for item in found["segments"]:
        for size, state in zip(item["sizes"], item["states"], strict=True):
            totals[state.lower()] = totals.get(state.lower(), 0) + size
    return totals
