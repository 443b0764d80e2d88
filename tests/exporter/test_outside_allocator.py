"""Memory outside the allocator: NVML and a sample are joined only if read at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exposition import Exposition, scrape
from support.fake_nvml import FakeNode, binding
from support.publishing import own_process, own_sample, publish
from support.samples import UUID

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.nvml import NvmlDevice, NvmlLibrary
from torchmem.exporter.reading import Reading
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.outside_allocator import (
    OutsideAllocator,
    OutsideBytes,
    outside_families,
)
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.node.published import Published
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import (
    Allocator,
    ByPool,
    Counters,
    DeviceSample,
    FirstRead,
    Sample,
)

OpenExporter = Callable[..., Exporter]
ScrapeWith = Callable[..., Exposition]
MIB, GIB = 1 << 20, 1 << 30
OUTSIDE, MOMENT = "torchmem_outside_allocator_bytes", "torchmem_outside_allocator_timestamp_seconds"
START = "torchmem_outside_allocator_start_bytes"
UNBACKED = "torchmem_reserved_unbacked_bytes"
OTHER = "GPU-ffffffff-0000-4000-8000-00000000000b"
FREE = 17 * GIB
RESERVED = 60 * GIB
READ_AT = 1_700_000_000.0


def h100(
    uuid: str = UUID,
    index: int = 0,
    *rows: ProcessMemory,
    free: int = FREE,
    is_listed: bool = True,
    error_code: int | None = None,
) -> FakeGpu:
    """Return an 80 GiB GPU with these processes, or without a process list."""
    memory = MemoryInfo(80 * GIB, 79 * GIB - free, free, GIB)
    processes = Processes(rows, memory=memory, free={None: free}) if is_listed else None
    return FakeGpu(GpuIdentity(index, uuid), memory, processes, error_code=error_code)


def own_row(used: int | None) -> ProcessMemory:
    """Return NVML's row of the process that runs the tests."""
    return ProcessMemory(os.getpid(), used)


def device(**changes: Any) -> DeviceSample:
    """Return a device with the allocator's and the driver's bytes of `READ_AT`."""
    read = DeviceSample(
        index=0,
        uuid=UUID,
        name="H100",
        total_bytes=79 * GIB,
        allocator=allocator(RESERVED),
        counters=Counters(device_allocs=120),
        stats_timestamp=READ_AT,
        driver_free_bytes=FREE,
    )
    return replace(read, **changes)


def allocator(reserved: int) -> Allocator:
    """Return statistics with the given number of reserved bytes."""
    pools = ByPool(0, reserved)
    return Allocator(pools, pools, pools, None, None, reserved, reserved, reserved)


def read_sample(*devices: DeviceSample, **changes: Any) -> Sample:
    """Return the sample of the process that runs the tests."""
    return own_sample(devices=devices or (device(),), **changes)


@pytest.fixture
def scrape_with(open_exporter: OpenExporter) -> ScrapeWith:
    """A function that scrapes once with these GPUs."""
    return lambda *fake_gpus: scrape(open_exporter(FakeNvml.of(*fake_gpus), all_series=True))


def test_it_is_the_difference(run_dir: Path, scrape_with: ScrapeWith) -> None:
    """NVML's bytes of the process minus its reserved bytes, with labels and the sample's time."""
    publish(run_dir, read_sample())

    exposition = scrape_with(h100(UUID, 4, own_row(RESERVED + 700 * MIB)))

    labels = {"gpu": "4", "uuid": UUID, "rank": "0", "pid": str(os.getpid()), "run": "night"}
    assert exposition.value(OUTSIDE, **labels) == 700.0 * MIB
    assert exposition.value(MOMENT, **labels) == READ_AT
    assert (
        exposition.series[OUTSIDE].keys()
        == exposition.series["torchmem_reserved_peak_bytes"].keys()
    )


def test_process_on_several_gpus_is_joined_on_each(run_dir: Path, scrape_with: ScrapeWith) -> None:
    """One pid on two GPUs has a difference on each."""
    publish(run_dir, read_sample(device(), device(index=1, uuid=OTHER)))

    exposition = scrape_with(
        h100(UUID, 0, own_row(RESERVED + 1)), h100(OTHER, 1, own_row(RESERVED + 2))
    )

    assert exposition.by("uuid", OUTSIDE) == {UUID: 1.0, OTHER: 2.0}


@pytest.mark.parametrize(
    "fake_gpus",
    [
        [],
        [h100()],
        [h100(UUID, 0, own_row(None))],
        [h100(UUID, 0, ProcessMemory(1, 70 * GIB))],
        [h100(OTHER, 0, own_row(70 * GIB))],
        [h100(is_listed=False)],
        [h100(UUID, 0, own_row(70 * GIB), error_code=15)],
        [h100(UUID, 0, own_row(1))],
        [h100(UUID, 0, own_row(70 * GIB), free=FREE - GIB)],
    ],
    ids=[
        "no GPU",
        "process not listed",
        "bytes not permitted",
        "another process",
        "another GPU",
        "no process list",
        "lost GPU",
        "less than reserved",
        "memory was allocated since",
    ],
)
def test_no_difference_without_nvml(
    run_dir: Path, scrape_with: ScrapeWith, fake_gpus: list[FakeGpu]
) -> None:
    """Without NVML's bytes of this process on this GPU at that moment there is no difference."""
    publish(run_dir, read_sample())

    exposition = scrape_with(*fake_gpus)

    assert exposition.matching(OUTSIDE) == {}
    assert exposition.value("torchmem_process_state", state="running") == 1.0


@pytest.mark.parametrize(
    "sample",
    [
        read_sample(process=own_process(start_ticks=None)),
        read_sample(process=own_process(start_ticks=1)),
        read_sample(process=own_process(pid_namespace=4026539999)),
        read_sample(ended="exited"),
        read_sample(device(allocator=None)),
        read_sample(device(uuid=None)),
        read_sample(device(stats_timestamp=None)),
        read_sample(device(driver_free_bytes=None)),
    ],
    ids=[
        "start time unknown",
        "reused pid",
        "foreign namespace",
        "ended",
        "no allocator numbers",
        "no UUID",
        "time of the statistics unknown",
        "no free memory of that time",
    ],
)
def test_no_difference_for_an_uncertain_sample(
    run_dir: Path, scrape_with: ScrapeWith, sample: Sample
) -> None:
    """A sample that may describe another process or moment than NVML is not joined."""
    publish(run_dir, sample, f"x{SAMPLE_SUFFIX}")

    assert scrape_with(h100(UUID, 0, own_row(70 * GIB))).matching(OUTSIDE) == {}


def test_no_difference_in_another_pid_namespace(open_exporter: OpenExporter, run_dir: Path) -> None:
    """Pid 7 of the host is not pid 7 of the exporter's own pid namespace."""
    publish(run_dir, read_sample())
    exposition = scrape(
        open_exporter(FakeNvml(lambda: [h100(UUID, 0, own_row(70 * GIB))], namespace=1))
    )

    assert exposition.matching(OUTSIDE) == {}
    assert exposition.matching("nvml_process_info") == {}
    assert len(exposition.matching("nvml_process_memory_bytes")) == 1


@dataclass
class SharedGpu:
    """A GPU with one rank and other processes, at a second of its own.

    `context` and `libraries` are what the rank holds outside its allocator; `has_free` is whether
    NVML reports free memory, unlike on GPUs that share the CPU's memory. `first` is the first read
    of the rank's SDK, and `start` what a scrape shows of that moment. `unbacked` is what another
    allocator has given back behind the reserved addresses.
    """

    reserved: int = RESERVED
    others: int = 0
    context: int = 500 * MIB
    now: float = READ_AT
    allocs: int = 120
    incarnation: int = 1
    has_free: bool = True
    libraries: int = 0
    unbacked: int = 0
    is_up: bool = True
    first: FirstRead | None = None
    start: float | None = None

    def __post_init__(self) -> None:
        self.outside, self.found = OutsideAllocator(), OutsideBytes()
        self.read()

    @property
    def free(self) -> int:
        """What the driver has free."""
        return 79 * GIB - self.used - self.others

    @property
    def used(self) -> int:
        """What the rank holds on the GPU."""
        held = self.context + self.libraries + self.reserved - self.unbacked
        return held if self.is_up else 0

    def allocate(self, size: int) -> None:
        """Have the rank take memory from the driver, or return it."""
        self.reserved, self.allocs, self.now = self.reserved + size, self.allocs + 1, self.now + 1

    def read(self) -> None:
        """Have the SDK read the allocator and the driver."""
        self.now += 1
        self.first = self.first or FirstRead(self.now, self.reserved, self.free)
        self.sample = device(
            allocator=allocator(self.reserved),
            counters=Counters(device_allocs=self.allocs),
            stats_timestamp=self.now,
            driver_free_bytes=self.free,
            first_read=self.first,
        )

    def stop(self) -> None:
        """Have the rank end."""
        self.is_up, self.now = False, self.now + 1

    def begin(self) -> None:
        """Have another rank take its place, with a context only, and its SDK read the GPU."""
        self.incarnation, self.is_up, self.first = self.incarnation + 1, True, None
        self.libraries = self.reserved = 0
        self.read()

    def scrape(self, *, is_alive: bool = True) -> dict[str, float]:
        """Return what a scrape shows, by metric."""
        self.now += 1
        process = own_process(start_ticks=self.incarnation)
        published = [Published(read_sample(self.sample, process=process), 7, "running", True)]
        rows = [ProcessMemory(7, self.used)] if self.is_up else []
        if self.others:
            rows.append(ProcessMemory(8, self.others))
        free: dict[str | None, int] = {None: self.free} if self.has_free else {}
        nvml = FakeNvml.of(FakeGpu(GpuIdentity(0, UUID), Processes(rows, free=free)))
        nvml.count()
        reading = Reading(nvml, present=(GpuIdentity(0, UUID),))
        reading.read(Processes)
        self.found = self.outside.update(
            reading,
            published if is_alive and self.is_up else [],
            {UUID: GpuIdentity(0, UUID)},
            self.now,
        )
        families = outside_families(self.found)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        self.start = values.pop(START, None)
        return values

    def shown(self) -> dict[str, float]:
        """What a scrape shows if both sides are of the moment of the newest sample."""
        return {OUTSIDE: self.context + self.libraries, MOMENT: self.sample.stats_timestamp or 0.0}


def test_its_own_allocations_cancel_out() -> None:
    """What a rank alone on its GPU takes between the sample and NVML changes nothing."""
    gpu = SharedGpu()
    gpu.scrape()
    for size in (4 * GIB, -13 * GIB, 64 * MIB):
        gpu.read()
        gpu.allocate(size)

        assert gpu.shown() == gpu.scrape()


def test_memory_that_was_given_back_behind_the_allocator() -> None:
    """Reserved and outside bytes minus those that are not on the GPU are what NVML reports."""
    gpu = SharedGpu()
    before = gpu.scrape()
    for unbacked in (40 * GIB, 50 * GIB):
        gpu.unbacked = unbacked
        gpu.read()
        assert before | {UNBACKED: float(unbacked)} == gpu.scrape()
        assert [gpu.used] == [gpu.reserved + outside for outside in gpu.found.by_process.values()]

    gpu.unbacked = 0
    gpu.read()
    assert gpu.shown() == gpu.scrape()


def test_memory_that_was_taken_again_without_a_read() -> None:
    """An engine that woke up has all its memory on the GPU, though its SDK has not read since."""
    gpu = SharedGpu()
    before = gpu.scrape()
    gpu.unbacked = 40 * GIB
    gpu.read()
    assert gpu.scrape() == before | {UNBACKED: 40.0 * GIB}

    gpu.unbacked = 10 * GIB
    assert gpu.scrape() == before | {UNBACKED: 10.0 * GIB}
    gpu.unbacked = 0
    assert gpu.scrape() == before
    assert [gpu.used] == [gpu.reserved + outside for outside in gpu.found.by_process.values()]


def test_memory_that_was_given_back_before_the_first_scrape() -> None:
    """Where the bytes outside are not known, what is surely not on the GPU is shown."""
    gpu = SharedGpu(unbacked=40 * GIB)

    assert {UNBACKED: 40.0 * GIB - gpu.context} == gpu.scrape()


def test_the_value_is_held_while_a_neighbor_allocates() -> None:
    """What a neighbor takes could be the rank's: the value stays, with the time that it is from."""
    gpu = SharedGpu(others=GIB)
    before = gpu.scrape()
    gpu.allocate(GIB)
    gpu.read()
    gpu.others += 3 * GIB

    assert before == gpu.scrape() != gpu.shown()
    gpu.read()
    assert gpu.shown() == gpu.scrape()


def test_a_steady_rank_needs_no_free_memory_of_the_driver() -> None:
    """Where NVML reports no free memory, two scrapes in which nothing changed give the value."""
    gpu = SharedGpu(has_free=False, others=GIB)
    assert gpu.scrape() == {}
    assert gpu.scrape() == {}
    gpu.read()
    assert gpu.shown() == gpu.scrape()

    before = gpu.shown()
    gpu.allocate(GIB)
    assert before == gpu.scrape()
    gpu.read()
    assert before == gpu.scrape()
    gpu.read()
    assert gpu.shown() == gpu.scrape()


def test_another_process_starts_without_a_value() -> None:
    """What is held is forgotten when the process ends, and not given to one with the same pid."""
    gpu = SharedGpu()
    gpu.scrape()
    gpu.allocate(GIB)
    gpu.incarnation += 1
    assert gpu.scrape() == {}

    gpu.incarnation -= 1
    assert gpu.scrape() == {}


def test_a_value_does_not_outlive_its_process() -> None:
    """A process that is not published for one scrape starts again without a value."""
    gpu = SharedGpu()
    gpu.scrape()
    gpu.allocate(GIB)

    assert gpu.scrape(is_alive=False) == {}
    assert gpu.scrape() == {}


def test_the_start_outlives_a_gap() -> None:
    """A rank whose file could not be read for a while has its start again, until 15 minutes."""
    gpu = SharedGpu(others=GIB)
    gpu.scrape()
    gpu.libraries = GIB
    gpu.scrape(is_alive=False)
    gpu.read()
    gpu.scrape()
    assert gpu.context == gpu.start

    gpu.now += 1000
    gpu.scrape(is_alive=False)
    gpu.read()
    gpu.scrape()
    assert gpu.start is None


def test_the_start_is_kept_while_libraries_take_memory() -> None:
    """What a rank held when its SDK first read the GPU stays apart from what came later."""
    gpu = SharedGpu(others=GIB)
    gpu.scrape()
    assert gpu.context == gpu.start
    gpu.libraries = 3 * GIB
    gpu.read()

    assert gpu.shown() == gpu.scrape()
    assert gpu.context == gpu.start


@pytest.mark.parametrize("is_listed_before", [False, True], ids=["free GPU", "context only"])
def test_the_start_follows_from_a_scrape_before_it(is_listed_before: bool) -> None:
    """A rank alone on a GPU that the exporter saw before it needs no scrape at its first read."""
    gpu = SharedGpu()
    gpu.stop()
    gpu.scrape()
    if is_listed_before:
        gpu.is_up, gpu.reserved = True, 0
        gpu.scrape(is_alive=False)
    gpu.begin()
    gpu.allocate(9 * GIB)
    gpu.libraries = GIB
    gpu.read()
    gpu.allocate(GIB)
    gpu.scrape()

    assert gpu.context == gpu.start


@pytest.mark.parametrize("neighbor", [0, GIB], ids=["alone", "neighbor"])
@pytest.mark.parametrize("scrapes", [1, 3])
def test_the_start_follows_after_scrapes_without_the_sample(scrapes: int, neighbor: int) -> None:
    """The start is found after scrapes before its publication, unless they saw other processes."""
    gpu = SharedGpu()
    gpu.stop()
    gpu.scrape()
    gpu.begin()
    gpu.allocate(9 * GIB)
    gpu.others = neighbor
    for _ in range(scrapes):
        gpu.scrape(is_alive=False)
    gpu.others = 0
    gpu.libraries = GIB
    gpu.read()
    gpu.scrape()

    assert gpu.start == (None if neighbor else gpu.context)


@pytest.mark.parametrize("others", [0, GIB], ids=["late exporter", "neighbor"])
def test_an_unseen_start_is_absent(others: int) -> None:
    """Without a scrape before the rank, or beside another process, a later value is not a start."""
    gpu = SharedGpu(others=others)
    if others:
        gpu.stop()
        gpu.scrape()
        gpu.begin()
    gpu.allocate(GIB)
    gpu.libraries = GIB
    for _ in range(3):
        gpu.read()
        gpu.scrape()

    assert gpu.shown() == gpu.scrape()
    assert gpu.start is None


def test_another_rank_has_another_start() -> None:
    """The start is that of the process, not that of the GPU, the pid or the SDK's next session."""
    gpu = SharedGpu()
    gpu.scrape()
    gpu.first, gpu.libraries = None, GIB
    gpu.read()
    gpu.scrape()
    assert gpu.context == gpu.start

    gpu.incarnation += 1
    gpu.scrape()
    assert gpu.context + gpu.libraries == gpu.start


# Sizes of the neighbors are not multiples of the rank's, so that no sum of both is 0 by chance.
_ACTIONS = st.one_of(
    st.integers(-4, 4).map(lambda count: ("allocate", count * GIB)),
    st.integers(0, 4).map(lambda count: ("others", int(count * GIB * 2**0.5))),
    st.sampled_from([("read", 0), ("scrape", 0)]),
)


@given(st.lists(_ACTIONS, max_size=40), st.booleans())
def test_no_value_is_ever_wrong(actions: Sequence[tuple[str, int]], has_free: bool) -> None:
    """Whatever the rank and its neighbors do, a value is the true one.

    Neighbors that come and go between two scrapes are the exception: they change at most once.
    """
    gpu, are_others_free_to_change = SharedGpu(reserved=30 * GIB, has_free=has_free), True
    for action, size in actions:
        if action == "allocate" and 0 <= gpu.reserved + size <= 60 * GIB:
            gpu.allocate(size)
        elif action == "others" and are_others_free_to_change:
            gpu.others, are_others_free_to_change = size, False
        elif action == "read":
            gpu.read()
        elif action == "scrape":
            assert abs(gpu.scrape().get(OUTSIDE, gpu.context) - gpu.context) <= 32 * MIB
            are_others_free_to_change = True


_EVENTS = _ACTIONS | st.sampled_from([("libraries", GIB), ("restart", 0)])


@given(st.lists(_EVENTS, max_size=40))
def test_no_start_is_ever_wrong(events: Sequence[tuple[str, int]]) -> None:
    """Whatever ranks and neighbors do, a start is what the rank held at its SDK's first read.

    Neighbors that come and go between two scrapes are the exception: they change at most once.
    """
    gpu, are_others_free_to_change = SharedGpu(reserved=0), True
    truth = gpu.context
    for event, size in events:
        if event == "allocate" and 0 <= gpu.reserved + size <= 30 * GIB:
            gpu.allocate(size)
        elif event == "others" and are_others_free_to_change:
            gpu.others, are_others_free_to_change = size, False
        elif event == "libraries" and gpu.libraries < 9 * GIB:
            gpu.libraries += size
        elif event == "restart":
            gpu.stop()
            gpu.begin()
        elif event == "read":
            gpu.read()
        elif event == "scrape":
            gpu.scrape()
            assert gpu.start is None or abs(gpu.start - truth) <= 32 * MIB
            are_others_free_to_change = True


class Allocating(NvmlDevice):
    """A GPU whose free memory changes while its processes are listed."""

    def __init__(self, nvml: NvmlLibrary, node: FakeNode) -> None:
        super().__init__(nvml, nvml.require("nvmlDeviceGetHandleByIndex", 0))
        self._node = node

    def call_first(self, names: Sequence[str], *arguments: Any) -> Any:
        """Have a process allocate 3 GiB, then list the processes."""
        self._node.change("gpu 0", MemoryInfo=f"{80 * GIB} {GIB} {13 * GIB} {66 * GIB}")
        return super().call_first(names, *arguments)


def test_a_list_belongs_to_the_free_memory_before_and_after(tmp_path: Path) -> None:
    """Free memory that changes while the processes are listed is not that of the list."""
    node = FakeNode(tmp_path, "h100_busy")
    library = NvmlLibrary(binding(node.library()))
    node.nvml().open()
    still = Processes.read(NvmlDevice(library, library.require("nvmlDeviceGetHandleByIndex", 0)))
    assert still
    assert still.memory
    assert {None: still.memory.free} == still.free

    moving = Processes.read(Allocating(library, node))
    assert moving
    assert moving.memory == still.memory
    assert moving.free == {}
