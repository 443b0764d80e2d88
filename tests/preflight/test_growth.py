"""Growth from step to step: found where it is, and nowhere else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.sizes import GIB, MIB
from torchmem.preflight.result import StepMemory, growth

LONG = 20


def steps(allocated: list[int]) -> list[StepMemory]:
    return [StepMemory(number, size, size, size) for number, size in enumerate(allocated, 1)]


@given(st.integers(1, GIB), st.integers(8, 60))
def test_a_steady_leak_is_found_to_the_byte(leak: int, number: int) -> None:
    """So many bytes for each step, however few."""
    assert leak == growth(steps([GIB + step * leak for step in range(number)]))


@given(st.lists(st.integers(0, GIB), min_size=1, max_size=6))
def test_few_steps_tell_nothing(allocated: list[int]) -> None:
    """Unknown is not none."""
    assert growth(steps(allocated)) is None


@given(st.integers(0, LONG - 1), st.integers(1, GIB))
def test_what_is_made_once_is_no_growth(when: int, size: int) -> None:
    """As the optimizer's state is, in whichever step."""
    assert 0 == growth(steps([GIB + size * (step >= when) for step in range(LONG)]))


@given(
    st.lists(st.sampled_from([0, MIB]), min_size=12, max_size=60).filter(
        lambda sizes: len(sizes) % 2 == 0
    )
)
def test_what_comes_and_goes_is_no_growth(half: list[int]) -> None:
    """Batches of different length leave different tensors behind, and then fewer again."""
    assert 0 == growth(steps([0, *half, *reversed(half)]))


def test_what_shrinks_is_no_growth() -> None:
    """Memory that is given back is nobody's concern."""
    assert 0 == growth(steps([GIB - step * MIB for step in range(LONG)]))
