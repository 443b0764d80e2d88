"""`torchmem top` from start to end: on a terminal until the user quits, else one screen."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from contextlib import closing

from rich.console import Console
from rich.live import Live

from torchmem.cli.exporter import AwayError, SilentError
from torchmem.cli.flags import DEFAULT_EXPORTER
from torchmem.cli.http import exporter_url, without_credentials
from torchmem.output.terminal import interrupted_by
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.sample.run_directory import run_directory
from torchmem.top.asking import Asking
from torchmem.top.keyboard import Keyboard, keyboard
from torchmem.top.screen import Screen, page
from torchmem.top.signs import only_ascii
from torchmem.top.source import ScreenSource
from torchmem.top.start import START
from torchmem.top.view import out_of_memory
from torchmem.top.viewer import Viewer

MIN_INTERVAL_SECONDS = 0.2
MAX_INTERVAL_SECONDS = 3600.0
KEY_SECONDS = 0.2
"""How long to wait for a key before looking for a new state or another size of the terminal."""
MAX_EXPLAINED = 8
"""The most ranks whose OutOfMemoryErrors one screen explains."""


def run(arguments: argparse.Namespace) -> int:
    """Show the node until the user ends it. Raise UsageError, or TorchmemError with --once."""
    url, interval = exporter_url(arguments.exporter or DEFAULT_EXPORTER), arguments.interval
    if not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        bounds = f"{MIN_INTERVAL_SECONDS:g} and {MAX_INTERVAL_SECONDS:g}"
        raise UsageError(f"--interval must be between {bounds} seconds, not {interval:g}.")
    source = ScreenSource(url, None if arguments.exporter else run_directory(os.environ))
    console, shown = plain_console(), without_credentials(url)
    is_interactive = console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()
    if arguments.once or not is_interactive:
        _print(console, source, shown)
    else:
        _follow(console, source, shown, interval)
    return 0


def plain_console() -> Console:
    """Return stdout as a console that takes text as it is, with "?" for what it cannot encode."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, markup=False, emoji=False)


def _print(console: Console, source: ScreenSource, url: str) -> None:
    try:
        node = source.node()
    except AwayError as error:
        start = f" {START}" if isinstance(error, SilentError) else ""
        raise TorchmemError(f"{url} {error}.{start}") from None
    failed = {key: source.why(key) for key in out_of_memory(node)[:MAX_EXPLAINED]}
    answers = {key: answer for key, answer in failed.items() if answer}
    screen = Screen(node, url, answers=answers, is_ascii=only_ascii(console, os.environ))
    console.print(page(screen, console), end="")


def _follow(console: Console, source: ScreenSource, url: str, interval: float) -> None:
    try:
        with (
            interrupted_by(signal.SIGTERM, signal.SIGHUP),
            closing(Asking(source, interval)) as asking,
            keyboard(sys.stdin.fileno()) as typed,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            _until_ended(asking, typed, Viewer(live, url))
    except (KeyboardInterrupt, EOFError, OSError):
        pass  # EOFError and OSError: the terminal is gone


def _until_ended(asking: Asking, typed: Keyboard, viewer: Viewer) -> None:
    """Draw what is new, and follow the keys until one of them ends it."""
    goes_on = True
    while goes_on:
        viewer.show(asking.newest)
        asking.want(viewer.wanted)
        goes_on = viewer.press(typed.keys(KEY_SECONDS))
