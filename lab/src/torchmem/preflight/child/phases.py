"""Detects training steps, and their phases, from PyTorch's hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchmem.preflight.result import Phase
from torchmem.sdk.steps import Iterations


class StepCounter:
    """Counts training iterations, with one optimizer or several.

    `torchmem.sdk.steps.Iterations` defines what an iteration is with several optimizers.
    """

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit
        self._iterations = Iterations()
        self._known: set[int] = set()
        self._stepped: set[int] = set()

    def optimizer_stepped(self, optimizer: object) -> None:
        """Count a step of this optimizer."""
        begun = self._iterations.begun(optimizer)
        if begun:
            self.count += begun
            self._stepped = set()
        self._stepped.add(id(optimizer))
        self._known.add(id(optimizer))

    def step_called(self) -> None:
        """Count a step that the script itself reports."""
        self.count += 1

    @property
    def is_complete(self) -> bool:
        """Whether every optimizer seen so far has stepped in this iteration."""
        return self._stepped == self._known

    @property
    def has_reached_limit(self) -> bool:
        """Whether the requested number of iterations has begun."""
        return self.count >= self._limit


class PhaseTracker:
    """Tracks the current phase of a training step.

    A backward pass inside another one (checkpointing) and an optimizer step inside a backward pass
    (fused into it) belong to the outer backward pass.
    """

    def __init__(self, on_end: Callable[[Phase], None]) -> None:
        """`on_end` is called with the phase that ends whenever a phase begins."""
        self.phase: Phase = "setup"
        self._on_end = on_end
        self._depth = 0
        self._updates_after_backward = False
        self._lock = threading.Lock()

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running."""
        return self._depth > 0

    def forward(self) -> None:
        """Begin a forward pass: a module is called for the first time, or a step has ended."""
        self._updates_after_backward = False
        self._begin("forward")

    def backward_begins(self) -> None:
        """Begin a backward pass, which may be an inner one."""
        with self._lock:
            self._depth += 1
            outermost = self._depth == 1
        if outermost:
            self._begin("backward")

    def backward_ends(self) -> None:
        """End a backward pass, which may be an inner one."""
        with self._lock:
            self._depth -= 1
            outermost = self._depth == 0
        if outermost:
            self._begin("optimizer" if self._updates_after_backward else "forward")

    def optimizer(self, has_closure: bool) -> None:
        """Begin an optimizer step. A closure, as in Lightning, first runs forward and backward."""
        self._updates_after_backward = has_closure
        if not self._depth and not has_closure:
            self._begin("optimizer")

    def _begin(self, phase: Phase) -> None:
        ended, self.phase = self.phase, phase
        self._on_end(ended)
