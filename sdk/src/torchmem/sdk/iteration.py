"""One pass of a loop, as a training framework or a server reports it, and the size of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchmem.sdk.reading.peaks import Phase

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_NESTING = 4
MAX_MEMBERS = 16


class Iteration:
    """One `with session.iteration():`. Lets the script's exceptions pass and raises none.

    `begin` and `end` are for callbacks. With `made_step`, which is called at the end, at most one
    step counts. `waits`: afterwards the process waits for work.
    """

    def __init__(
        self,
        phase: Phase,
        on_begin: Callable[[Iteration], None],
        on_end: Callable[[Iteration, int | None], None],
    ) -> None:
        self.samples: int | None = None
        self.made_step: Callable[[], bool] | None = None
        self.waits = False
        self.has_counted = False
        self._phase = phase
        self._on_begin = on_begin
        self._on_end = on_end
        self._is_open = False

    def begin(self) -> Self:
        """Enter the phase."""
        if not self._is_open:
            self._is_open = True
            self._on_begin(self)
            self._phase.__enter__()
        return self

    def end(self, samples: int | None = None) -> None:
        """Leave the phase and count `samples`, or the samples given before. Only once."""
        if self._is_open:
            self._is_open = False
            self._phase.__exit__(None, None, None)
            self._on_end(self, self.samples if samples is None else samples)

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the pass. If it failed, it consumed no samples; after a `break`, it did."""
        self.end(None if error is None or isinstance(error, GeneratorExit) else 0)


def batch_size(batch: Any) -> int | None:
    """Return the length of the first dimension of the first tensor in a batch.

    Looks into mappings, tuples and lists. None if there is no tensor, or only scalars.
    """
    shape = batch_shape(batch)
    return shape[0] if shape else None


def batch_shape(batch: Any, nesting: int = MAX_NESTING) -> tuple[int, ...] | None:
    """Return the shape of the first tensor in a batch, as `batch_size` finds it."""
    shape = getattr(batch, "shape", None)
    if isinstance(shape, Sequence):
        return tuple(map(int, shape)) or None
    if nesting == 0 or not isinstance(batch, Mapping | tuple | list):
        return None
    members = batch.values() if isinstance(batch, Mapping) else batch
    shapes = (batch_shape(member, nesting - 1) for member in islice(members, MAX_MEMBERS))
    return next((shape for shape in shapes if shape is not None), None)
