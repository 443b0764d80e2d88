"""What a script does beside training steps when a request fails, such as an evaluation.

A phase that the script names, a function with such a name, or modules in evaluation mode show it,
unless they are the same at the ends of steps.
"""

from __future__ import annotations

from collections.abc import Callable

from torchmem.allocator.backend import Modules
from torchmem.explain.activity import activities, activity
from torchmem.explain.call_stack import CallStack, Origin
from torchmem.sdk.part import Part
from torchmem.sdk.pytorch.call_stack import calling_stack
from torchmem.sdk.safety.errors import Stage

LOOKS = 3
"""Steps at whose ends functions and modules are looked up, to know those of training."""
MAX_MODULES = 1 << 14
"""With more modules, their mode is not looked up."""
EVALUATION = "evaluation"
"""The phase of a script that names none, while its modules are in evaluation mode."""


class Evaluation(Part):
    """Compares functions and modules with those at the ends of the first steps."""

    stage: Stage = "step"

    def __init__(
        self, modules: Modules | None, stack: Callable[[], CallStack] = calling_stack
    ) -> None:
        self._modules = modules
        self._stack = stack
        self._usual: set[str] = set()
        self._in_training: set[int] = set()
        self._looks = 0

    def after_read(self, step: int | None) -> None:
        """Note the functions and modules while the script trains."""
        if step is not None and self._looks < LOOKS:
            self._looks += 1
            self._usual.update(activities(self._stack()))
            self._in_training |= self._evaluating()

    def phase(self, origin: Origin | None) -> str | None:
        """Return what the script does beside training; None if it trains, or if it is unknown."""
        return activity(origin, self._usual) or (EVALUATION if self.is_on else None)

    @property
    def is_on(self) -> bool:
        """Whether modules are now in evaluation mode, but were not at the ends of steps."""
        return self._looks > 0 and bool(self._evaluating() - self._in_training)

    def _evaluating(self) -> set[int]:
        roots = self._modules.roots() if self._modules else []
        if len(roots) > MAX_MODULES:
            return set()
        modules = (reference() for reference in roots)
        return {id(module) for module in modules if module is not None and _is_evaluating(module)}


def _is_evaluating(module: object) -> bool:
    """Return whether a module's own `training` is False, past any `__getattr__` of the script."""
    return object.__getattribute__(module, "__dict__").get("training") is False
