"""Which phase of a training step the process is in."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchmem.preflight.outcome import Phase


class PhaseClock:
    """Told by the hooks of PyTorch; calls `turn` with the phase that ends whenever another one begins.

    A backward inside a backward (checkpointing) and an optimizer inside one (fused into it) belong to the outer one.
    """

    def __init__(self, turn: Callable[[Phase], None]) -> None:
        self.now: Phase = "setup"
        self._turn = turn
        self._depth = 0
        self._updates_after_backward = False
        self._lock = threading.Lock()

    @property
    def in_backward(self) -> bool:
        """Whether a backward is going on."""
        return self._depth > 0

    def forward(self) -> None:
        """A module is called for the first time, or a step is over."""
        self._updates_after_backward = False
        self._go("forward")

    def backward_begins(self) -> None:
        """Called for inner ones too."""
        with self._lock:
            self._depth += 1
            outermost = self._depth == 1
        if outermost:
            self._go("backward")

    def backward_ends(self) -> None:
        """Called for inner ones too."""
        with self._lock:
            self._depth -= 1
            outermost = self._depth == 0
        if outermost:
            self._go("optimizer" if self._updates_after_backward else "forward")

    def optimizer(self, has_closure: bool) -> None:
        """An optimizer begins to step; with a closure it runs forward and backward first, as Lightning has it."""
        self._updates_after_backward = has_closure
        if not self._depth and not has_closure:
            self._go("optimizer")

    def _go(self, phase: Phase) -> None:
        ended, self.now = self.now, phase
        self._turn(ended)
