"""Single keys from a terminal, and its modes put back at the end."""

from __future__ import annotations

import codecs
import os
import re
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ESCAPE_SECONDS = 0.05
"""How long the rest of an escape sequence may take; a lone Escape is the key."""
# In this order: the function keys of Linux's console, CSI and SS3 sequences, single characters.
# Terminals send SS3 (ESC O) for cursor keys in application mode, which another program may have
# left on.
_KEY = re.compile(r"\x1b\[\[[A-E]|\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_INCOMPLETE = re.compile(r"\x1b(\[\[?[0-9;]*|O)?\Z")
_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1bOP": "f1",
    "\x1b[11~": "f1",
    "\x1b[[A": "f1",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x04": "q",  # Ctrl-D is no end of file in cbreak mode
}


class Keyboard:
    """Reads the keys of the terminal with the file descriptor `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def keys(self, seconds: float) -> list[str]:
        """Wait at most `seconds` for keys and return their names: a character, "up", "enter", …

        Raises EOFError when the terminal is gone.
        """
        text = self._read(seconds)
        if _INCOMPLETE.search(text):
            text += self._read(ESCAPE_SECONDS)
        return [_NAMES.get(key, key) for key in _KEY.findall(text)]

    def _read(self, seconds: float) -> str:
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        try:
            data = os.read(self._descriptor, 1024)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return self._decoder.decode(data)


@contextmanager
def keyboard(descriptor: int) -> Iterator[Keyboard]:
    """Have the terminal give each key at once, without echo; put its modes back at the end.

    Ctrl-C still interrupts. Ctrl-Z does nothing, because a stopped program leaves its screen.
    """
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        modes = termios.tcgetattr(descriptor)
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, modes)
        yield Keyboard(descriptor)
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
