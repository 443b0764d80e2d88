"""One scrape: read the GPUs and the run directory, run every collector, survive any failure."""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from prometheus_client.core import Metric

from torchmem.explain.thresholds import Thresholds, defaults
from torchmem.exporter.directory_status import DIRECTORY_PROBLEMS, DirectoryStatus
from torchmem.exporter.driver import Driver, FailureLog
from torchmem.exporter.gpu_assignments import GpuAssignments, assignment_families
from torchmem.exporter.gpus import GpuIdentity, GpuLabels, Nvml
from torchmem.exporter.headroom import bounded
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.nvml import NvmlDownError
from torchmem.exporter.pod_names import PodNames
from torchmem.exporter.prices import GpuPrices
from torchmem.exporter.process_owners import ProcessOwners
from torchmem.exporter.reading import (
    DEFAULT_PROCESSES_PER_GPU,
    AbandonedError,
    CollectorResult,
    Reading,
    collector,
    read_and_collect,
    run_collector,
)
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects import (
    clocks,
    ecc,
    gpm,
    identity,
    memory,
    mig,
    nvlink,
    pcie,
    power,
    processes,
    temperature,
    utilization,
    xid_events,
)
from torchmem.exporter.subjects.dead_processes import DeadProcesses, dead_families
from torchmem.exporter.subjects.engine import engine_families
from torchmem.exporter.subjects.misplaced import misplaced_families
from torchmem.exporter.subjects.outside_allocator import (
    OutsideAllocator,
    OutsideBytes,
    outside_families,
)
from torchmem.exporter.subjects.threats import RankThreats
from torchmem.exporter.worker import JobThread, JobThreads
from torchmem.metrics import catalog
from torchmem.metrics.families import families, family, info
from torchmem.node.gpu_holders import GpuHolders
from torchmem.node.host_processes import HostProcesses
from torchmem.node.published import NodeRanks, Published

_log = logging.getLogger(__name__)

DEFAULT_DEADLINE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_NO_DESCRIPTORS = (
    "Ranks are missing, because the exporter has no file descriptor left: raise its limit "
    "(LimitNOFILE= of its unit, or ulimit -n), and restart it."
)

# In this order, the most important first: at the deadline the later ones are missing.
COLLECTORS: Mapping[str, Callable[[Reading], Iterable[Metric]]] = {
    "memory": collector(memory.MemoryInfo, memory.UnifiedMemory, memory.Bar1),
    "mig": mig.families,
    "processes": processes.families,
    "utilization": utilization.families,
    "power": collector(power.Power),
    "temperature": collector(temperature.Temperatures),
    "clocks": collector(clocks.Clocks),
    "ecc": ecc.families,
    "repairs": collector(ecc.Repairs),
    "fans": collector(temperature.Fans),
    "pcie": collector(pcie.Pcie),
    "nvlink": collector(nvlink.NvLink),
    "gpm": collector(gpm.Gpm),
    "pcie_throughput": collector(pcie.PcieThroughput),
}


class Exporter:
    """Collects all metric families on demand; safe to call from several threads.

    `deadline_seconds` limits the wait for the driver. A scrape that reaches it is answered with
    the values read so far, and the collectors that did not finish have failed. A GPU whose call
    hangs is skipped in later scrapes until the call returns: `nvml_gpu_up` is 0 for it, and a
    collector succeeds if all other GPUs responded. `clock` returns Unix seconds.
    `processes_per_gpu`: how many processes of a GPU have series of their own, the largest first;
    `pcie_throughput`: whether to measure PCIe throughput, which takes 40 ms per GPU and scrape;
    `thresholds`: by which ranks are judged, by default the shipped ones; `prices`: what an hour of
    each GPU costs, by default unknown; `workers`: the threads
    that call the driver; `pods`: finds the names of pods; `dead`: finds processes that are gone;
    `assignments`: finds who was given which GPU; `hosts`: reads the ranks' host memory;
    `all_series`: whether ranks also have the series that no rule and no panel reads.
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
        thresholds: Thresholds | None = None,
        prices: GpuPrices | None = None,
        workers: JobThreads[GpuLabels] | None = None,
        pods: PodNames | None = None,
        all_series: bool = False,
        dead: DeadProcesses | None = None,
        assignments: GpuAssignments | None = None,
        hosts: HostProcesses | None = None,
    ) -> None:
        self._driver, self._events = Driver(nvml), xid_events.EventWatcher(clock)
        self._owners = ProcessOwners()
        self._pods, self._hosts = pods or PodNames(), hosts or HostProcesses()
        self._dead, self._assignments = dead or DeadProcesses(), assignments or GpuAssignments()
        self._outside, self._threats = OutsideAllocator(), RankThreats()
        self._mig_gpus: Mapping[str, GpuIdentity] = {}
        self._run_directory, self._all_series = run_directory, all_series
        self._clock, self._started = clock, clock()
        self._version = version("torchmem")
        self._workers = workers or JobThreads()
        self.configure(
            deadline_seconds,
            processes_per_gpu=processes_per_gpu,
            pcie_throughput=pcie_throughput,
            thresholds=thresholds or defaults(),
            prices=prices,
        )
        self._failure_log = FailureLog()
        self._last_reading = self._current_reading = self._new_reading()
        self._found = NodeReading(0.0, reading=self._current_reading)
        self._is_closed = False
        self._collecting, self._lock = threading.Lock(), threading.Lock()

    def configure(
        self,
        deadline_seconds: float,
        *,
        processes_per_gpu: int,
        pcie_throughput: bool,
        thresholds: Thresholds,
        prices: GpuPrices | None = None,
    ) -> None:
        """Set what can change while the exporter runs; it applies from the next collection on."""
        self._deadline_seconds = deadline_seconds
        self._processes_per_gpu = processes_per_gpu
        self._thresholds, self._prices = thresholds, prices or GpuPrices()
        self._collectors = {
            name: collect
            for name, collect in COLLECTORS.items()
            if pcie_throughput or name != "pcie_throughput"
        }

    def collect(self) -> list[Metric]:
        """Return all families; never raises because of a GPU, the driver or a sample file."""
        with self._collecting:
            reading = self._read_driver()
            if not self._is_closed:
                self._failure_log.note(reading, self._deadline_seconds)
            return self._families(reading)

    def known(self) -> list[Metric]:
        """Return the results of the collection in progress, without waiting for the driver.

        Those of the newest one if it has ended meanwhile.
        """
        return self._families(self._current_reading)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._run_directory.path

    def found(self) -> NodeReading:
        """Return the results of the newest collection; empty before the first one."""
        return self._found

    def published(self) -> list[Published]:
        """Return every process of the run directory; raises OSError if it cannot be read."""
        with self._lock:
            return self._run_directory.read(self._clock())

    def close(self) -> None:
        """End the collection in progress, which reads files, and close NVML.

        A driver call that never returns is not waited for.
        """
        self._is_closed = True
        self._workers.current.close()
        self._events.close()
        self._owners.close()
        self._assignments.close()
        if self._collecting.acquire(timeout=_CLOSE_SECONDS):
            self._collecting.release()
        if not self._workers.is_busy:
            # nvmlShutdown may hang, too.
            with closing(JobThread()) as worker:
                worker.run(self._driver.close, _CLOSE_SECONDS)

    def _new_reading(self, hung: frozenset[GpuLabels] = frozenset()) -> Reading:
        return Reading(self._driver.nvml, hung, self._processes_per_gpu)

    def _families(self, reading: Reading) -> list[Metric]:
        with self._lock:
            results = [*self._nvml_results(reading), *self._other_results(reading)]
            own = own_families(results, self._run_directory, self._version)
        started = family(catalog.EXPORTER_START, [((), self._started)])
        return [*(metric for result in results for metric in result.families), started, *own]

    def _read_driver(self) -> Reading:
        """Return a finished reading, or an unfinished one at the deadline.

        The reading is empty while the driver as a whole hangs and after the exporter was closed.
        """
        if not self._is_closed:
            self._leave_hung_gpu()
        reading = self._current_reading = self._new_reading(self._workers.stuck())
        # Checked again: the current worker may have been created after `close`.
        if self._is_closed:
            return reading
        if self._workers.current.run(lambda: self._read(reading), self._deadline_seconds) != "busy":
            self._last_reading = reading
        return reading

    def _leave_hung_gpu(self) -> None:
        """If the last reading still waits for a GPU, let it wait in a separate thread."""
        if self._workers.current.is_busy:
            self._failure_log.note(self._last_reading, self._deadline_seconds)
            hung = self._last_reading.abandon()
            if hung is not None:
                self._workers.leave(hung)

    def _read(self, reading: Reading) -> None:
        """In the driver's thread: list the GPUs, then run every NVML collector."""
        try:
            self._read_gpus(reading)
        except AbandonedError:
            return
        except NvmlDownError as error:
            self._fail(reading, error)
        except Exception:  # noqa: BLE001 - a broken driver must not end the scrape; it is logged
            _log.exception("reading NVML failed")
            self._fail(reading, NvmlDownError("unexpected_error"))
        else:
            self._driver.succeed()
            reading.down_reason = ""

    def _read_gpus(self, reading: Reading) -> None:
        gpus = self._driver.list_gpus(reading.hung, reading.calling)
        reading.present, reading.lost = gpus.present, gpus.lost
        reading.versions = reading.nvml.versions()
        self._events.watch(reading.nvml.subscribe, [gpu.uuid for gpu in gpus.present])
        for name, collect in self._collectors.items():
            reading.collector, reading.call_failed = name, False
            result = run_collector(name, partial(collect, reading))
            if reading.call_failed:
                result = replace(result, success=False)
            reading.results = (*reading.results, result)
        reading.nvml.end_reading()

    def _fail(self, reading: Reading, error: NvmlDownError) -> None:
        reading.down_reason = error.reason
        self._events.stop()
        self._driver.fail(error, in_use=bool(self._workers.stuck()))

    def _nvml_results(self, reading: Reading) -> list[CollectorResult]:
        """Return one result for each NVML collector; those that were not reached have failed."""
        finished = {result.collector: result for result in reading.results}
        return [finished.get(name, CollectorResult(name)) for name in self._collectors]

    def _other_results(self, reading: Reading) -> list[CollectorResult]:
        """Run the collectors that need no driver call."""
        self._mig_gpus = {**self._mig_gpus, **mig.gpus_by_mig_name(reading)}
        known = self._driver.known
        gpus = {**known, **self._mig_gpus}
        gpu = run_collector("gpu", partial(identity.families, reading, known, self._prices))
        events = run_collector("events", partial(xid_events.families, self._events, known))
        published, read = self._read_samples()
        # NVML's processes are joined only under the exporter's own pids.
        is_joinable = reading.nvml.pid_namespace() == self._run_directory.namespace
        joinable = reading if is_joinable else self._new_reading()
        holders, process_info = self._process_info(reading, joinable, published)
        outside, join = self._join(joinable, published, gpus)
        published, samples = self._sample_families(published, read, outside, gpus)
        self._found = NodeReading(
            self._clock(),
            published,
            {uuid: gpu.index for uuid, gpu in gpus.items()},
            outside=outside.with_managed,
            kill_causes=self._hosts.kill_causes,
            thresholds=self._thresholds,
            run_dir=self.run_dir,
            missing=_NO_DESCRIPTORS if self._run_directory.lacks_descriptors else None,
            holders=replace(holders, held=outside.held),
            reading=reading,
            identities=known.values(),
        )
        is_whole = not self._run_directory.lacks_descriptors
        samples = replace(samples, success=samples.success and is_whole)
        gpu = replace(gpu, success=not reading.down_reason)
        return [gpu, events, samples, process_info, join]

    def _process_info(
        self, reading: Reading, joinable: Reading, published: Sequence[Published]
    ) -> tuple[GpuHolders, CollectorResult]:
        """Return who holds the GPUs and should not, and the facts about all processes.

        `joinable`: the reading, or an empty one if its pids are not the exporter's.
        """
        facts: Mapping[int, Mapping[str, str]] = {}

        def read() -> GpuHolders:
            nonlocal facts
            jobs = self._assignments.jobs()
            facts = processes.process_facts(joinable, published, self._owners, self._pods, jobs)
            dead = self._dead.update(joinable, facts, published)
            return GpuHolders({}, dead, self._assignments.update(reading, facts, jobs))

        def found(holders: GpuHolders) -> Iterator[Metric]:
            yield from processes.info_families(joinable, facts, holders.dead)
            yield from dead_families(holders.dead, joinable)
            yield from assignment_families(holders.assigned, reading)

        return read_and_collect("process_info", read, found, GpuHolders())

    def _read_samples(self) -> tuple[Sequence[Published], CollectorResult]:
        return read_and_collect(
            "samples",
            lambda: self._hosts.update(self._run_directory.read(self._clock())),
            lambda _: (),
            [],
        )

    def _sample_families(
        self,
        published: Sequence[Published],
        read: CollectorResult,
        outside: OutsideBytes,
        gpus: Mapping[str, GpuIdentity],
    ) -> tuple[Sequence[Published], CollectorResult]:
        """Return the processes with the headroom that is left, and the series of the samples."""
        if not read.success:
            return published, read
        published, result = read_and_collect(
            "samples",
            lambda: bounded(published, outside.uses, outside.by_process),
            lambda items: [
                *sample_families(items, gpus, all_series=self._all_series),
                *engine_families(items, outside.uses, gpus),
                *self._threats.families(items, gpus, self._thresholds),
                *self._hosts.families(items),
            ],
            published,
        )
        return published, replace(result, seconds=(result.seconds or 0) + (read.seconds or 0))

    def _join(
        self, reading: Reading, published: Sequence[Published], gpus: Mapping[str, GpuIdentity]
    ) -> tuple[OutsideBytes, CollectorResult]:
        def found(outside: OutsideBytes) -> Iterator[Metric]:
            yield from outside_families(outside, all_series=self._all_series)
            ranks = NodeRanks(self._clock(), published, holders=GpuHolders(outside.held))
            yield from misplaced_families(ranks, gpus)

        return read_and_collect(
            "join",
            lambda: self._outside.update(reading, published, gpus, self._clock()),
            found,
            OutsideBytes(),
        )


def sample_families(
    published: Sequence[Published], gpus: Mapping[str, GpuIdentity], *, all_series: bool = False
) -> Iterator[Metric]:
    """Yield the series of every sample; `gpus`: by UUID, also those of MIG devices."""
    indices = {uuid: str(gpu.index) for uuid, gpu in gpus.items()}
    return families([item.view(indices) for item in published], all_series=all_series)


def own_families(
    results: Sequence[CollectorResult], run_directory: RunDirectory, own_version: str
) -> Iterator[Metric]:
    """Yield the exporter's version, the result of each collector, and the run directory's state."""
    facts = {"version": own_version, "python_version": platform.python_version()}
    yield info(catalog.BUILD_INFO, [((), facts)])
    success = [((result.collector,), float(result.success)) for result in results]
    yield family(catalog.COLLECTOR_SUCCESS, success)
    seconds = [((result.collector,), result.seconds) for result in results]
    yield family(catalog.COLLECTOR_DURATION, seconds)
    rejected = [((reason,), count) for reason, count in run_directory.rejections.items()]
    yield family(catalog.REJECTED_SAMPLES, rejected)
    left_out = [((reason,), count) for reason, count in run_directory.faults.items()]
    yield family(catalog.IMPOSSIBLE_VALUES, left_out)
    yield from run_directory_families(run_directory.status)


def run_directory_families(status: DirectoryStatus) -> Iterator[Metric]:
    """Yield what is wrong with the run directory, and the room on its file system."""
    problems = [((name,), float(name == status.problem)) for name in DIRECTORY_PROBLEMS]
    yield family(catalog.RUN_DIRECTORY_PROBLEM, problems)
    yield family(catalog.RUN_DIRECTORY_SIZE, [((), status.size_bytes)])
    yield family(catalog.RUN_DIRECTORY_FREE, [((), status.free_bytes)])
    yield family(catalog.RUN_DIRECTORY_INODES, [((), status.inodes)])
    yield family(catalog.RUN_DIRECTORY_FREE_INODES, [((), status.free_inodes)])
