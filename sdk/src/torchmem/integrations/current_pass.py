"""Code that the callbacks share: the open pass, and handling of their own errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torchmem.sdk import Iteration, Session


class Monitored(Protocol):
    """A callback with a session."""

    session: Session


def harmless(event: Callable[..., None]) -> Callable[..., None]:
    """Make a method of a callback count its errors in `torchmem_sdk_errors_total` and return None.

    Exceptions that the user's signal handlers raise in it pass through.
    """

    @functools.wraps(event)
    def wrapper(self: Monitored, *arguments: Any, **keywords: Any) -> None:
        with self.session.errors.suppress("step"):
            event(self, *arguments, **keywords)

    return wrapper


class CurrentPass:
    """The pass of the loop that a callback has started but not ended.

    A callback gets no event when the training fails, so the next `begin` ends an open pass.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._iteration: Iteration | None = None
        self._stepped = False

    def begin(self, phase: str) -> None:
        """Begin a pass in which at most one step counts."""
        self.end(samples=0)
        iteration = self._session.iteration(phase, made_step=lambda: self._stepped)
        self._iteration = iteration.begin()

    def end(self, samples: int | None = None, *, stepped: bool = False) -> None:
        """End the pass, if there is one, in which the framework may have made a step."""
        iteration, self._iteration = self._iteration, None
        self._stepped = stepped
        if iteration is not None:
            iteration.end(samples)
