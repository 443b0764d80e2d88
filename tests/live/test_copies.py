"""Facts that the page repeats, because it cannot import them."""

from __future__ import annotations

from importlib import resources

import pytest

from torchmem.allocator import sizes

STATIC = resources.files("torchmem.exporter.live") / "static"


@pytest.mark.parametrize(
    ("file", "name", "size"),
    [
        ("recording.js", "SMALL_SEGMENT", sizes.SMALL_BUFFER),
        ("recording.js", "LARGE_PAGE", sizes.LARGE_BUFFER),
        ("memory_layout.js", "SMALL_PAGE", sizes.SMALL_BUFFER),
    ],
)
def test_the_page_has_the_allocators_sizes(file: str, name: str, size: int) -> None:
    """The page reads snapshots with the sizes of segments in allocator/sizes.py."""
    source = (STATIC / file).read_text("utf-8")
    assert f"const {name} = {size // sizes.MIB} * MIB;" in source
    assert "const MIB = 2 ** 20;" in source
