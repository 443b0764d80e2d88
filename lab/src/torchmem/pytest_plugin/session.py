"""What the plugin does in one pytest session: measures, judges and reports."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from torchmem.compare import baseline as files
from torchmem.compare import markdown
from torchmem.compare.baseline import BaselineEntry, BaselineOptions, Compared
from torchmem.compare.peak_memory import PeakMemory
from torchmem.preflight.options import check_machine
from torchmem.pytest_plugin import messages
from torchmem.pytest_plugin.limits import MemoryLimits
from torchmem.pytest_plugin.marker import DEFAULT_GPU_MODEL, NAME, is_measured
from torchmem.pytest_plugin.measured import ATTRIBUTE, BlockMemory, MeasuredTest
from torchmem.pytest_plugin.measurement import MemoryMeasurement
from torchmem.pytest_plugin.phantom_tests import PhantomTests
from torchmem.sample.errors import UsageError

_MEASUREMENT = pytest.StashKey[MemoryMeasurement]()
_RESULT = pytest.StashKey[MeasuredTest]()
_AT_IMPORT = re.compile(r"is_available|device_count|allow_module_level")


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options."""

    report: bool
    gpu_model: str
    baseline: BaselineOptions


def options_of(config: pytest.Config) -> Options:
    """Return the options and settings. Raises UsageError."""

    def value(name: str) -> str:
        given = config.getoption(f"{NAME}_{name}")
        return str(given or config.getini(f"{NAME}_{name}") or "")

    written = (config.getoption(f"{NAME}_{name}") for name in ("save_baseline", "markdown"))
    save, page = (Path(path) if path else None for path in written)
    known = value("baseline")
    if known and config.getini(f"{NAME}_baseline") == known:
        known = str(config.rootpath / known)
    compared = Path(known) if known and not save else None
    checked = BaselineOptions.checked(save, compared, value("tolerance"), page)
    return Options(
        report=config.getoption(f"{NAME}_report"),
        gpu_model=value("gpu_model") or DEFAULT_GPU_MODEL,
        # A test may change the folder.
        baseline=replace(checked, save=save and save.absolute(), markdown=page and page.absolute()),
    )


def has_gpu() -> bool:
    """Return whether this process sees a GPU, or runs on a phantom GPU already."""
    try:
        check_machine(os.environ, beside_gpu=False)
    except UsageError:
        return True
    return False


def skipped_at_import(path: Path) -> str | None:
    """Return why a module that skipped itself cannot be measured, if its reason is the GPU."""
    try:
        source = path.read_text(errors="replace")
    except OSError:
        return None
    if NAME not in source or not _AT_IMPORT.search(source):
        return None
    return (
        f"{path.name} skips all its tests at import, because this process has no GPU: write the "
        "condition as @pytest.mark.skipif at the tests or as a skip in a fixture, which are "
        "evaluated on the phantom GPU."
    )


class MemorySession:
    """The hooks of a session with --gpu-memory."""

    def __init__(self, options: Options, config: pytest.Config) -> None:
        self.needs_phantom = not has_gpu()
        self._options, self._baseline = options, options.baseline
        self._root = config.rootpath
        self._phantom = PhantomTests(options.gpu_model, config)
        self._results: dict[str, tuple[MeasuredTest, MemoryLimits]] = {}
        self._compared: dict[str, Compared] = {}
        self._remarks: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Check all markers before any test runs."""
        for item in items:
            _check_limits(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a measured test on the phantom GPU, if there is no other."""
        if not is_measured(item) or self._phantom.is_child:
            return None
        limits = limits_of(item)
        if not self.needs_phantom and limits.world_size is None:
            return None
        item.session._setupstate.teardown_exact(nextitem)  # noqa: SLF001 - other items' fixtures
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in list(self._phantom.reports(item, limits)):  # before it runs again
            self._judge_again(item, limits, report)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Begin to measure before the fixtures of a test."""
        if is_measured(item):
            measurement = item.stash[_MEASUREMENT] = MemoryMeasurement(self._root)
            measurement.begin()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Measure the call, and fail a test that exceeds its limits."""
        measurement = item.stash.get(_MEASUREMENT, None)
        if measurement is None:
            return (yield)
        limits = limits_of(item)
        before, since = measurement.allocated(), measurement.positions()
        try:
            result = yield
        finally:
            measured = item.stash[_RESULT] = measurement.end(before, since, limits.leak)
        failure = messages.limit_failure(measured, limits)
        if failure:
            pytest.fail(failure, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach what was measured to the report, which may travel to another process."""
        report = yield
        measured = item.stash.get(_RESULT, None)
        if call.when == "call" and measured is not None:
            setattr(report, ATTRIBUTE, measured.values())
            remark = messages.remark(measured, failed=report.failed)
            if remark and report.failed and not str(report.longrepr).startswith(messages.HEAD):
                report.sections.append(("GPU memory", remark))
            if not self._phantom.is_child:
                self._judge(item.nodeid, measured, report)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what was measured, also in another process, for the table and the files."""
        values = getattr(report, ATTRIBUTE, None)
        if values is None or self._phantom.is_child:
            return
        measured = MeasuredTest.of(values)
        limits = MemoryLimits(**values["limits"]) if "limits" in values else MemoryLimits()
        self._results[report.nodeid] = measured, limits
        if not report.failed:
            remark = messages.remark(measured, failed=False)
            self._remarks += [f"{report.nodeid}: {remark}"] if remark else []
        for compared in self._compare(report.nodeid, measured):
            self._compared[compared.name] = compared

    @contextmanager
    def block(self, item: pytest.Item, keywords: Mapping[str, Any]) -> Iterator[BlockMemory]:
        """Measure a block of a test, see `plugin.GpuMemoryFixture`."""
        limits, used = MemoryLimits.of(keywords), BlockMemory()
        measurement = item.stash[_MEASUREMENT]
        before = measurement.allocated()
        window, since = measurement.open_window()
        yield used
        measured = measurement.close_window(window, since, before)
        used.memory = measured.fullest or PeakMemory()
        failure = messages.limit_failure(measured, limits)
        if failure:
            pytest.fail(failure, pytrace=False)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table, the remarks, and what was compared."""
        write = terminalreporter.write_line
        if self._options.report and self._results:
            rows = [
                (name, measured, limits, self._compared.get(name))
                for name, (measured, limits) in self._results.items()
            ]
            terminalreporter.section(messages.conditions_line([row[1].conditions for row in rows]))
            for line in messages.table(rows):
                write(line)
        other = [each for each in self._compared.values() if each.outcome in {"new", "other"}]
        for sentence in [*self._remarks, *(each.sentence for each in other)]:
            write(f"GPU memory: {sentence}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the baseline and the page, in the process that has all reports."""
        self._phantom.close()
        if hasattr(session.config, "workerinput"):
            return
        if self._baseline.save:
            files.save(self._baseline.save, self._entries())
        if self._baseline.markdown:
            is_phantom = any(each.conditions.is_phantom for each, _ in self._results.values())
            page = markdown.page(list(self._compared.values()), phantom=is_phantom)
            self._baseline.markdown.write_text(page)

    def _entries(self) -> dict[str, BaselineEntry]:
        return {
            name: entry
            for test, (measured, _) in self._results.items()
            for name, entry in entries(test, measured).items()
        }

    def _compare(self, nodeid: str, measured: MeasuredTest) -> list[Compared]:
        return self._baseline.compare(entries(nodeid, measured))

    def _judge(self, nodeid: str, measured: MeasuredTest, report: pytest.TestReport) -> None:
        """Fail a test that passed and uses more than in the baseline."""
        more = [each for each in self._compare(nodeid, measured) if each.outcome == "more"]
        if more and report.passed:
            report.outcome = "failed"
            report.longrepr = messages.baseline_failure(more[0], measured.conditions)

    def _judge_again(
        self, item: pytest.Item, limits: MemoryLimits, report: pytest.TestReport
    ) -> None:
        """Judge the report of a test on the phantom GPU; repeat it if that is in doubt."""
        values = getattr(report, ATTRIBUTE, None)
        if values is None:
            return
        measured = MeasuredTest.of(values)
        self._judge(item.nodeid, measured, report)
        is_more = any(each.outcome == "more" for each in self._compare(item.nodeid, measured))
        if is_more or (self._baseline.save and report.passed):
            self._repeat(item, limits, report, measured, times=2 if is_more else 1)

    def _repeat(
        self,
        item: pytest.Item,
        limits: MemoryLimits,
        report: pytest.TestReport,
        measured: MeasuredTest,
        *,
        times: int,
    ) -> None:
        """Run a test again, and say by how much its peak varies."""
        again = [self._phantom.measured_again(item, limits) for _ in range(times)]
        runs = [measured, *(each for each in again if each)]
        peaks = [(each.fullest or PeakMemory()).peak_allocated or 0 for each in runs]
        varies = files.variation(peaks, self._baseline.tolerance) if min(peaks) else None
        if varies and report.failed:
            report.longrepr = f"{report.longrepr}\nGPU memory: {varies}"
        elif varies:
            self._remarks.append(f"{item.nodeid}: {varies}")


def limits_of(item: pytest.Item) -> MemoryLimits:
    """Return the limits of a test's marker. Raises UsageError."""
    marker = item.get_closest_marker(NAME)
    return MemoryLimits.of(marker.kwargs, marker.args) if marker else MemoryLimits()


def _check_limits(item: pytest.Item) -> None:
    try:
        limits_of(item)
    except UsageError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from None


def entries(nodeid: str, measured: MeasuredTest) -> dict[str, BaselineEntry]:
    """Return what a test used, by its id and, if there are several, by GPU."""
    place = measured.conditions
    return files.entries(nodeid, measured.devices, place.gpu_model, place.torch)
