"""Imports torch once, and runs each script that it is asked for in a fork: torch_server.py SOCKET.

What a training script also imports, at its first optimizer, is torch._dynamo.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch._dynamo  # noqa: F401


def next_script(requests: socket.socket) -> dict[str, Any]:
    """Return in a new process for each request; end with the client.

    A request is JSON and three descriptors: those of stdout and stderr, and a socket that receives
    the pid, and later the exit code.
    """
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not text:
            os._exit(0)
        if not os.fork():
            requests.close()
            *files, answer = descriptors
            _watch(answer)
            _redirect(files)
            skip_destructors()
            script: dict[str, Any] = json.loads(text)
            return script
        for descriptor in descriptors:
            os.close(descriptor)
        while _reaped():
            pass


def _watch(answer: int) -> None:
    """Return in a child, and send its pid and its exit code."""
    child = os.fork()
    if not child:
        os.close(answer)
        return
    os.write(answer, f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    os.write(answer, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _redirect(files: list[int]) -> None:
    for number, descriptor in enumerate(files, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)


def skip_destructors() -> None:
    """End the process as soon as Python's own end is done.

    PyTorch's destructors take a third of a second, in which they copy what the forks share.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def become(script: dict[str, Any]) -> tuple[CodeType, dict[str, Any]]:
    """Take arguments, environment and folder of `python ARGUMENTS`; return its code and globals."""
    os.environ.clear()
    os.environ.update(script["environment"])
    os.chdir(script["folder"])
    main = sys.modules["__main__"] = ModuleType("__main__")
    first, *others = script["arguments"]
    if first == "-c":
        text, *others = others
        sys.argv, sys.path[0] = ["-c", *others], ""
        return compile(text, "<string>", "exec"), main.__dict__
    sys.argv, sys.path[0] = [first, *others], str(Path(first).parent)
    main.__file__ = first
    return compile(Path(first).read_bytes(), first, "exec"), main.__dict__


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    exec(*become(next_script(socket.socket(fileno=int(sys.argv[1])))))  # noqa: S102
