"""What Python's collector frees after an OOM: measured, named, and without harm."""

from __future__ import annotations

import ctypes
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.garbage import no_collection
from support.waiting import until

from torchmem.explain.garbage import MAX_TYPES, GarbageType
from torchmem.explain.oom_report import OomReport, decode
from torchmem.explain.remedies import remedies
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.sdk.oom.garbage import MIN_BYTES, WATCHED_SECONDS, GarbageMeter
from torchmem.sdk.oom.garbage_types import can_collect, collect
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20
Opener = Callable[..., Session]
Run = Callable[..., subprocess.CompletedProcess[str]]
Published = Callable[[], list[dict[str, Any]]]


class Tensor:
    """Counts as a tensor of one byte for each instance before it."""


def storage_of(value: object) -> tuple[int, int] | None:
    """Return the storage of a Tensor."""
    return (id(value), 1) if type(value) is Tensor else None


class Cycle:
    """Refers to itself, and to something else."""

    def __init__(self, other: object) -> None:
        self.me, self.other = self, other


class Outer(Cycle):
    """Another type."""


@pytest.fixture(autouse=True)
def _only_this_garbage() -> Iterator[None]:
    gc.collect()
    with no_collection():
        yield
    gc.collect()


def _fail(tensor: object) -> None:
    try:
        int("no")
    except ValueError as error:
        failure = error  # noqa: F841 - makes the cycle


def _make_list() -> None:
    cycle: list[object] = [Tensor()]
    cycle.append(cycle)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Cycle(Tensor()), GarbageType("Cycle", 1)),
        (lambda: Cycle([{"a": (Tensor(), Tensor())}]), GarbageType("Cycle", 1)),
        (lambda: Outer(Cycle(Tensor())), GarbageType("Cycle", 1)),
        (lambda: _fail(Tensor()), GarbageType("ValueError", 1, is_exception=True)),
        (_make_list, GarbageType("list", 1)),
    ],
    ids=["object", "containers", "closest", "exception", "list"],
)
def test_the_closest_type_that_says_something(
    make: Callable[[], object], expected: GarbageType
) -> None:
    """Containers and frames are passed over, up to the first object with a type of its own."""
    make()

    assert collect(storage_of) == (expected,)


def test_types_with_most_bytes_come_first_and_are_few() -> None:
    """At most MAX_TYPES are named, by their bytes, with the number of their objects."""
    kinds = [type(f"Kind{number}", (Cycle,), {}) for number in range(MAX_TYPES + 3)]
    for number, kind in enumerate(kinds, 1):
        for _ in range(number):
            kind(Tensor())

    assert [(found.name, found.count) for found in collect(storage_of)] == [
        (f"Kind{number - 1}", number) for number in range(MAX_TYPES + 3, 3, -1)
    ]


def test_garbage_without_tensors_has_no_types() -> None:
    """Objects that keep no memory of the GPU are collected and not named."""
    reference = weakref.ref(Cycle(None))

    assert collect(storage_of) == ()
    assert reference() is None


class Strange(type):
    """A metaclass whose classes have no usable attributes."""

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(cls, other: object) -> bool:
        raise AssertionError

    def __hash__(cls) -> int:
        raise AssertionError


def test_no_code_of_the_scripts_runs() -> None:
    """A type that cannot be compared or asked is named all the same."""
    odd: Any = Strange("Odd", (), {"__slots__": ("me", "other", "__weakref__")})
    value: Any = object.__new__(odd)
    for name, referred in (("me", value), ("other", Tensor())):
        type.__dict__["__dict__"].__get__(odd)[name].__set__(value, referred)
    del value, referred

    assert collect(storage_of) == (GarbageType("Odd", 1),)


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_left_as_it_was(fails: bool) -> None:
    """Flags, `gc.garbage` and whether it is enabled stay, also if something fails."""
    kept = object()
    gc.garbage.append(kept)
    gc.set_debug(gc.DEBUG_UNCOLLECTABLE)
    reference = weakref.ref(Cycle(Tensor()))
    try:
        if fails:
            with pytest.raises(ZeroDivisionError):
                collect(lambda _: divmod(1, 0))
        else:
            collect(storage_of)
        assert (gc.get_debug(), gc.garbage) == (gc.DEBUG_UNCOLLECTABLE, [kept])
        assert not gc.isenabled()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert reference() is None


def test_a_finalizer_runs_once() -> None:
    """`__del__` and the callbacks of weak references run as in one collection."""
    calls: list[str] = []

    class Finalized(Cycle):
        def __del__(self) -> None:
            calls.append("del")

    value = Finalized(Tensor())
    reference = weakref.ref(value, lambda _: calls.append("weak"))
    del value
    collect(storage_of)

    assert (sorted(calls), reference()) == (["del"], None) or sorted(calls) == ["del", "weak"]


def test_a_script_that_saves_all_garbage_is_left_alone() -> None:
    """With `gc.DEBUG_SAVEALL` nothing would be freed."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert not can_collect()
    finally:
        gc.set_debug(0)
    assert can_collect()


class Holder(Cycle):
    """Frees a block when it is collected."""

    def __init__(self, allocator: DeviceCachingAllocator, size: int) -> None:
        super().__init__(None)
        self.allocator, self.block = allocator, allocator.malloc(size)

    def __del__(self) -> None:
        self.allocator.free(self.block)


def test_a_collection_after_the_oom_counts(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend
) -> None:
    """What the collector frees by itself before the end was garbage, too."""
    meter = GarbageMeter(backend, Errors())
    Holder(allocator, 40 * MIB)
    meter.watch(0)
    gc.collect(0)
    Holder(allocator, 60 * MIB)
    found = meter.measured(with_line=False)

    assert found is not None
    assert (found.bytes, found.is_collector_off) == (100 * MIB, True)


def test_little_garbage_is_not_worth_a_word(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend
) -> None:
    """Less than a MiB is left out."""
    meter = GarbageMeter(backend, Errors())
    meter.watch(0)
    Holder(allocator, MIN_BYTES // 2)

    assert meter.measured(with_line=False) is None


@pytest.mark.parametrize(("is_dying", "seconds"), [(False, 0.0), (True, WATCHED_SECONDS + 1)])
def test_collections_are_watched_only_while_the_process_may_die(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend, is_dying: bool, seconds: float
) -> None:
    """After survival, or half a minute, the collector calls nothing of the SDK."""
    now = [0.0]
    before = list(gc.callbacks)
    meter = GarbageMeter(backend, Errors(), lambda: now[0])
    meter.watch(0)
    meter.expire(is_dying=True)
    assert len(gc.callbacks) == len(before) + 1
    now[0] = seconds
    meter.expire(is_dying=is_dying)

    assert gc.callbacks == before


def test_a_run_without_an_oom_pays_nothing(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend, open_session: Opener
) -> None:
    """The collector calls the SDK from an OOM on, until a step shows that the run has survived."""
    before = list(gc.callbacks)
    open_session(backend, interval=0.01)
    allocator.malloc(MIB)
    backend.step()
    assert gc.callbacks == before
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)
    assert len(gc.callbacks) == len(before) + 1
    assert not gc.isenabled()
    backend.step()
    until(lambda: gc.callbacks == before)


def test_the_collector_is_not_due_sooner(backend: SimulatedBackend) -> None:
    """Objects that an OOM's report leaves do not count: as many are deleted."""
    meter = GarbageMeter(backend, Errors())
    left = [[] for _ in range(500)]  # type: ignore[var-annotated]
    count = gc.get_count()[0]
    meter.watch(0)

    assert gc.get_count()[0] < count - len(left)


def test_a_collection_in_another_thread_reads_nothing(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend
) -> None:
    """It might wait for the allocator while it holds the GIL."""
    meter = GarbageMeter(backend, Errors())
    meter.watch(0)
    Holder(allocator, 40 * MIB)
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()

    assert meter.measured(with_line=False) is None


class AlarmError(Exception):
    """What a signal handler raises."""


class Alarm(weakref.ref[Cycle]):
    """With raise(3) as its callback, sends SIGALRM where no Python code runs."""

    _as_parameter_ = int(signal.SIGALRM)


@pytest.fixture
def alarm() -> Iterator[None]:
    """Have SIGALRM raise AlarmError, and the collector call no function of others.

    Hypothesis leaves one in `gc.callbacks`, and Python ignores what is raised there.
    """

    def handler(*_: object) -> None:
        raise AlarmError

    previous, callbacks = signal.signal(signal.SIGALRM, handler), gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("alarm")
def test_a_timeout_during_a_collection_reaches_the_script(backend: SimulatedBackend) -> None:
    """Python ignores what a signal handler raises in a function that its collector calls."""
    hook = sys.unraisablehook
    meter = GarbageMeter(backend, Errors())
    meter.watch(0)
    cycle = Cycle(None)
    _alarm = Alarm(cycle, getattr(ctypes.CDLL(None), "raise"))
    del cycle
    gc.collect()

    with pytest.raises(AlarmError):
        backend.step()
    meter.stop()
    assert sys.unraisablehook is hook


@pytest.mark.usefixtures("alarm")
def test_what_other_functions_of_the_collector_raise_is_left_to_python(
    backend: SimulatedBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer that fails is told on stderr, as without the SDK."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    meter = GarbageMeter(backend, Errors())
    meter.watch(0)
    cycle = Cycle(None)

    def fail(_: object) -> None:
        raise AlarmError

    _failing = weakref.ref(cycle, fail)
    del cycle
    gc.collect()
    meter.stop()

    backend.step()
    assert "Exception ignored in" in capsys.readouterr().err


KEPT = """
import gc
class Kept:
    def __init__(self, mib):
        self.block = None; self.me = self
        self.block = allocator.malloc(mib << 20)
    def __del__(self):
        if self.block: allocator.free(self.block)
sdk.instrument(backend=backend); backend.step()
"""


def _reports(directory: Path) -> list[OomReport]:
    return [decode(path.read_bytes()) for path in sorted(directory.rglob(f"*{REPORT_SUFFIX}"))]


def test_garbage_that_ends_a_script(run_script: Run, published: Published, tmp_path: Path) -> None:
    """The report and the sample name it; the traceback and the exit code are as without it."""
    done = run_script(f"{KEPT}\nwhile True: Kept(40)")

    (report,) = _reports(tmp_path)
    (sample,) = published()
    assert report.garbage is not None
    assert report.garbage.bytes == 1000 * MIB
    assert report.verdict is not None
    assert report.verdict.why is not None
    assert report.verdict.why.onset == report.oom.onset == "garbage"
    assert sample["devices"][0]["last_oom"]["onset"] == "garbage"
    assert sample["devices"][0]["last_oom"]["remedy"] == remedies(report)[0].kind == "cycle"
    assert (done.returncode, sample["ended"]) == (1, "oom")
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    "script",
    [
        "kept = []\nwhile True: kept.append(Kept(40))",
        "try:\n    while True: Kept(40)\nexcept OutOfMemoryError: sys.exit(3)",
        "gc.set_debug(gc.DEBUG_SAVEALL)\nwhile True: Kept(40)",
        "sys.ps1 = '> '\nwhile True: Kept(40)",
        """
class Model:
    def __init__(self): self.layer = Kept(900); self.me = self
def train():
    model = Model()
    Kept(500)
try: train()
except OutOfMemoryError as error: text = str(error)
raise OutOfMemoryError(text)
""",
    ],
    ids=["leak", "caught", "saved", "prompt", "other_exception"],
)
def test_no_garbage_is_told(run_script: Run, tmp_path: Path, script: str) -> None:
    """A leak is none, nor what lived until the exception was replaced; a prompt goes on."""
    run_script(f"{KEPT}\n{script}")

    (report,) = _reports(tmp_path)
    assert report.garbage is None
    assert report.oom.onset != "garbage"


def test_a_finalizer_that_fails_changes_nothing(run_script: Run, tmp_path: Path) -> None:
    """An exception in `__del__` is ignored, as Python does, and the report is there."""
    done = run_script(f"""{KEPT}
class Failing:
    def __init__(self): self.me = self
    def __del__(self): raise SystemExit(7)
Failing()
while True: Kept(40)
""")

    (report,) = _reports(tmp_path)
    assert report.garbage is not None
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stderr


def test_ctrl_c_during_the_collection_is_not_lost(run_script: Run, tmp_path: Path) -> None:
    """What a signal handler raises meanwhile is raised, and the garbage is found at exit."""
    done = run_script(f"""{KEPT}
stats = backend.memory_stats
def interrupted(device):
    if backend.is_dying: backend.is_dying = False; signal.raise_signal(signal.SIGINT)
    return stats(device)
backend.memory_stats, backend.is_dying = interrupted, False
hook = sys.excepthook
def dying(*arguments): backend.is_dying = True; hook(*arguments)
sys.excepthook = dying
while True: Kept(40)
""")

    (report,) = _reports(tmp_path)
    assert report.oom.onset == "garbage"
    assert done.returncode in {1, -signal.SIGINT}  # the latter since Python 3.14
    assert "KeyboardInterrupt" in done.stderr
    assert "OutOfMemoryError" in done.stderr
