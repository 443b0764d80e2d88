"""Runs measured tests on phantom GPUs, for a pytest process without a GPU, or a worker of xdist."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchmem.preflight.options import DEFAULT_RANKS_PER_NODE
from torchmem.preflight.plan import Placement
from torchmem.pytest_plugin.limits import MemoryLimits
from torchmem.pytest_plugin.marker import is_measured
from torchmem.pytest_plugin.measured import ATTRIBUTE, MeasuredTest
from torchmem.pytest_plugin.server import PhantomServer, PytestStart, ending
from torchmem.sample.errors import UsageError

MISSING = (
    "the test does not exist when it is collected on the phantom GPU: its name and parameters must "
    "not depend on torch.cuda at import."
)
OPTIONS: dict[str, Any] = {
    "dist": "no",
    "numprocesses": None,
    "maxprocesses": None,
    "tx": [],
    "usepdb": False,
    "looponfail": False,
    "basetemp": None,
    "maxfail": 0,
}
"""Options of pytest and xdist that are for the parent only."""


class PhantomTests:
    """Starts one server for each GPU model that tests ask for."""

    def __init__(self, gpu_model: str, config: pytest.Config) -> None:
        self.is_child = config.pluginmanager.has_plugin("torchmem_child")
        self._gpu_model = gpu_model
        self._config = config
        self._servers: dict[str, PhantomServer] = {}
        self._failed: dict[str, str] = {}

    def reports(self, item: pytest.Item, limits: MemoryLimits) -> Iterator[pytest.TestReport]:
        """Run a test and yield its reports, the last of which says why if it did not end."""
        started = time.time()
        last: pytest.TestReport | None = None
        for message in self._messages(item, limits):
            if "report" in message:
                hook = self._config.hook
                last = hook.pytest_report_from_serializable(
                    config=self._config, data=message["report"]
                )
                if last is not None:
                    self._add_limits(last, limits)
                    yield last
            elif message.get("problem") or last is None or last.when != "teardown":
                problem = message.get("problem") or ending(message.get("ended"))
                yield failed(item, problem, started)

    def measured_again(self, item: pytest.Item, limits: MemoryLimits) -> MeasuredTest | None:
        """Run a test again; return what it used, None if it did not end."""
        found = None
        for report in self.reports(item, limits):
            values = getattr(report, ATTRIBUTE, None)
            found = found if values is None else MeasuredTest.of(values)
        return found

    def close(self) -> None:
        """End the servers."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _add_limits(self, report: pytest.TestReport, limits: MemoryLimits) -> None:
        values = getattr(report, ATTRIBUTE, None)
        if values is not None:
            sizes = {"peak": limits.peak, "reserved": limits.reserved, "leak": limits.leak}
            setattr(report, ATTRIBUTE, {**values, "limits": sizes})

    def _messages(self, item: pytest.Item, limits: MemoryLimits) -> Iterator[dict[str, Any]]:
        try:
            server = self._server(limits.gpu_model or self._gpu_model, item.session)
        except UsageError as error:
            yield {"problem": str(error)}
            return
        placement = None
        if limits.world_size is not None:
            node = min(limits.world_size, DEFAULT_RANKS_PER_NODE)
            placement = Placement(limits.rank, limits.world_size, node)
        for message in server.run(item.nodeid, placement):
            yield {"problem": MISSING} if "missing" in message else dict(message)

    def _server(self, gpu_model: str, session: pytest.Session) -> PhantomServer:
        if gpu_model in self._failed:
            raise UsageError(self._failed[gpu_model])
        server = self._servers.get(gpu_model)
        if server is None or not server.is_alive:
            if server is not None:
                server.close()
            try:
                self._servers[gpu_model] = PhantomServer(gpu_model, self._start(session))
            except UsageError as error:
                self._failed[gpu_model] = str(error)
                raise
        return self._servers[gpu_model]

    def _start(self, session: pytest.Session) -> PytestStart:
        measured = (item for item in session.items if is_measured(item))
        files = dict.fromkeys(str(item.path) for item in measured)
        known = vars(self._config.option)
        return PytestStart(
            arguments=[str(each) for each in self._config.invocation_params.args],
            folder=str(Path(self._config.invocation_params.dir)),
            files=list(files),
            options={name: value for name, value in OPTIONS.items() if name in known},
        )


def failed(item: pytest.Item, problem: str, started: float) -> pytest.TestReport:
    """Return the report of a test that did not run to its end."""
    now = time.time()
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=f"GPU memory: {problem}",
        when="call",
        duration=now - started,
        start=started,
        stop=now,
    )
