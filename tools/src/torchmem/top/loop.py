"""Ask the exporter again and again, draw its answers, and follow the keys."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from torchmem.cli.http import exporter_url, without_credentials
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.top.keyboard import Keyboard, keyboard
from torchmem.top.node import AwayError, Node, ask
from torchmem.top.screen import Screen, drawn, page
from torchmem.top.view import View, press

MIN_INTERVAL_SECONDS = 0.2
MAX_INTERVAL_SECONDS = 3600.0
KEY_SECONDS = 0.2
"""How long to wait for a key before looking for a new state or another size of the terminal."""
START = "Start it: `torchmem exporter`."


def run(arguments: argparse.Namespace) -> int:
    """Show the node until the user ends it. Raise UsageError, or TorchmemError with --once."""
    url, interval = exporter_url(arguments.url), arguments.interval
    if not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        bounds = f"{MIN_INTERVAL_SECONDS:g} and {MAX_INTERVAL_SECONDS:g}"
        raise UsageError(f"--interval must be between {bounds} seconds, not {interval:g}.")
    console = Console(highlight=False, markup=False, emoji=False)
    is_interactive = console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()
    if arguments.once or not is_interactive:
        _print(console, url)
    else:
        _follow(console, url, interval)
    return 0


def _print(console: Console, url: str) -> None:
    try:
        node = ask(url)
    except AwayError as error:
        raise TorchmemError(f"{without_credentials(url)} {error}. {START}") from None
    console.print(page(Screen(node, without_credentials(url)), console), end="")


@dataclass(frozen=True, slots=True, eq=False)
class Newest:
    """The newest answer. `away`: why the exporter has not answered since `since` (monotonic)."""

    node: Node | None = None
    away: str | None = None
    since: float = math.inf


class Asking:
    """Asks for the state in a daemon thread, so that keys work while the exporter does not."""

    def __init__(self, url: str, interval: float) -> None:
        self._url, self._interval = url, interval
        self.newest = Newest()
        threading.Thread(target=self._run, name="torchmem-top", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.newest = Newest(ask(self._url))
            except AwayError as error:
                since = min(self.newest.since, time.monotonic())
                self.newest = Newest(self.newest.node, str(error), since)
            time.sleep(self._interval)


def _follow(console: Console, url: str, interval: float) -> None:
    asking = Asking(url, interval)
    try:
        with (
            _interrupted_by(signal.SIGTERM, signal.SIGHUP),
            keyboard(sys.stdin.fileno()) as keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            _until_ended(asking, keys, live, without_credentials(url))
    except (KeyboardInterrupt, EOFError, OSError):
        pass  # EOFError and OSError: the terminal is gone


def _until_ended(asking: Asking, keys: Keyboard, live: Live, url: str) -> None:
    """Draw what is new, and follow the keys until one of them ends it."""
    view: View | None = View()
    shown: object = None
    while view is not None:
        newest = asking.newest
        seconds = int(time.monotonic() - newest.since) if newest.away else 0
        size = os.get_terminal_size(sys.stdout.fileno())
        state = (newest, view, size, seconds)
        if state != shown:
            screen = Screen(newest.node, url, view, newest.away, seconds)
            live.update(drawn(screen, live.console), refresh=True)
            shown = state
        for key in keys.keys(KEY_SECONDS):
            groups = view.groups(newest.node) if newest.node else []
            view = press(view, key, groups)
            if view is None:
                break


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Treat signals like Ctrl-C, so that the terminal is put back."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
