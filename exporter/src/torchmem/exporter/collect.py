"""One scrape: read the driver and the run directory once, run every collector, survive each one's failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from prometheus_client.core import Metric

from torchmem.exporter import collectors
from torchmem.exporter.collectors import exporter, gpu, join, samples
from torchmem.exporter.driver import Driver
from torchmem.exporter.gpu import Nvml, NvmlDownError
from torchmem.exporter.reading import Outcome, Reading, attempt
from torchmem.exporter.rundir import Published, RunDirectory
from torchmem.exporter.worker import Worker

_log = logging.getLogger(__name__)

DEFAULT_DEADLINE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0


class Exporter:
    """Gives all metric families on demand; safe to call from several threads, one after the other.

    `deadline_seconds` bounds the wait for the driver; past it the scrape answers from what is known.
    """

    def __init__(
        self,
        nvml: Nvml,
        run_directory: RunDirectory,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = Driver(nvml)
        self._run_directory = run_directory
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._worker = Worker()
        self._reading = Reading(nvml)
        self._lock = threading.Lock()

    def collect(self) -> list[Metric]:
        """All families of one scrape; never raises for what a GPU, the driver or a sample file does."""
        with self._lock:
            reading = self._read_driver()
            outcomes = [*_complete(reading.outcomes), *self._join(reading)]
        own = exporter.collect(outcomes, self._run_directory.rejections)
        return [*(family for outcome in outcomes for family in outcome.families), *own]

    def close(self) -> None:
        """Let NVML go, without waiting for a driver call that never returns."""
        self._worker.release()
        self._worker.run(self._driver.close, _CLOSE_SECONDS)

    def _read_driver(self) -> Reading:
        """A finished reading, or what there is of it at the deadline; while one is stuck only the GPU it waits for."""
        reading = Reading(self._driver.nvml)
        if self._worker.run(lambda: _read(self._driver, reading), self._deadline_seconds) == "busy":
            return Reading(self._driver.nvml, asked=self._reading.asked)
        self._reading = reading
        return reading

    def _join(self, reading: Reading) -> list[Outcome]:
        """What needs both sides, or neither."""
        known, published = self._driver.known, list[Published]()

        def read_samples() -> Iterable[Metric]:
            published.extend(self._run_directory.read(self._clock()))
            return samples.collect(published, known)

        same_pids = reading.nvml.pid_namespace() == self._run_directory.namespace
        processes = (reading.processes or {}) if same_pids else {}
        return [
            replace(attempt("gpu", lambda: gpu.collect(reading, known)), success=not reading.reason),
            attempt("samples", read_samples),
            attempt("join", lambda: join.collect(published, known, processes)),
        ]


def _read(driver: Driver, reading: Reading) -> None:
    """In the driver's thread: roll call, then every NVML collector."""
    try:
        roll = driver.roll_call()
        reading.present, reading.lost = roll.present, roll.lost
        for name, collect in collectors.NVML_COLLECTORS.items():
            reading.outcomes = (*reading.outcomes, attempt(name, partial(collect, reading)))
    except NvmlDownError as error:
        driver.fail(error)
        reading.reason = error.reason
    except Exception:  # noqa: BLE001 - a broken driver must not end the scrape; it is logged
        _log.exception("reading NVML failed")
        driver.fail(NvmlDownError("unexpected_error"))
        reading.reason = "unexpected_error"
    else:
        driver.succeed()
        reading.reason = ""


def _complete(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """One outcome for each NVML collector; those that were not reached have failed."""
    reached = {outcome.collector: outcome for outcome in outcomes}
    return [reached.get(name, Outcome(name)) for name in collectors.NVML_COLLECTORS]
