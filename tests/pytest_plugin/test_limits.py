"""The limits of a test: what a marker may say, and what is too much."""

from __future__ import annotations

import pytest

from torchmem.allocator.sizes import GIB, MIB
from torchmem.compare.peak_memory import PeakMemory
from torchmem.pytest_plugin.limits import MemoryLimits
from torchmem.sample.errors import UsageError


def test_sizes_are_bytes_or_text() -> None:
    """A limit is a number of bytes or a size as text; one that is missing limits nothing."""
    limits = MemoryLimits.of({"peak": "6 GiB", "leak": 0, "gpu_model": "a100-40gb"})
    assert limits == MemoryLimits(peak=6 * GIB, leak=0, gpu_model="a100-40gb")


@pytest.mark.parametrize(
    ("keywords", "positional", "sentence"),
    [
        ({}, ("6 GiB",), 'only named limits: write @pytest.mark.gpu_memory(peak="6 GiB").'),
        ({"peek": 1}, (), "no limit 'peek': did you mean 'peak'?"),
        ({"peak": "lots"}, (), "gpu_memory(peak=...): 'lots' is not a size"),
        ({"peak": 1.5}, (), "gpu_memory(peak=1.5) is not a size: write it as '6 GiB'."),
        ({"leak": -1}, (), "gpu_memory(leak=-1) is not a size"),
        ({"rank": 8, "world_size": 8}, (), "no rank 8 of world_size=8"),
        ({"rank": 1}, (), "no rank 1 of world_size=None"),
    ],
)
def test_refused(
    keywords: dict[str, object], positional: tuple[object, ...], sentence: str
) -> None:
    """A marker that cannot be understood is refused in one sentence that says what to write."""
    with pytest.raises(UsageError) as caught:
        MemoryLimits.of(keywords, positional)
    assert sentence in str(caught.value)


def test_problems() -> None:
    """Each limit that is exceeded is a sentence; one that is met is none."""
    memory = PeakMemory(peak_allocated=7 * GIB, peak_reserved=8 * GIB, leaked=2 * MIB)
    assert list(MemoryLimits(peak=7 * GIB, reserved=8 * GIB, leak=2 * MIB).problems(memory)) == []
    assert list(MemoryLimits(peak=6 * GIB, leak=MIB).problems(memory)) == [
        "peak allocated 7.00 GiB, limit 6.00 GiB: 1.00 GiB too much.",
        "leaked 2.00 MiB, limit 1.00 MiB: 1.00 MiB too much.",
    ]
