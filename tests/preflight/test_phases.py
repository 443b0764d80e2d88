"""Phases and steps of a training loop, detected from PyTorch's hooks."""

from __future__ import annotations

from torchmem.preflight.child.phases import PhaseTracker, StepCounter
from torchmem.preflight.result import Phase


def test_a_step_has_its_phases_in_order() -> None:
    """Each phase is reported when it ends; the time before the first forward pass is setup."""
    ended: list[Phase] = []
    tracker = PhaseTracker(ended.append)
    tracker.forward()
    tracker.backward_begins()
    tracker.backward_ends()
    tracker.optimizer(has_closure=False)
    tracker.forward()
    assert ended == ["setup", "forward", "backward", "forward", "optimizer"]


def test_an_inner_backward_belongs_to_the_outer_one() -> None:
    """Recomputed activations and an optimizer step inside a backward pass count as backward."""
    ended: list[Phase] = []
    tracker = PhaseTracker(ended.append)
    tracker.backward_begins()
    tracker.backward_begins()
    tracker.optimizer(has_closure=False)
    tracker.backward_ends()
    assert tracker.in_backward
    tracker.backward_ends()
    assert ended == ["setup", "backward"]


def test_a_closure_runs_before_the_optimizer_phase() -> None:
    """With a closure, as in Lightning, the optimizer phase begins after the closure's backward."""
    ended: list[Phase] = []
    tracker = PhaseTracker(ended.append)
    tracker.forward()
    tracker.optimizer(has_closure=True)
    tracker.backward_begins()
    tracker.backward_ends()
    tracker.forward()
    tracker.backward_begins()
    assert ended == ["setup", "forward", "backward", "optimizer", "forward"]


def test_one_optimizer_steps_once_per_iteration() -> None:
    """With one optimizer, each of its steps completes an iteration."""
    counter = StepCounter(limit=2)
    counter.optimizer_stepped(7)
    assert (counter.count, counter.is_complete, counter.has_reached_limit) == (1, True, False)
    counter.optimizer_stepped(7)
    assert (counter.count, counter.is_complete, counter.has_reached_limit) == (2, True, True)


def test_two_optimizers_step_in_each_iteration() -> None:
    """An iteration of a GAN is complete when both of its optimizers have stepped."""
    counter = StepCounter(limit=2)
    for optimizer in (1, 2, 1):
        counter.optimizer_stepped(optimizer)
    assert (counter.count, counter.is_complete) == (2, False)
    counter.optimizer_stepped(2)
    assert (counter.count, counter.is_complete, counter.has_reached_limit) == (2, True, True)
