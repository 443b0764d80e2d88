"""Imports torch once, and runs each script that it is asked for in a fork.

torch_server.py LISTENER CLIENT: descriptors of the socket that accepts requests, and of one that is
closed when the client ends. What a training script also imports, at its first optimizer, is
torch._dynamo.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import site
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_exit_codes: list[int] = []
"""What the script has given to sys.exit."""
_PYTHONPATH = os.environ.get("PYTHONPATH", "")


def next_script(listener: socket.socket, client: socket.socket) -> dict[str, Any]:
    """Return in a new process for each request; end with the client.

    A request is a connection. It brings JSON and the descriptors of stdin, stdout and stderr, and
    receives the pid, and later the exit code.
    """
    while client not in select.select([listener, client], [], [])[0]:
        connection, _ = listener.accept()
        text, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not os.fork():
            listener.close()
            client.close()
            _watch(connection)
            _redirect(files)
            skip_destructors()
            script: dict[str, Any] = json.loads(text)
            return script
        connection.close()
        for descriptor in files:
            os.close(descriptor)
        while _reaped():
            pass
    os._exit(0)


def _watch(connection: socket.socket) -> None:
    """Return in a child, and send its pid and its exit code."""
    child = os.fork()
    if not child:
        connection.close()
        return
    connection.send(str(child).encode())
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):  # the client has been killed
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _redirect(files: list[int]) -> None:
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)


def skip_destructors() -> None:
    """End the process as soon as Python's own end is done.

    PyTorch's destructors take a third of a second, in which they copy what the forks share.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def leave() -> None:
    """End the process, as its last exit handler, without tearing down Python's modules.

    That takes a sixth of a second, in which it copies what the forks share. Python itself has to
    end a process that a KeyboardInterrupt has ended.
    """
    uncaught = getattr(sys, "last_type", None)
    if uncaught is KeyboardInterrupt:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(_exit_codes[0] if _exit_codes else int(uncaught is not None))


def code_of(end: SystemExit) -> int:
    """Return the exit code of the process that it ends."""
    return end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)


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
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    _customize(script["environment"].get("PYTHONPATH", ""))
    main = sys.modules["__main__"] = ModuleType("__main__")
    first, *others = script["arguments"]
    if first == "-c":
        text, *others = others
        sys.argv, sys.path[0] = ["-c", *others], ""
        return compile(text, "<string>", "exec"), main.__dict__
    sys.argv, sys.path[0] = [first, *others], str(Path(first).parent)
    main.__file__ = first
    return compile(Path(first).read_bytes(), first, "exec"), main.__dict__


def _customize(paths: str) -> None:
    """Do what Python does at startup with its PYTHONPATH, if that is not the server's."""
    if paths and paths != _PYTHONPATH:
        sys.path[1:1] = paths.split(os.pathsep)
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()


if __name__ == "__main__":
    atexit.register(leave)  # before torch registers handlers, which run first
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()
    try:
        sockets = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
        exec(*become(next_script(*sockets)))  # noqa: S102
    except SystemExit as end:
        _exit_codes.append(code_of(end))
        raise
