"""Signals that wait until something is done that must not be left half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Postponed:
    """`with Postponed() as signals:` the first signal that asks for the end has its effect after the block.

    Only signals that have a handler in Python, as only these leave the process alive; in other threads than the main
    one, where no handler runs, nothing is changed.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
            for number in self._handlers:
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal gave
        if self.came:
            signal.raise_signal(self.came[0])

    def _note(self, number: int, _: FrameType | None) -> None:
        self.came.append(number)
