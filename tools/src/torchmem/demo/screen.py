"""What the demo shows while it runs: `torchmem top`, without a terminal as a page now and then."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, closing

from rich.console import Console
from rich.live import Live
from rich.text import Text

from torchmem.demo.ranks import END_SIGNALS, DemoPlan, RankProcesses
from torchmem.sample.signals import wait_for_signal
from torchmem.top.asking import Asking, Newest, asked
from torchmem.top.keyboard import keyboard
from torchmem.top.loop import plain_console
from torchmem.top.screen import Screen, page, picture
from torchmem.top.signs import only_ascii
from torchmem.top.source import ScreenSource
from torchmem.top.view import is_live, out_of_memory
from torchmem.top.viewer import Viewer

REFRESH_SECONDS = 1.0
PLAIN_SECONDS = 10.0
KEY_SECONDS = 0.1
NOTE_SECONDS = 20.0
MAX_END_SECONDS = 10.0
"""How long to wait for the exporter to notice that all ranks have ended."""


def show(plan: DemoPlan, ranks: RankProcesses, url: str, note: str = "") -> None:
    """Show the ranks until all of them have ended, which may be later than the plan's duration.

    `url` is the exporter's; `note` is on the screen for NOTE_SECONDS. Raises KeyboardInterrupt when
    the user ends the demo.
    """
    console = plain_console()
    if console.is_terminal and not console.is_dumb_terminal:
        _follow(console, plan, ranks, url, note)
    else:
        _print(console, plan, ranks, url)


def _print(console: Console, plan: DemoPlan, ranks: RankProcesses, url: str) -> None:
    started = time.monotonic()
    pause = min(PLAIN_SECONDS, plan.duration / 3)
    due = started + pause
    # Check often: the memory of an ended rank is freed only when this notices the end.
    while ranks.alive():
        _pause(min(REFRESH_SECONDS, pause))
        if time.monotonic() >= due:
            due = time.monotonic() + pause
            node = asked(ScreenSource(url), Newest(), None).node
            if node:
                print(f"{time.monotonic() - started:.0f} s of {plan.duration:.0f}")
                screen = Screen(node, url, is_ascii=only_ascii(console, os.environ))
                console.print(page(screen, console), end="")
                sys.stdout.flush()


def _follow(console: Console, plan: DemoPlan, ranks: RankProcesses, url: str, note: str) -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        asking = stack.enter_context(closing(Asking(ScreenSource(url), REFRESH_SECONDS)))
        keys = stack.enter_context(keyboard(sys.stdin.fileno())) if sys.stdin.isatty() else None
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        viewer = Viewer(live, url)
        while ranks.alive():
            elapsed = time.monotonic() - started
            _pause(0.0 if keys else KEY_SECONDS)
            words = f"{note}   " * bool(note and elapsed < NOTE_SECONDS)
            viewer.show(asking.newest, f"{words}{elapsed:.0f} s of {plan.duration:.0f}")
            asking.want(viewer.wanted)
            if keys and not viewer.press(keys.keys(KEY_SECONDS)):
                raise KeyboardInterrupt


def last_picture(url: str, console: Console, lines: int) -> Text | None:
    """Return the screen after the end without its keys, in at most `lines` lines; None if unknown.

    It is about the rank that ran out of memory, if one did. The ranks have ended, which the
    exporter may notice a moment later.
    """
    until = time.monotonic() + MAX_END_SECONDS
    while (newest := asked(ScreenSource(url), Newest(), None)).node and time.monotonic() < until:
        if not any(is_live(rank) for gpu in newest.node.gpus for rank in gpu.ranks):
            break
        time.sleep(KEY_SECONDS)
    failed = out_of_memory(newest.node) if newest.node else []
    if failed:
        newest = asked(ScreenSource(url), newest, failed[0])
    if newest.node is None:
        return None
    is_ascii = only_ascii(console, os.environ)
    screen = Screen(newest.node, url, answers=newest.answers, is_ascii=is_ascii)
    return picture(screen, console, lines)


def _pause(seconds: float) -> None:
    if wait_for_signal(END_SIGNALS, seconds) is not None:
        raise KeyboardInterrupt
