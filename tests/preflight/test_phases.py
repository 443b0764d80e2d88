"""The phases and steps of a training loop, told apart by PyTorch's hooks."""

from __future__ import annotations

from torchmem.preflight.child.phases import PhaseTracker, StepCounter
from torchmem.preflight.result import Phase


def test_one_step_has_its_phases_in_order() -> None:
    """Each phase is told when it ends: what came before the first forward is setup."""
    ended: list[Phase] = []
    clock = PhaseTracker(ended.append)
    clock.forward()
    clock.backward_begins()
    clock.backward_ends()
    clock.optimizer(has_closure=False)
    clock.forward()
    assert ended == ["setup", "forward", "backward", "forward", "optimizer"]


def test_a_backward_inside_a_backward_is_one() -> None:
    """Checkpointing recomputes inside the backward, and an optimizer may step there: all of it is backward."""
    ended: list[Phase] = []
    clock = PhaseTracker(ended.append)
    clock.backward_begins()
    clock.backward_begins()
    clock.optimizer(has_closure=False)
    clock.backward_ends()
    assert clock.in_backward
    clock.backward_ends()
    assert ended == ["setup", "backward"]


def test_forward_and_backward_inside_the_optimizer() -> None:
    """A step with a closure, as Lightning makes it, is in the optimizer only once the closure's backward is over."""
    ended: list[Phase] = []
    clock = PhaseTracker(ended.append)
    clock.forward()
    clock.optimizer(has_closure=True)
    clock.backward_begins()
    clock.backward_ends()
    clock.forward()
    clock.backward_begins()
    assert ended == ["setup", "forward", "backward", "optimizer", "forward"]


def test_one_optimizer_steps_once_an_iteration() -> None:
    """With one optimizer each of its steps is one iteration, complete at once."""
    counter = StepCounter(wanted=2)
    counter.stepped(7)
    assert (counter.count, counter.is_complete, counter.is_over) == (1, True, False)
    counter.stepped(7)
    assert (counter.count, counter.is_complete, counter.is_over) == (2, True, True)


def test_two_optimizers_step_in_each_iteration() -> None:
    """The last iteration of a GAN is over when both its optimizers have stepped in it."""
    counter = StepCounter(wanted=2)
    for optimizer in (1, 2, 1):
        counter.stepped(optimizer)
    assert (counter.count, counter.is_complete) == (2, False)
    counter.stepped(2)
    assert (counter.count, counter.is_complete, counter.is_over) == (2, True, True)
