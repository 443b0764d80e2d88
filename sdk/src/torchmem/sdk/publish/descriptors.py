"""Sockets that the SDK keeps, which the script may close: daemons call `os.closerange`.

The script's next file then gets the same number, so a number alone does not say whose it is. A
forked child closes the sockets that it has inherited: scrapes would hang on them once the parent is
gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
from weakref import WeakSet


class OwnSocket:
    """A nonblocking socket. Only while `is_open` is it safe to use."""

    def __init__(self, opened: socket.socket) -> None:
        opened.setblocking(False)
        self.socket = opened
        self.number = opened.fileno()
        self._file = _file(self.number)
        _own.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the number stands for the same socket as at first."""
        return self._file is not None and _file(self.number) == self._file

    def end(self) -> None:
        """End the connection, or stop listening, also in forked children that inherited it."""
        with contextlib.suppress(OSError):
            if self.is_open:
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket here, unless the script has closed it."""
        self.socket.detach()  # it would close the number when it is collected
        if self.is_open:
            os.close(self.number)
        self._file = None


_own: WeakSet[OwnSocket] = WeakSet()


def _close_inherited() -> None:
    for each in list(_own):
        each.close()


# Once for all: it cannot be taken back.
os.register_at_fork(after_in_child=_close_inherited)


def _file(number: int) -> tuple[int, int] | None:
    """Return device and inode, which no two open files or sockets share; None if closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
