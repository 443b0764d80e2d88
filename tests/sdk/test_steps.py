"""What counts as a step, and the peaks of steps and phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.sdk.pytorch.user_peaks import UserPeaks
from torchmem.sdk.reading.peaks import WindowPeak
from torchmem.sdk.session import Session
from torchmem.sdk.steps import Iterations
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]


class Optimizer:
    """Something that steps, and that can be forgotten."""


def _iterations(order: str) -> int:
    """Return the iterations in these steps; each letter is an optimizer that stays alive."""
    counter, optimizers = Iterations(), {letter: Optimizer() for letter in order}
    return sum(counter.begun(optimizers[letter]) for letter in order)


@given(st.integers(1, 20), st.integers(1, 20))
def test_optimizers_that_take_turns_count_one_iteration_together(
    optimizers: int, iterations: int
) -> None:
    """However many optimizers step once per iteration, the iterations are counted."""
    turns = "".join(map(chr, range(97, 97 + optimizers)))

    assert iterations == _iterations(turns * iterations)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=9))
def test_phases_with_an_optimizer_each_lose_no_step(lengths: list[int]) -> None:
    """Optimizers that are kept, and step twice or more one after the other, count all steps."""
    phases = "".join(chr(97 + index) * length for index, length in enumerate(lengths))

    assert sum(lengths) == _iterations(phases)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_a_new_optimizer_takes_over(lengths: list[int]) -> None:
    """After the previous optimizer is gone, the first step of a new one counts."""
    counter, begun = Iterations(), 0
    for length in lengths:
        optimizer = Optimizer()
        begun += sum(counter.begun(optimizer) for _ in range(length))

    assert sum(lengths) == begun


@pytest.mark.parametrize(
    ("order", "iterations"),
    [("dddddg" * 4, 20), ("gddddd" * 4, 20), ("dgg" * 4, 8), ("ddg" * 4, 8), ("aaabbbaaa", 9)],
)
def test_optimizers_with_different_numbers_of_steps(order: str, iterations: int) -> None:
    """In an uneven loop the optimizer that steps most often counts, as in a Wasserstein GAN."""
    assert iterations == _iterations(order)


def test_an_optimizer_that_joins_a_loop_adds_no_step() -> None:
    """A second optimizer that steps from the third iteration on does not count by itself."""
    assert _iterations("aa" + "ab" * 3) == 5


def test_phases_are_counted_with_their_times(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """The step that shows only later that it began an iteration has its duration, too."""
    session = open_session(backend)
    for optimizer in (1, 2, 3):
        for _ in range(4):
            backend.step(optimizer=optimizer)
    session.close()

    steps = published()[0]["steps"]
    assert (steps["count"], sum(steps["duration_counts"])) == (12, 11)


def test_a_gan_steps_once_an_iteration(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """Two optimizers that take turns show one step per iteration of the loop."""
    session = open_session(backend)
    for _ in range(5):
        backend.step(optimizer=1)
        backend.step(optimizer=2)
    session.close()

    assert published()[0]["steps"]["count"] == 5


@given(
    st.integers(50, 150),
    st.lists(st.tuples(st.integers(0, 200), st.booleans(), st.booleans()), min_size=1, max_size=20),
)
def test_a_window_peak_is_never_above_the_truth(
    peak: int, moves: list[tuple[int, bool, bool]]
) -> None:
    """Despite resets and rare reads, the value was reached; it is exact if the peak rose."""
    start, truth, resets = peak, 50, False
    window = WindowPeak(50, peak)
    for level, reset, look in moves:
        truth, resets = max(truth, level), resets or reset
        peak = level if reset else max(peak, level)
        if look:
            window.update(level, peak)
    window.update(level, peak)

    assert 50 <= window.highest <= truth
    if not resets and peak > start:
        assert truth == window.highest


def test_a_phase_shows_its_own_peak(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """Each phase has its own highest allocated bytes."""
    session = open_session(backend, interval=1e-9)
    backend.step()
    with session.phase("forward"):
        allocator.free(allocator.malloc(300 * MIB))
    kept = allocator.malloc(100 * MIB)
    with session.phase("backward"):
        allocator.free(kept)
    session.close()

    assert published()[0]["devices"][0]["phase_peaks"] == {
        "forward": 300 * MIB,
        "backward": 100 * MIB,
    }


def test_reset_peaks_makes_a_later_lower_phase_exact(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """With `reset_peaks` lower and nested phases are exact too, and the high-water mark stays."""
    session = open_session(backend, interval=1e-9, reset_peaks=True)
    allocator.free(allocator.malloc(500 * MIB))
    backend.step()
    with session.phase("outer"):
        allocator.free(allocator.malloc(200 * MIB))
        with session.phase("inner"):
            allocator.free(allocator.malloc(100 * MIB))
    session.close()

    (device,) = published()[0]["devices"]
    assert device["phase_peaks"] == {"outer": 200 * MIB, "inner": 100 * MIB}
    assert device["allocator"]["allocated_peak_bytes"] == 500 * MIB


def test_phases_before_cuda_and_too_many_of_them_do_nothing(
    allocator: DeviceCachingAllocator, open_session: Opener, published: Published
) -> None:
    """A phase before CUDA is up is not measured, nor is a 33rd name, and nothing is raised."""
    backend = SimulatedBackend([allocator], initialized=False)
    session = open_session(backend, interval=1e-9)
    with session.phase("early"):
        pass
    backend.init()
    backend.step()
    for number in range(40):
        with session.phase(f"phase {number}"):
            pass

    session.close()

    (device,) = published()[0]["devices"]
    assert len(device["phase_peaks"]) == 32
    assert sum(session.errors.counts.values()) == 0


class Memory:
    """A fake of torch.cuda.memory: one device with a current value and a peak."""

    def __init__(self) -> None:
        self.current = self.peak = 0
        self.memory_stats_as_nested_dict: Callable[..., dict[str, Any]] = self._stats
        self.reset_peak_memory_stats: Callable[..., None] = self._reset

    def _stats(self, device: Any = None) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.current, "peak": self.peak}},
            "num_ooms": 0,
        }

    def _reset(self, device: Any = None) -> None:
        self.peak = self.current

    def allocate(self, level: int) -> None:
        self.current = level
        self.peak = max(self.peak, level)


class FlatMemory:
    """`torch.accelerator.memory`, which reads the same statistics in a flattened form."""

    def __init__(self, memory: Memory) -> None:
        self.memory_stats: Callable[..., dict[str, Any]] = lambda device=None: {
            "allocated_bytes.all.current": memory.current,
            "allocated_bytes.all.peak": memory.peak,
            "num_ooms": 0,
        }
        self.reset_peak_memory_stats: Callable[..., None] = memory.reset_peak_memory_stats


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "user resets", "flat resets", "sdk resets"]),
            st.integers(0, 100),
        ),
        max_size=30,
    )
)
def test_resets_are_invisible_to_users(events: list[tuple[str, int]]) -> None:
    """In any order of allocations and resets, users read the peak they would read without us."""
    watched, alone = Memory(), Memory()
    flat = FlatMemory(watched)
    peaks = UserPeaks((watched,), lambda device: 0, (flat,))
    for event, level in events:
        if event == "allocate":
            watched.allocate(level)
            alone.allocate(level)
        elif event == "flat resets":
            flat.reset_peak_memory_stats()
            alone.reset_peak_memory_stats()
        elif event == "user resets":
            watched.reset_peak_memory_stats()
            alone.reset_peak_memory_stats()
        else:
            peaks.reset(0)
        assert alone.memory_stats_as_nested_dict() == watched.memory_stats_as_nested_dict()
        assert flat.memory_stats()["allocated_bytes.all.peak"] == alone.peak


def test_every_step_of_a_fast_loop_counts(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """Most steps end without a read; all count, each with its duration."""
    session = open_session(backend, interval=3600.0)
    for _ in range(1234):
        session.step()
    session.close()

    (sample,) = published()
    assert sample["steps"]["count"] == 1234
    assert sum(sample["steps"]["duration_counts"]) == 1233


def test_a_step_after_an_oom_ends_it(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend, open_session: Opener
) -> None:
    """A caught OOM is no longer pending after the next step, which reads nothing."""
    session = open_session(backend, interval=3600.0)
    for _ in range(200):
        session.step()
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(1 << 50)
    pending = session.newest and session.newest.oom_pending
    session.step()
    session.close()

    assert pending is True
    assert session.newest
    assert session.newest.oom_pending is False
