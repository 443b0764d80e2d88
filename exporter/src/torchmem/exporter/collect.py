"""One scrape: read the driver and the run directory once, run every collector, survive each one's failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from prometheus_client.core import Metric

from torchmem.exporter import collectors
from torchmem.exporter.collectors import events, exporter, gpu, join, process_info, samples
from torchmem.exporter.collectors.processes import DEFAULT_PROCESSES_PER_GPU
from torchmem.exporter.driver import Driver
from torchmem.exporter.gpu import GpuIdentity, GpuLabels, Nvml, NvmlDownError
from torchmem.exporter.journal import Journal
from torchmem.exporter.process_owners import ProcessOwners
from torchmem.exporter.reading import AbandonedError, Outcome, Reading, attempt
from torchmem.exporter.run_directory import Published, RunDirectory
from torchmem.exporter.watch import Watch
from torchmem.exporter.worker import Worker, Workers

_log = logging.getLogger(__name__)

DEFAULT_DEADLINE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0


class Exporter:
    """Gives all metric families on demand; safe to call from several threads.

    `deadline_seconds` bounds the wait for the driver; past it the scrape answers from what is known, and a collector
    that was not done has failed. A GPU whose call hangs is left alone in the scrapes after that, until the call
    returns: `nvml_gpu_up` tells of it, and a collector is successful when every GPU answered that was asked.
    `processes_per_gpu`: how many of a GPU's processes are shown by pid, the largest first; `pcie_throughput`: whether
    PCIe throughput is measured, which costs 40 ms for each GPU and scrape.
    """

    def __init__(  # noqa: PLR0913 - all but the first two are settings
        self,
        nvml: Nvml,
        run_directory: RunDirectory,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        clock: Callable[[], float] = time.time,
        *,
        processes_per_gpu: int = DEFAULT_PROCESSES_PER_GPU,
        pcie_throughput: bool = False,
    ) -> None:
        self._driver = Driver(nvml)
        self._collectors = collectors.nvml_collectors(
            processes_per_gpu, pcie_throughput=pcie_throughput
        )
        self._watch = Watch(clock)
        self._owners = ProcessOwners()
        self._mig: Mapping[str, GpuIdentity] = {}
        self._run_directory = run_directory
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._workers = Workers[GpuLabels]()
        self._journal = Journal(deadline_seconds)
        self._reading = Reading(nvml)
        self._current = self._reading
        self._is_closed = False
        self._asking = threading.Lock()
        self._lock = threading.Lock()

    def collect(self) -> list[Metric]:
        """All families of one scrape; never raises for what a GPU, the driver or a sample file does."""
        with self._asking:
            reading = self._read_driver()
            if not self._is_closed:
                self._journal.note(reading)
            families = self._families(reading)
            self._current = Reading(self._driver.nvml)
        return families

    def known(self) -> list[Metric]:
        """What the collection that runs now knows already, for a scrape that cannot wait for the driver."""
        return self._families(self._current)

    def published(self) -> list[Published]:
        """Every process of the run directory now; raises OSError when it cannot be read."""
        with self._lock:
            return self._run_directory.read(self._clock())

    def _families(self, reading: Reading) -> list[Metric]:
        with self._lock:
            outcomes = [*self._complete(reading.outcomes), *self._join(reading)]
            own = exporter.collect(outcomes, self._run_directory.rejections)
        return [*(family for outcome in outcomes for family in outcome.families), *own]

    def close(self) -> None:
        """Let NVML go, without waiting for a driver call that never returns."""
        self._is_closed = True
        self._workers.current.close()
        self._watch.close()
        if not self._workers.is_busy:
            Worker().run(self._driver.close, _CLOSE_SECONDS)

    def _read_driver(self) -> Reading:
        """A finished reading, or what there is of it at the deadline.

        Nothing while the driver as a whole is stuck, and once the exporter is closed.
        """
        if not self._is_closed:
            self._leave_hung()
        reading = self._current = Reading(self._driver.nvml, self._workers.stuck())
        if (
            self._is_closed
        ):  # asked again: the worker of now may have come after the one that was closed
            return reading
        if self._workers.current.run(lambda: self._read(reading), self._deadline_seconds) != "busy":
            self._reading = reading
        return reading

    def _leave_hung(self) -> None:
        """If the last reading still waits for a GPU, let it wait there alone."""
        if self._workers.current.is_busy:
            self._journal.note(self._reading)
            hung = self._reading.abandon()
            if hung is not None:
                self._workers.leave(hung)

    def _join(self, reading: Reading) -> list[Outcome]:
        """What needs both sides, or neither."""
        self._mig = {**self._mig, **reading.mig}
        known, published = self._driver.known, list[Published]()
        gpus = {**known, **self._mig}

        def read_samples() -> Iterable[Metric]:
            published.extend(self._run_directory.read(self._clock()))
            return samples.collect(published, gpus)

        same_pids = reading.nvml.pid_namespace() == self._run_directory.namespace
        memory_of = reading.memory_of if same_pids else {}
        shown = (reading.processes or {}) if same_pids else {}
        return [
            replace(
                attempt("gpu", lambda: gpu.collect(reading, known)), success=not reading.reason
            ),
            attempt("events", lambda: events.collect(self._watch, known)),
            attempt("samples", read_samples),
            attempt("process_info", lambda: process_info.collect(shown, published, self._owners)),
            attempt("join", lambda: join.collect(published, gpus, memory_of)),
        ]

    def _read(self, reading: Reading) -> None:
        """In the driver's thread: roll call, then every NVML collector."""
        try:
            self._read_all(reading)
        except AbandonedError:
            return
        except NvmlDownError as error:
            self._fail(reading, error)
        except Exception:  # noqa: BLE001 - a broken driver must not end the scrape; it is logged
            _log.exception("reading NVML failed")
            self._fail(reading, NvmlDownError("unexpected_error"))
        else:
            self._driver.succeed()
            reading.reason = ""

    def _read_all(self, reading: Reading) -> None:
        roll = self._driver.roll_call(reading.hung, reading.asking)
        reading.present, reading.lost = roll.present, roll.lost
        reading.versions = reading.nvml.versions()
        self._watch.follow(reading.nvml, [gpu.uuid for gpu in roll.present])
        for name, collect in self._collectors.items():
            reading.collector, reading.faulty = name, False
            outcome = attempt(name, partial(collect, reading))
            outcome = replace(outcome, success=outcome.success and not reading.faulty)
            reading.outcomes = (*reading.outcomes, outcome)

    def _fail(self, reading: Reading, error: NvmlDownError) -> None:
        reading.reason = error.reason
        self._watch.stop()
        self._driver.fail(error, in_use=bool(self._workers.stuck()))

    def _complete(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """One outcome for each NVML collector; those that were not reached have failed."""
        reached = {outcome.collector: outcome for outcome in outcomes}
        return [reached.get(name, Outcome(name)) for name in self._collectors]
