"""Whether a script evaluates, by its functions and the mode of its modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest

from torchmem.explain.call_stack import CallStack, Frame, Origin
from torchmem.sdk.reading.evaluation import Evaluation


class Module:
    """A module that must not be asked for anything but its own dict."""

    def __init__(self, *, training: bool) -> None:
        self.__dict__["training"] = training

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@dataclass
class Script:
    """The modules of a script."""

    modules: list[Module]
    version: int = 0

    def roots(self) -> list[ref[Any]]:
        """Return all modules."""
        return [ref(module) for module in self.modules]

    def submodules(self, module: object) -> list[ref[Any]]:
        """Return none."""
        return []

    def named_submodules(self, module: object) -> list[tuple[str, ref[Any]]]:
        """Return none."""
        return []

    def parameters(self, module: object) -> list[Any]:
        """Return none."""
        return []


def _evaluate(script: Script) -> None:
    script.modules[0].__dict__["training"] = False


def _train(script: Script) -> None:
    del script.modules[1]


@pytest.mark.parametrize(("act", "expected"), [(_evaluate, True), (_train, False)])
def test_a_frozen_module_does_not_count(act: Callable[[Script], None], *, expected: bool) -> None:
    """Only a module that trained at a step's end shows that the script evaluates now."""
    script = Script([Module(training=True), Module(training=False)])
    mode = Evaluation(script)
    mode.after_read(1)
    assert not mode.is_on

    act(script)
    assert mode.is_on == expected


def test_a_function_in_which_steps_end_is_no_evaluation() -> None:
    """A name like that of an evaluation counts only where no steps end in the function."""
    train, evaluate = Frame("t.py", 5, "test_training"), Frame("t.py", 9, "evaluate")
    evaluation = Evaluation(None, lambda: CallStack((train,)))
    evaluation.after_read(1)

    assert evaluation.phase(Origin(CallStack((train,)))) is None
    assert evaluation.phase(Origin(CallStack((evaluate, train)))) == "evaluate()"
    assert evaluation.phase(Origin(CallStack((train,)), phase="rollout")) == "rollout"


def test_before_the_first_step_it_is_unknown() -> None:
    """Without a step's end to compare with, no evaluation is claimed."""
    assert not Evaluation(Script([Module(training=False)])).is_on
    assert not Evaluation(None).is_on
