"""When the steps that were asked for are over, with one optimizer or several."""

from __future__ import annotations

from torchmem.sdk._steps import Iterations


class StepCounter:
    """Counts training iterations; see `torchmem.sdk._steps.Iterations` for what is one with several optimizers."""

    def __init__(self, wanted: int) -> None:
        self.count = 0
        self._wanted = wanted
        self._iterations = Iterations()
        self._all: set[int] = set()
        self._this: set[int] = set()

    def stepped(self, optimizer: int) -> None:
        """An optimizer, named by a number, has stepped."""
        if self._iterations.begins(optimizer):
            self.count += 1
            self._this = set()
        self._this.add(optimizer)
        self._all.add(optimizer)

    def called(self) -> None:
        """The script itself says that a step is over."""
        self.count += 1

    @property
    def is_complete(self) -> bool:
        """Whether every optimizer seen so far has stepped in this iteration."""
        return self._this == self._all

    @property
    def is_over(self) -> bool:
        """Whether as many iterations as wanted have begun."""
        return self.count >= self._wanted
