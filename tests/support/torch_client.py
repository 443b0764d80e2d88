"""Runs a script in a fork of a process that has imported torch: torch_client.py ADDRESS SCRIPT ...

It takes the place of `python -W ignore` in a command: the script has this process's arguments,
environment, folder and streams, SIGTERM is passed on to it, and its exit code is that of this
process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class Fork:
    """A running script. address: of the server's socket. files: its stdin, stdout and stderr."""

    def __init__(
        self,
        address: bytes,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        files: Sequence[IO[bytes]],
    ) -> None:
        script = {
            "arguments": arguments,
            "environment": dict(environment),
            "folder": str(folder),
        }
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(address)
        descriptors = [file.fileno() for file in files]
        socket.send_fds(self._server, [json.dumps(script).encode()], descriptors)
        self.pid = int(self._server.recv(99))

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative after a signal.

        Raises:
            TimeoutError: the script took longer than `timeout` seconds, and has been killed.
        """
        with self._server:
            self._server.settimeout(timeout)
            try:
                return int(self._server.recv(99))
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
                raise


def main() -> None:
    """Run the script, and end as it does."""
    address, *arguments = sys.argv[1:]
    files = [sys.stdin.buffer, sys.stdout.buffer, sys.stderr.buffer]
    fork = Fork(b"\0" + address.encode(), arguments, os.environ, Path.cwd(), files)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(fork.pid, number))
    exit_code = fork.wait()
    if exit_code < 0:
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
