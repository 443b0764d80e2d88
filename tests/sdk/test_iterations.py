"""Passes of a loop that a training framework or a server marks."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from torchmem.sample.sample import Process, Sample, Steps, live_state
from torchmem.sdk import batch_size
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]
PROCESS = Process(1, None, None, "node", "run", 0)


def tensor(*shape: int) -> Any:
    """Return something with a shape."""
    return SimpleNamespace(shape=shape)


def test_batches_count_samples_and_leave_steps_to_the_optimizer(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """Each batch adds its samples, also one that `break` ends; only an optimizer makes a step."""
    session = open_session(backend)
    for index, _ in enumerate(session.batches([tensor(4, 2), tensor(3, 2), tensor(9)])):
        if index == 1:
            backend.step()
            break
    for _ in session.batches([tensor(5)], "evaluate"):
        pass
    session.close()

    steps = published()[0]["steps"]
    assert (steps["count"], steps["samples"]) == (1, 7)


def test_a_batch_that_failed_was_not_consumed(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """The script's exception passes, and the samples of its pass do not count."""
    session = open_session(backend)
    with session.iteration(samples=2):
        backend.step()
    with pytest.raises(ValueError, match="mine"), session.iteration(samples=3):
        raise ValueError("mine")
    session.close()

    assert published()[0]["steps"]["samples"] == 2


@pytest.mark.parametrize("case", [(True, 3, 1), (True, 0, 1), (False, 0, 0)], ids=str)
def test_a_framework_says_whether_it_made_a_step(
    case: tuple[bool, int, int],
    backend: SimulatedBackend,
    open_session: Opener,
    published: Published,
) -> None:
    """However often it calls an optimizer that the SDK sees, a step counts once."""
    made, seen, counted = case
    session = open_session(backend)
    for _ in range(2):
        with session.iteration(made_step=lambda: made):
            for _ in range(seen):
                backend.step(optimizer=1)
    backend.step(optimizer=1)
    session.close()

    assert 2 * counted + 1 == published()[0]["steps"]["count"]


def test_a_pass_that_nothing_ended_is_forgotten_with_its_callback(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """After a training that failed, another loop in the same process counts all its steps."""
    session = open_session(backend)
    left = session.iteration(made_step=lambda: True).begin()
    for _ in range(3):
        backend.step()
    del left
    gc.collect()
    for _ in range(3):
        backend.step()
    session.close()

    assert published()[0]["steps"]["count"] == 1 + 3


def test_steps_by_hand_are_not_counted_again(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """Once the script calls `session.step()`, a framework's steps do not count either."""
    session = open_session(backend)
    for _ in range(3):
        with session.iteration(made_step=lambda: True):
            session.step()
    session.close()

    assert published()[0]["steps"]["count"] == 3


def test_an_error_of_the_framework_is_counted(
    backend: SimulatedBackend, open_session: Opener
) -> None:
    """What the framework's answer raises does not reach the script."""
    session = open_session(backend)
    with session.iteration(made_step=lambda: bool(1 / 0)):
        pass

    assert session.errors.counts["step"] == 1


def test_evaluation_is_progress() -> None:
    """A process whose last step is long ago is not stalled while other passes go on."""
    steps = Steps(1, last_timestamp=100.0, progress_timestamp=900.0)
    sample = Sample(1000.0, PROCESS, steps=steps, stall_after_seconds=300.0)

    assert (live_state(sample, 1000.0), live_state(sample, 1201.0)) == ("running", "stalled")


def test_allocations_between_steps_are_progress(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """A rank that evaluates in a loop of its own goes on; one that only waits does not."""
    open_session(backend, interval=0.01, idle_after=0.01)
    backend.step()

    def steps_after_a_read() -> dict[str, Any] | None:
        [sample] = published() or [{}]
        times = [device["stats_timestamp"] or 0 for device in sample.get("devices", [])]
        steps: dict[str, Any] = sample.get("steps", {})
        return steps if max(times, default=0) > (steps.get("last_timestamp") or math.inf) else None

    waiting = until(steps_after_a_read)
    assert waiting["progress_timestamp"] is None
    allocator.free(allocator.malloc(1 << 20))
    until(lambda: published()[0]["steps"]["progress_timestamp"])


@pytest.mark.parametrize(("at_work", "limit"), [(True, 300.0), (False, None)])
def test_a_server_without_requests_is_not_stalled(
    at_work: bool,
    limit: float | None,
    backend: SimulatedBackend,
    open_session: Opener,
    published: Published,
) -> None:
    """While a request is handled a time limit applies; until the next one comes, none does."""
    session = open_session(backend)
    with session.request():
        pass
    request = session.request(requests=4).begin()
    if not at_work:
        request.end()
    session.close()

    [sample] = published()
    assert limit == sample["stall_after_seconds"]
    assert ((1, 1) if at_work else (2, 5)) == (
        sample["steps"]["count"],
        sample["steps"]["samples"],
    )


@pytest.mark.parametrize(("setting", "expected"), [(None, "new"), ("old", "old")])
def test_a_run_is_renamed_unless_it_has_a_name(
    setting: str | None,
    expected: str,
    backend: SimulatedBackend,
    open_session: Opener,
    published: Published,
) -> None:
    """The framework's name replaces the script's, and never the one that the user has set."""
    session = open_session(backend, run=setting)
    backend.step()
    session.rename("new")
    session.close()

    assert published()[0]["process"]["run"] == expected
    assert f"run '{expected}'" in repr(session)


shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda shape: tensor(*shape))
plain = st.one_of(st.none(), st.integers(), st.text(), st.just(tensor()))


@given(shapes, st.lists(plain, max_size=3), st.sampled_from(["dict", "tuple", "list", "nested"]))
def test_the_first_tensor_has_the_size_of_the_batch(
    first: Any, before: list[Any], kind: str
) -> None:
    """Whatever a collate function returns, the first tensor with a dimension counts."""
    members = [*before, first, tensor(77)]
    batch: Any = {
        "dict": dict(enumerate(members)),
        "tuple": tuple(members),
        "list": members,
        "nested": {"inputs": [tuple(members)]},
    }[kind]

    assert first.shape[0] == batch_size(batch)
    assert batch_size(before) is None
