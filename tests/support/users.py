"""Several real users of one machine, for tests that run as root."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="acting as several users of the machine needs root"
)


def may_mount() -> bool:
    """Return whether this process may mount a file system in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "torchmem", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def as_user(uid: int, call: Callable[[], T]) -> T:
    """Call a function in a forked process of another user, and return its result."""
    "localhost".encode("idna")  # for sockets; the user may not be able to read this codec's module
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _serve(uid, call, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    result: T = pickle.loads(data)  # noqa: S301 - from our own child
    return result


def _serve(uid: int, call: Callable[[], object], write: int) -> None:
    """Become the user, write the pickled result to the pipe and end the process."""
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.umask(0o077)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(call(), pipe)
    except BaseException:  # noqa: BLE001 - printed; the parent fails without a result
        traceback.print_exc()
    finally:
        os._exit(0)
