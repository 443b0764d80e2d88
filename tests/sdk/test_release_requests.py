"""Requests for memory, from the command and from neighbors: who gives what, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.users import needs_root
from support.waiting import until

from torchmem.sample.process_messages import encode, sibling_path
from torchmem.sample.release_messages import (
    ANSWER_SUFFIX,
    MAX_WANTED_BYTES,
    REQUEST_SUFFIX,
    ReleaseAnswer,
    ReleaseRequest,
    decode_answer,
    decode_request,
)
from torchmem.sample.run_directory import SAMPLE_SUFFIX, replace_file
from torchmem.sdk.engine import EnginePart
from torchmem.sdk.publish.request_files import STALE_SECONDS
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.release.device_release import DeviceReleases
from torchmem.sdk.release.neighbors import MAX_NEIGHBORS, Neighbors
from torchmem.sdk.release.pressure_hooks import PressureHooks
from torchmem.sdk.release.release import Release
from torchmem.sdk.release.requests import ReleaseRequests
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.session import Session
from torchmem.sdk.settings import resolve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import GpuUse, SimulatedGpu

MIB = 1 << 20
UUID = "GPU-1"
Opener = Callable[..., Session]
released = st.dictionaries(st.text("GPU-0123", max_size=8), st.integers(0, 1 << 40), max_size=3)


@given(st.sampled_from(["request", "neighbors"]), st.integers(0, MAX_WANTED_BYTES))
def test_a_request_survives_its_file(asker: Any, wanted: int) -> None:
    """What is written is what is read."""
    request = ReleaseRequest(asker, wanted)

    assert request == decode_request(encode(request))


@given(st.integers(), st.sampled_from(["waiting", "done"]), released, st.floats(0, 1e6))
def test_an_answer_survives_its_file(
    request_ns: int, state: Any, sizes: dict[str, int], seconds: float
) -> None:
    """What is written is what is read."""
    answer = ReleaseAnswer(request_ns, state, sizes, seconds)

    assert answer == decode_answer(encode(answer))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"asker": "root", "hook_bytes": 0}']
    + [b'{"asker": "request", "hook_bytes": %s}' % n for n in (b"-1", b"1e9", b"true", b"9" * 40)],
)
def test_a_request_that_torchmem_did_not_write_is_refused(content: bytes) -> None:
    """Anything else than a request is an error in one sentence."""
    with pytest.raises(ValueError, match=r"^[a-z].*\.$"):
        decode_request(content)


class Rank:
    """A process with a simulated GPU of 4 GiB and a session that publishes all the time."""

    def __init__(
        self,
        open_session: Opener,
        run_dir: Path,
        backend: type[SimulatedBackend] = SimulatedBackend,
        **settings: Any,
    ) -> None:
        self.gpu = SimulatedGpu(4096 * MIB, context_bytes=0, use=GpuUse([0, 0]), uuid=UUID)
        self.allocator = DeviceCachingAllocator(self.gpu)
        self.backend = backend([self.allocator])
        settings = {"interval": 0.002, **settings}
        self.session = open_session(self.backend, **settings)
        self.train(100)
        self.run_dir = run_dir

    def train(self, *peaks: int) -> None:
        """Run a step for each peak in MiB."""
        for peak in peaks:
            self.allocator.free(self.allocator.malloc(peak * MIB))
            time.sleep(0.003)  # longer than the interval, so that each step is read
            self.backend.step()

    @property
    def sample(self) -> Path:
        """Its sample file."""
        (path,) = self.run_dir.rglob(f"*{SAMPLE_SUFFIX}")
        return path

    def ask(self, request: ReleaseRequest) -> int:
        """Write a request as the command does; return its modification time."""
        until(lambda: any(self.run_dir.rglob(f"*{SAMPLE_SUFFIX}")))
        path = sibling_path(self.sample, REQUEST_SUFFIX)
        replace_file(path, encode(request))
        return path.stat().st_mtime_ns

    def answer(self, state: str) -> ReleaseAnswer:
        """Wait for an answer with this state."""
        path = sibling_path(self.sample, ANSWER_SUFFIX)
        until(lambda: path.exists() and decode_answer(path.read_bytes()).state == state)
        return decode_answer(path.read_bytes())

    def give(self, request: ReleaseRequest) -> ReleaseAnswer:
        """Ask, take steps until the request is served, and return the answer.

        On a machine so busy that the process counts as idle, no step serves it.
        """
        asked, path = self.ask(request), sibling_path(self.sample, ANSWER_SUFFIX)
        until(path.exists)

        def served() -> ReleaseAnswer | None:
            self.train(60)
            answer = decode_answer(path.read_bytes())
            is_served = answer.request_ns == asked and answer.state != "waiting"
            return answer if is_served else None

        return until(served)


@pytest.fixture
def rank(open_session: Opener, tmp_path: Path) -> Callable[..., Rank]:
    """Starts a rank in the run directory."""
    return lambda **settings: Rank(open_session, tmp_path, **settings)


def test_a_request_is_served_at_the_end_of_a_step(rank: Callable[..., Rank]) -> None:
    """Without any setting, the owner's request empties the cache, and the answer says how much."""
    asked = rank()
    asked.train(3000)
    answer = asked.give(ReleaseRequest("request"))

    assert answer.released == {UUID: 3100 * MIB}
    assert asked.gpu.mem_get_info()[0] == 4096 * MIB


def test_a_request_can_ask_the_hooks_too(rank: Callable[..., Rank]) -> None:
    """Hooks get the bytes that the request names, even if no tier of the setting calls them."""
    asked = rank()
    cache = [asked.allocator.malloc(1000 * MIB)]
    wanted: list[int] = []

    def give(size: int) -> None:
        wanted.append(size)
        asked.allocator.free(cache.pop())

    asked.session.on_pressure(give)
    while not wanted:  # only a step calls them
        answer = asked.give(ReleaseRequest("request", 500 * MIB))

    assert wanted == [500 * MIB]
    assert answer.released[UUID] >= 1000 * MIB


def test_an_idle_process_is_served_without_a_step(rank: Callable[..., Rank]) -> None:
    """A process whose steps have ended returns its cache all the same."""
    asked = rank()
    asked.train(3000)
    asked.ask(ReleaseRequest("request"))

    assert asked.answer("done").released == {UUID: 3100 * MIB}


def test_a_neighbor_needs_the_tier(rank: Callable[..., Rank]) -> None:
    """A process whose setting does not name neighbors gives nothing to one."""
    asked = rank(release="cache")
    asked.train(3000)

    answer = asked.give(ReleaseRequest("neighbors"))
    assert (
        answer.state,
        answer.reason,
    ) == ("refused", "its setting release does not name neighbors.")
    assert asked.gpu.mem_get_info()[0] == 996 * MIB


class Requests:
    """The requests to a process with the tier neighbors, ticked by hand."""

    def __init__(self, directory: Path) -> None:
        self.allocator = DeviceCachingAllocator(
            SimulatedGpu(4096 * MIB, context_bytes=0, uuid="GPU-1")
        )
        errors, hooks = Errors(), PressureHooks()
        self.recorder = recorder = Recorder(SimulatedBackend([self.allocator]), errors)
        settings = resolve({"release": "neighbors"}, {})
        engine = EnginePart(recorder, lambda: 0, recorder.reset_peaks)
        self.release = Release(recorder, errors, settings, recorder.reset_peaks, hooks, engine)
        self.sample = directory / f"0-1-1{SAMPLE_SUFFIX}"
        self.requests = ReleaseRequests(
            self.sample, self.release, errors, clock=lambda: 0.0, main_cpu=lambda: 0.0
        )
        self.train(100, 3000)

    def train(self, *peaks: int) -> None:
        """Run a step for each peak in MiB."""
        for peak in peaks:
            self.allocator.free(self.allocator.malloc(peak * MIB))
            self.recorder.read_stats()
            self.release.at_step()
            self.requests.serve()

    def ask(self) -> None:
        """Write a neighbor's request."""
        request = sibling_path(self.sample, REQUEST_SUFFIX)
        request.write_bytes(encode(ReleaseRequest("neighbors")))

    @property
    def answer(self) -> ReleaseAnswer:
        """The latest answer."""
        return decode_answer(sibling_path(self.sample, ANSWER_SUFFIX).read_bytes())


def test_a_neighbor_gets_what_the_next_step_does_not_need(tmp_path: Path) -> None:
    """After one small step the cache is given away, but for what such a step uses."""
    asked = Requests(tmp_path)
    asked.ask()
    asked.requests.tick(is_idle=False)
    asked.train(3000)
    refused = asked.answer
    asked.train(60)
    asked.ask()
    asked.requests.tick(is_idle=False)
    asked.train(60)

    assert refused.reason == "its next step is expected to need its cache."
    assert asked.answer.released == {UUID: 3000 * MIB}


def test_a_process_that_says_it_is_idle_gives_at_once(tmp_path: Path) -> None:
    """Its cache goes back in the tick that finds the request, though a step has just ended."""
    asked = Requests(tmp_path)
    asked.ask()
    asked.requests.tick(is_idle=False)
    assert (asked.answer.state, asked.requests.is_busy) == ("waiting", True)

    asked.requests.tick(is_idle=False, waits=True)
    assert (asked.answer.state, asked.requests.is_busy) == ("done", False)
    assert asked.allocator.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"] == 0


def test_memory_is_counted_once_while_nothing_is_read(tmp_path: Path) -> None:
    """An idle process that is asked again says that it returned nothing more."""
    asked = Requests(tmp_path)
    for _ in range(2):
        asked.ask()
        asked.requests.tick(is_idle=False, waits=True)

    assert asked.answer.released == {}
    assert asked.release.devices.by_index()[0].accounts["neighbors"].times == 1


def test_an_idle_process_keeps_what_it_has_waited_for(tmp_path: Path) -> None:
    """Between the wait and the phase that needs the memory, no neighbor gets it."""
    asked = Requests(tmp_path)
    assert asked.release.cache.take(asked.release.devices.by_index()[0], 3000 * MIB)
    asked.ask()
    asked.requests.tick(is_idle=False, waits=True)

    assert asked.answer.state == "refused"


BAD_KINDS = ["stale", "future", "huge", "junk", "deep", "link", "pipe", "folder"]
BAD_CONTENT = {"huge": b" " * 5000, "junk": b"release!", "deep": b"[" * 4000}


def put_bad_request(path: Path, kind: str) -> None:
    """Put a request there that must not be served."""
    written = path.with_name("written")
    written.write_bytes(BAD_CONTENT.get(kind, encode(ReleaseRequest("request"))))
    ages = {"stale": STALE_SECONDS + 1, "future": -STALE_SECONDS - 3600}
    wrong = time.time() - ages.get(kind, 0)
    os.utime(written, (wrong, wrong))
    if kind == "foreign":
        os.chown(written, 61001, 61001)
    if kind == "link":
        path.symlink_to(written)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        written.rename(path)


@pytest.mark.parametrize(
    "kind",
    [*BAD_KINDS, pytest.param("foreign", marks=needs_root)],
)
def test_a_bad_request_is_refused(rank: Callable[..., Rank], tmp_path: Path, kind: str) -> None:
    """A request that is old, from the future, too large, forged, or no file is not served."""
    asked = rank(release="neighbors")
    asked.train(3000)
    until(lambda: any(tmp_path.rglob(f"*{SAMPLE_SUFFIX}")))
    put_bad_request(sibling_path(asked.sample, REQUEST_SUFFIX), kind)
    refused = asked.answer("refused")
    asked.train(10)

    assert str(refused.reason).endswith(".")
    assert asked.gpu.mem_get_info()[0] == 996 * MIB


@pytest.fixture
def sharing(rank: Callable[..., Rank], tmp_path: Path) -> Rank:
    """A rank that shares its memory."""
    asked = rank(release="neighbors")
    until(lambda: any(tmp_path.rglob(f"*{SAMPLE_SUFFIX}")))
    until(lambda: '"neighbors"' in asked.sample.read_text())
    return asked


@pytest.fixture
def engines(sharing: Rank) -> DeviceCachingAllocator:
    """The allocator of another process on the same GPU."""
    return DeviceCachingAllocator(sharing.gpu)


@pytest.fixture
def other(sharing: Rank, engines: DeviceCachingAllocator) -> tuple[Rank, Neighbors]:
    """A sharing rank, and the neighbors of another process on the same GPU."""
    asked = sharing
    recorder = Recorder(SimulatedBackend([engines]))
    sample = asked.sample.with_name(f"0-1-1{SAMPLE_SUFFIX}")
    return asked, Neighbors(sample, DeviceReleases(recorder))


@contextmanager
def training(rank: Rank) -> Iterator[None]:
    """Let a rank run small steps in another thread until the end of the block."""
    ended = threading.Event()

    def steps() -> None:
        while not ended.is_set():
            rank.train(10)

    worker = threading.Thread(target=steps)
    worker.start()
    try:
        yield
    finally:
        ended.set()
        worker.join()


def test_a_process_that_waits_gets_its_neighbors_memory(other: tuple[Rank, Neighbors]) -> None:
    """Waiting ends as soon as a neighbor has returned enough at its step's end."""
    asked, neighbors = other
    asked.train(3000, 10)
    assert asked.gpu.mem_get_info()[0] == 996 * MIB

    with training(asked):
        got = neighbors.wait(3000 * MIB, 60.0, 0, lambda: None)

    assert got
    assert list(asked.run_dir.rglob(f"*{REQUEST_SUFFIX}")) == []


def test_an_engine_that_wakes_up_asks_the_hooks_of_another_process(
    other: tuple[Rank, Neighbors], engines: DeviceCachingAllocator
) -> None:
    """They are asked once, for what the driver lacks, though PyTorch counts what sleeps."""
    asked, neighbors = other
    wanted: list[int] = []
    asleep = engines.malloc(3500 * MIB)
    asked.gpu.use.cells[1] -= 3500 * MIB
    kept = [asked.allocator.malloc(3000 * MIB)]

    @asked.session.on_pressure
    def give_back(missing: int) -> int:
        wanted.append(missing)
        for block in kept:
            asked.allocator.free(block)
        return 3000 * MIB * len([kept.pop() for _ in kept[:]])

    free = asked.gpu.mem_get_info()[0]
    with training(asked):
        got = neighbors.wait(3500 * MIB, 60.0, 0, lambda: None, for_engine=True)
    engines.free(asleep)

    assert got
    assert len(wanted) == 1
    assert 3500 * MIB - free <= wanted[0] <= 3500 * MIB - free + 10 * MIB


def test_waiting_has_an_end(other: tuple[Rank, Neighbors]) -> None:
    """If no neighbor can give, waiting ends at its timeout, and says so."""
    asked, neighbors = other
    held = asked.allocator.malloc(3500 * MIB)

    assert not neighbors.wait(3000 * MIB, 0.1, 0, lambda: None)
    asked.allocator.free(held)


def test_waiting_costs_nothing_when_there_is_memory(other: tuple[Rank, Neighbors]) -> None:
    """A process that can get what it wants asks no neighbor."""
    asked, neighbors = other

    assert neighbors.wait(1000 * MIB, 30.0, None, lambda: None)
    assert list(asked.run_dir.rglob(f"*{REQUEST_SUFFIX}")) == []


def test_two_processes_that_wait_for_each_other_both_serve(other: tuple[Rank, Neighbors]) -> None:
    """A process that waits serves the requests of others meanwhile."""
    asked, neighbors = other
    served: list[None] = []
    held = asked.allocator.malloc(3500 * MIB)
    neighbors.wait(3000 * MIB, 0.1, 0, lambda: served.append(None))
    asked.allocator.free(held)

    assert served


@pytest.mark.parametrize("missing", ["dead", "reused", "elsewhere", "unshared", "cut off"])
def test_only_living_neighbors_on_the_gpu_are_asked(
    other: tuple[Rank, Neighbors], missing: str
) -> None:
    """None is asked that is dead, on another GPU, without the tier, unreadable, or a later pid."""
    asked, neighbors = other
    text = asked.sample.read_text()
    changed = {
        "dead": text.replace('"pid":', '"pid":1').replace('"start_ticks":', '"start_ticks":1'),
        "reused": text.replace('"start_ticks":', '"start_ticks":1'),
        "elsewhere": text.replace(UUID, "GPU-2"),
        "unshared": text.replace('"neighbors"', '"cache"'),
        "cut off": text[:-9],
    }[missing]
    asked.session.close()
    asked.sample.write_text(changed)
    assert changed != text

    assert not neighbors.wait(8192 * MIB, 0.05, 0, lambda: None)
    assert list(asked.run_dir.rglob(f"*{REQUEST_SUFFIX}")) == []


def test_dead_processes_do_not_hide_a_neighbor(other: tuple[Rank, Neighbors]) -> None:
    """However many have ended, the one that lives is asked."""
    asked, neighbors = other
    sample = asked.sample
    for number in range(2 * MAX_NEIGHBORS):
        dead = sample.with_name(f"0-{number}-7{SAMPLE_SUFFIX}")
        dead.write_text("{}")
        os.utime(dead, (1, 1))
    neighbors.wait(8192 * MIB, 0.05, 0, lambda: None)

    until(sibling_path(sample, ANSWER_SUFFIX).exists)


def test_a_request_from_the_future_does_not_keep_others_from_asking(
    other: tuple[Rank, Neighbors],
) -> None:
    """After the clock was set back, a request that was left behind is replaced."""
    asked, neighbors = other
    asked.session.close()  # it must not remove the request
    path = sibling_path(asked.sample, REQUEST_SUFFIX)
    path.write_bytes(b"left behind")
    os.utime(path, (time.time() + 7200, time.time() + 7200))
    neighbors.wait(8192 * MIB, 0.05, 0, lambda: None)

    assert ReleaseRequest("neighbors") == decode_request(path.read_bytes())


def test_waiting_goes_on_without_a_run_directory(other: tuple[Rank, Neighbors]) -> None:
    """Memory that comes by itself ends the wait, also after the run directory is gone."""
    asked, neighbors = other
    held = [asked.allocator.malloc(3500 * MIB)]
    asked.session.close()
    asked.sample.parent.rename(asked.run_dir / "gone")
    asked.run_dir.joinpath(str(os.geteuid())).write_text("not a directory")

    def free() -> None:
        if held:
            asked.allocator.free(held.pop())
            asked.allocator.empty_cache()

    assert neighbors.wait(3000 * MIB, 30.0, 0, free)


def test_an_interrupted_wait_is_counted(other: tuple[Rank, Neighbors]) -> None:
    """Ctrl-C ends the wait, and the time until then is published like any other."""
    asked, _ = other
    devices = DeviceReleases(Recorder(asked.backend))
    times = iter([0.0, 2.0, 3.0])

    def interrupt(seconds: float) -> None:
        if next(pauses):
            raise KeyboardInterrupt

    pauses = iter([False, True])
    sample = asked.sample.with_name(f"0-1-1{SAMPLE_SUFFIX}")
    neighbors = Neighbors(sample, devices, clock=times.__next__, sleep=interrupt)
    with pytest.raises(KeyboardInterrupt):
        neighbors.wait(8192 * MIB, 30.0, 0, lambda: None)

    assert devices.by_index()[0].wait_seconds == 2.0


@pytest.mark.parametrize("place", ["replace_file", "read_untrusted"])
def test_a_timeout_while_asking_ends_the_wait(other: tuple[Rank, Neighbors], place: str) -> None:
    """The TimeoutError of a handler of SIGALRM is an OSError, but not one of the run directory."""

    def fail(*_: object) -> NoReturn:
        raise TimeoutError

    def alarm(frame: FrameType, *_: object) -> None:
        if frame.f_code.co_name == place:
            signal.raise_signal(signal.SIGALRM)

    _, neighbors = other
    handler, trace = signal.signal(signal.SIGALRM, fail), sys.gettrace()
    sys.settrace(alarm)
    try:
        with pytest.raises(TimeoutError):
            neighbors.wait(8192 * MIB, 0.1, 0, lambda: None)
    finally:
        sys.settrace(trace)
        signal.signal(signal.SIGALRM, handler)


def test_an_answer_that_cannot_be_written_costs_only_the_answer(rank: Callable[..., Rank]) -> None:
    """Where a file cannot be replaced, the memory is returned, the error is counted, no more."""
    asked = rank(release="neighbors")
    asked.train(3000, 10)
    until(lambda: any(asked.run_dir.rglob(f"*{SAMPLE_SUFFIX}")))
    sibling_path(asked.sample, ANSWER_SUFFIX).mkdir()
    asked.ask(ReleaseRequest("request"))
    while asked.gpu.mem_get_info()[0] < 4000 * MIB:
        asked.train(10)
    asked.train(10)
    asked.session.close()

    assert asked.session.errors.counts["release"] >= 1


def test_a_request_of_a_neighbor_goes_though_its_answer_cannot_be_written(
    rank: Callable[..., Rank],
) -> None:
    """It is removed, so that others can ask at once."""
    asked = rank(release="neighbors")
    asked.train(3000, 10)
    until(lambda: any(asked.run_dir.rglob(f"*{SAMPLE_SUFFIX}")))
    sibling_path(asked.sample, ANSWER_SUFFIX).mkdir()
    asked.ask(ReleaseRequest("neighbors"))
    while list(asked.run_dir.rglob(f"*{REQUEST_SUFFIX}")):
        asked.train(10)

    assert asked.session.errors.counts["release"] >= 1


class CapturingBackend(SimulatedBackend):
    """A backend on which a CUDA graph is being captured all the time."""

    def is_capturing(self) -> bool:
        return True


@pytest.mark.parametrize("is_training", [False, True], ids=["idle", "training"])
def test_a_request_during_a_capture_is_refused(
    open_session: Opener, tmp_path: Path, *, is_training: bool
) -> None:
    """At a step's end and in an idle process, a request is refused, not answered with nothing."""
    asked = Rank(open_session, tmp_path, backend=CapturingBackend)
    asked.train(3000)
    if is_training:
        answer = asked.give(ReleaseRequest("request"))
    else:
        asked.ask(ReleaseRequest("request"))
        answer = asked.answer("refused")

    assert answer.reason == "a CUDA graph is being captured."
    assert asked.gpu.mem_get_info()[0] < 4000 * MIB


GIVER = """
import sys, time
from torchmem import sdk
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu
allocator = DeviceCachingAllocator(SimulatedGpu(4 << 30, context_bytes=0, uuid="GPU-1"))
backend = SimulatedBackend([allocator])
sdk.instrument(backend=backend, run_dir=sys.argv[1], interval=0.01, release="neighbors")
backend.step()
sys.stdin.read()
"""


def test_a_neighbor_that_is_stopped_or_killed_keeps_no_process_waiting(tmp_path: Path) -> None:
    """A stopped one answers when it goes on; a dead one is not asked again; the wait ends."""
    command = [sys.executable, "-c", GIVER, str(tmp_path)]
    own = SimulatedBackend([DeviceCachingAllocator(SimulatedGpu(MIB, context_bytes=0, uuid=UUID))])
    with subprocess.Popen(command, stdin=subprocess.PIPE) as giver:
        (sample,) = until_some(tmp_path, SAMPLE_SUFFIX, b'"neighbors"')
        own_sample = sample.with_name(f"0-1-1{SAMPLE_SUFFIX}")
        neighbors = Neighbors(own_sample, DeviceReleases(Recorder(own)))
        request, answer = (sibling_path(sample, end) for end in (REQUEST_SUFFIX, ANSWER_SUFFIX))

        giver.send_signal(signal.SIGSTOP)
        os.waitpid(giver.pid, os.WUNTRACED)
        stopped = neighbors.wait(8192 * MIB, 0.1, 0, lambda: None)
        is_asked, has_answered = request.exists(), answer.exists()

        giver.send_signal(signal.SIGCONT)
        until(lambda: answer.exists() and not request.exists())

        giver.kill()
        giver.wait()
        killed = neighbors.wait(8192 * MIB, 0.1, 0, lambda: None)

    assert (stopped, is_asked, has_answered) == (False, True, False)
    assert (killed, request.exists()) == (False, False)


def until_some(directory: Path, suffix: str, content: bytes) -> list[Path]:
    """Wait for a file whose content has a part."""

    def found() -> list[Path]:
        return [path for path in directory.rglob(f"*{suffix}") if content in path.read_bytes()]

    until(found)
    return found()
