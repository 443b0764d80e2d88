"""Starts the process whose forks run tests on a phantom GPU, and talks to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.gpus import parse_usable_gpu_model
from torchmem.phantom.torch_build import checked_build, find_torch
from torchmem.preflight.plan import Placement
from torchmem.preflight.run import OUTPUT_VARIABLES, REMOVED_VARIABLES
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import ENVIRONMENT_VARIABLE as RUN_DIR_VARIABLE

END_SECONDS = 10.0
MAX_OUTPUT_LINES = 15


@dataclass(frozen=True, slots=True)
class PytestStart:
    """How pytest was started, for the child to start it the same way.

    arguments: of the command line. files: those with the tests. options: what differs in the child.
    """

    arguments: Sequence[str]
    folder: str
    files: Sequence[str]
    options: Mapping[str, Any]


class PhantomServer:
    """A process on phantom GPUs of one model; each test runs in a fork of it."""

    def __init__(self, gpu_model: str, start: PytestStart) -> None:
        """Start it, and wait until it has collected.

        Raises:
            UsageError: the phantom GPU cannot be used here, or the tests cannot be collected.
        """
        self._runs = 0
        with ExitStack() as stack:
            scratch = tempfile.TemporaryDirectory(prefix="torchmem-pytest-")
            self._scratch = Path(stack.enter_context(scratch))
            environment = self._environment(gpu_model)
            self._output = stack.enter_context((self._scratch / "output").open("w+"))
            ours, theirs = socket.socketpair()
            with theirs:
                module, number = "torchmem.pytest_plugin.child", str(theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, number],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=[theirs.fileno()],
                )
            stack.callback(self._wait_for_end)
            self._requests, self._answers = ours.makefile("w"), ours.makefile("r")
            for stream in (ours, self._answers, self._requests):
                stack.callback(_close, stream)
            self._send({**asdict(start), "path": sys.path})
            self._wait_until_ready()
            self._open = stack.pop_all()

    def run(self, nodeid: str, placement: Placement | None) -> Iterator[Mapping[str, Any]]:
        """Run a test; yield the messages of the child, at last how the test's process ended."""
        self._runs += 1
        state = self._scratch / str(self._runs)
        place = asdict(placement) if placement else None
        try:
            self._send({"nodeid": nodeid, "state": str(state), "placement": place})
        except OSError:
            yield {"ended": None}
            return
        for message in self._messages():
            yield message
            if message.keys() & {"ended", "missing"}:
                return
        yield {"ended": None}

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, and remove its files."""
        self._open.close()

    def _wait_for_end(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _environment(self, gpu_model: str) -> dict[str, str]:
        removed = {*REMOVED_VARIABLES, *OUTPUT_VARIABLES}
        base = {name: value for name, value in os.environ.items() if name not in removed}
        torch = checked_build(find_torch(sys.executable, base), sys.executable)
        gpu = parse_usable_gpu_model(gpu_model)
        own = {
            RUN_DIR_VARIABLE: str(self._scratch / "run"),
            # Counting GPUs at the import of a test would otherwise initialize CUDA's driver.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        return phantom_environment(gpu, 1, self._scratch / "0", base, torch) | own

    def _wait_until_ready(self) -> None:
        for message in self._messages():
            if message.get("cuda"):
                raise UsageError(
                    "a test's module initializes CUDA when it is imported, but each test needs a "
                    "process without CUDA: do that in a fixture or in the test."
                )
            if message.get("ready"):
                return
            break
        self._output.flush()
        self._output.seek(0)
        lines = self._output.read().splitlines()[-MAX_OUTPUT_LINES:]
        problem = (
            "the tests cannot be collected on the phantom GPU: see this output of its process."
        )
        raise UsageError("\n".join([problem, *lines]))

    def _send(self, message: Mapping[str, Any]) -> None:
        self._requests.write(json.dumps(message) + "\n")
        self._requests.flush()

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        try:
            for line in self._answers:
                yield json.loads(line)
        except (OSError, ValueError):  # it has died
            return


def _close(stream: socket.socket | TextIO) -> None:
    with suppress(OSError):  # the process has ended before it read everything
        stream.close()


def ending(exit_code: int | None) -> str:
    """Return why a test has no result, in one sentence."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        advice = (
            "if this machine ran out of memory, use a smaller model or fewer workers."
            if exit_code == -signal.SIGKILL
            else "run it alone, with python -X faulthandler, to see where."
        )
        return f"the test's process was killed by {name}: {advice}"
    if exit_code is None:
        return "the process that runs the tests on the phantom GPU has ended: run the test alone."
    return (
        f"the test's process exited with code {exit_code} before the test ended: do not call "
        "os._exit in a test."
    )
