"""Draw each new state on a terminal and follow the keys, for `torchmem top` and the demo."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from rich.console import ConsoleDimensions
from rich.live import Live

from torchmem.node.state import NodeState
from torchmem.top.asking import Newest
from torchmem.top.history import SeenHistory
from torchmem.top.screen import Screen, drawn, last_line
from torchmem.top.signs import only_ascii
from torchmem.top.view import RankKey, View, keys, press


class Viewer:
    """The screen on a terminal. `url` is shown, without credentials."""

    def __init__(self, live: Live, url: str) -> None:
        self._live, self._url = live, url
        self._is_ascii = only_ascii(live.console, os.environ)
        self._history, self._view = SeenHistory(), View()
        self._newest, self._screen = Newest(), Screen(None, url)
        self._shown: object = None

    @property
    def wanted(self) -> RankKey | None:
        """The rank that the screen shows in detail."""
        groups = self._view.groups(self._newest.node or NodeState())
        known = keys(groups)
        return known[self._view.position(groups)] if known else None

    def show(self, newest: Newest, status: str | None = None) -> None:
        """Draw what is new."""
        if newest.node and newest is not self._newest:
            self._history.add(newest.node)
        self._newest = newest
        seconds = int(time.monotonic() - newest.since) if newest.away else 0
        size = _size()
        state = (newest, self._view, size, seconds, status)
        if state != self._shown:
            self._shown = state
            if size:  # The variables COLUMNS and LINES, if they are set, keep the first size.
                self._live.console.size = ConsoleDimensions(*size)
            self._screen = self.screen(seconds, status)
            self._live.update(drawn(self._screen, self._live.console), refresh=True)

    def screen(self, seconds: int = 0, status: str | None = None) -> Screen:
        """Return what is to be drawn; the exporter has been away for `seconds`."""
        return Screen(
            self._newest.node,
            self._url,
            self._view,
            away=self._newest.away,
            is_silent=self._newest.is_silent,
            away_seconds=seconds,
            seen=self._newest.seen,
            status=status,
            answers=self._newest.answers,
            history=self._history,
            is_ascii=self._is_ascii,
        )

    def press(self, pressed: Iterable[str]) -> bool:
        """Follow keys. Return whether to go on."""
        for key in pressed:
            groups = self._view.groups(self._newest.node or NodeState())
            view = press(self._view, key, groups, last_line(self._screen, self._live.console))
            if view is None:
                return False
            self._view = view
        return True


def _size() -> os.terminal_size | None:
    """Return the size of the terminal; None if it is unknown: many a pseudo-terminal reports 0."""
    with suppress(OSError):
        size = os.get_terminal_size(sys.stdout.fileno())
        return size if min(size) > 0 else None
    return None
