"""Runs tests on a phantom GPU, each in a fork: python -m torchmem.pytest_plugin.child FD.

It starts pytest as the parent was started, imports and collects once, and then waits for the ids of
tests. Each fork begins without CUDA, so that a test has the GPU for itself. What the parent reads
are lines of JSON: the reports of a test, and at its end how its process ended.

A test may close descriptors that it has inherited, as daemons do, and the file that it opens next
has the number of one of them. So a fork writes its reports to a file that it opens for each, and
this process passes them on.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest

from torchmem.preflight.plan import Placement

CLOSED = (
    "if the test closes descriptors that it did not open, it also closes those by which pytest "
    "captures the output: run it with --capture=no."
)
WORKER = "gpu_memory"
"""The plugin's name for this process, where xdist has its workers' ids."""


class ChildRunner:
    """The plugin of the child's pytest: it replaces the loop over all tests."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers
        self._pid = 0
        self._notes = Path()
        self._config: pytest.Config | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that the parent asks for, until it closes the connection."""
        self._config = session.config
        gc.collect()
        gc.freeze()  # so that forks do not copy what they share
        items = {item.nodeid: item for item in session.items}
        self._send({"ready": True, "cuda": _initialized()})
        for line in self._requests:
            request = json.loads(line)
            item = items.get(request["nodeid"])
            if item is None:
                self._send({"missing": True})
            else:
                self._run(item, request)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of a phase of a test."""
        if os.getpid() == self._pid and self._config is not None:
            if report.failed and os.strerror(errno.EBADF) in report.longreprtext:
                report.sections.append(("GPU memory", CLOSED))
            data = self._config.hook.pytest_report_to_serializable(
                config=self._config, report=report
            )
            self._note({"report": data})

    def _run(self, item: pytest.Item, request: Mapping[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._notes = Path(f"{request['state']}.reports")
        pid = os.fork()
        if not pid:
            self._pid = os.getpid()
            self._run_here(item, request)
        _, status = os.waitpid(pid, 0)
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        for line in lines:
            self._send(json.loads(line))
        self._send({"ended": os.waitstatus_to_exitcode(status)})

    def _run_here(self, item: pytest.Item, request: Mapping[str, Any]) -> None:
        """Run a test in this fork, and end the process."""
        code = 1
        try:
            _become(request)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            code = 0
        except BaseException:  # noqa: BLE001 - the fork must never return into pytest's loop
            traceback.print_exc()
        finally:
            os._exit(code)

    def _note(self, message: Mapping[str, Any]) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps(message) + "\n")

    def _send(self, message: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def _become(request: Mapping[str, Any]) -> None:
    """Take the rank of a distributed test, and a folder of its own for the GPUs' state."""
    os.environ["PHANTOM_STATE_DIR"] = request["state"]
    if request["placement"] is not None:
        placement = Placement(**request["placement"])
        os.environ.update(placement.environment())
        os.environ["PHANTOM_DEVICES"] = str(placement.local_world_size)
        from torchmem.preflight.child.distributed import lone_rank

        lone_rank(placement)


def _initialized() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def main(descriptor: int) -> None:
    """Start pytest with the arguments that the parent sends, and run its tests."""
    connection = socket.socket(fileno=descriptor)
    requests, answers = connection.makefile("r"), connection.makefile("w")
    start = json.loads(requests.readline())
    os.chdir(start["folder"])
    sys.path[:] = start["path"]
    import torch._dynamo
    import torch._inductor  # noqa: F401 - once, for all forks: optimizers and snapshots need both
    from _pytest.config import _prepareconfig

    import torchmem.sdk.pytorch.backend  # noqa: F401 - sees modules from now on

    config = _prepareconfig(start["arguments"], None)
    for name, value in start["options"].items():
        setattr(config.option, name, value)
    config.args = start["files"]
    # Plugins leave reports and files to the parent of what looks like a worker of xdist.
    config.workerinput = {"workerid": WORKER, "workercount": 1, "testrunuid": WORKER}  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    config.pluginmanager.register(ChildRunner(requests, answers), "torchmem_child")
    code = config.hook.pytest_cmdline_main(config=config)
    answers.write(json.dumps({"failed": int(code)}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
