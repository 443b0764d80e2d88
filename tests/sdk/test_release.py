"""The setting `release`: off by default, each tier at its time, and only where it pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from torchmem.sdk.release.account import MAX_UNPAID, PAYBACK_WINDOWS, ReleaseAccount
from torchmem.sdk.release.device_release import (
    MIN_RELEASABLE_BYTES,
    RECENT_WINDOWS,
    DeviceMemory,
    predicted_peak,
)
from torchmem.sdk.release.pressure_hooks import PressureHooks
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.blocks import Block
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import GpuUse, SimulatedGpu

MIB = 1 << 20
TOTAL = 80 << 30
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]
size = st.integers(0, TOTAL)
shares = st.floats(0.01, 0.99)
memories = st.builds(DeviceMemory, st.just(TOTAL), size, size, size, size)


@given(memories, shares)
def test_a_release_needs_a_shortage_and_a_gain(memory: DeviceMemory, share: float) -> None:
    """It needs little free driver memory, enough releasable bytes, and a small next step."""
    after_next_step = memory.driver_free + memory.releasable - memory.expected_regrowth
    gain = after_next_step - memory.driver_free
    is_worth_it = memory.releasable >= MIN_RELEASABLE_BYTES and gain >= memory.releasable / 2
    is_short = memory.driver_free < share * memory.total

    assert memory.should_release(share) == (is_short and is_worth_it)


@given(memories, shares, size)
def test_a_higher_next_peak_never_makes_it_pay(
    memory: DeviceMemory, share: float, more: int
) -> None:
    """A release that pays with a higher expected peak also pays with a lower one."""
    higher = replace(memory, next_peak=memory.next_peak + more)

    assert memory.should_release(share) or not higher.should_release(share)
    assert 0 <= memory.expected_regrowth <= higher.expected_regrowth <= memory.releasable


@given(st.lists(size, max_size=10))
def test_the_prediction_needs_enough_windows(windows: list[int]) -> None:
    """With too few windows nothing is predicted; with enough, no recent peak is higher."""
    peak = predicted_peak(windows)

    assert (len(windows) < RECENT_WINDOWS) == (peak is None)
    assert peak is None or all(window <= peak for window in windows[-RECENT_WINDOWS:])


class CountingBackend(SimulatedBackend):
    """Records each emptying of the cache, and whether it happened in a step."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.allocator = DeviceCachingAllocator(gpu)
        super().__init__([self.allocator])

    stepping = False
    emptied: tuple[bool, ...] = ()

    def empty_cache(self) -> None:
        self.emptied = (*self.emptied, self.stepping)
        super().empty_cache()

    def step(self, optimizer: object = 0) -> None:
        self.stepping = True
        super().step(optimizer)
        self.stepping = False


@pytest.fixture
def gpu() -> SimulatedGpu:
    """A GPU of 4 GiB that another process can fill."""
    return SimulatedGpu(4096 * MIB, context_bytes=0, use=GpuUse([0, 0]), uuid="GPU-1")


@pytest.fixture
def counting(gpu: SimulatedGpu) -> CountingBackend:
    """A backend on that GPU."""
    return CountingBackend(gpu)


def train(backend: CountingBackend, *peaks: int) -> None:
    """Run a step for each peak in MiB, whose memory is allocated and freed before it ends."""
    for peak in peaks:
        backend.allocator.free(backend.allocator.malloc(peak * MIB))
        backend.step()


def releases(published: Published) -> dict[str, Any]:
    """Return the releases of the only device by tier, as they were published."""
    return dict(published()[0]["devices"][0]["releases"])


def test_by_default_the_cache_is_never_touched(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """Without the setting no cache is emptied however short memory is, and nothing is counted."""
    session = open_session(counting, interval=1e-9)
    train(counting, 3900, *[100] * 10)
    session.close()

    assert (counting.emptied, releases(published)) == ((), {})


def test_after_a_change_of_phase_the_cache_is_released(
    counting: CountingBackend, gpu: SimulatedGpu, open_session: Opener, published: Published
) -> None:
    """After enough small steps the cache is released once, at a step's end, and counted."""
    session = open_session(counting, interval=1e-9, release=0.3, release_interval=1e-9)
    train(counting, 3900, *[100] * (RECENT_WINDOWS - 1))
    assert (counting.emptied, gpu.mem_get_info()[0]) == ((), 196 * MIB)

    train(counting, *[100] * 5)
    session.close()

    cache = releases(published)["cache"]
    assert (counting.emptied, cache["times"], cache["released_bytes"]) == ((True,), 1, 3900 * MIB)
    assert session.errors.counts["release"] == 0


def test_steady_training_keeps_its_cache(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """A job that needs its cache again in every step keeps it, although the GPU is full."""
    session = open_session(counting, interval=1e-9, release=0.3, release_interval=1e-9)
    train(counting, *[3900] * 20)
    session.close()

    cache = releases(published)["cache"]
    assert (counting.emptied, cache["times"], cache["released_bytes"]) == ((), 0, 0)


def test_checks_are_rate_limited(counting: CountingBackend, open_session: Opener) -> None:
    """Within `release_interval` the cache is emptied at most once."""
    open_session(counting, interval=1e-9, release=0.3, release_interval=3600.0)
    train(counting, *([3900, 100, 100, 100, 100] * 5))

    assert counting.emptied in {(), (True,)}


def test_peaks_stay_high_water_marks(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """A release resets the allocator's peaks; the published peak is that of the whole run."""
    session = open_session(counting, interval=1e-9, release=0.3)
    train(counting, 3900, 100, 100)
    session.close()

    assert published()[0]["devices"][0]["allocator"]["active_peak_bytes"] == 3900 * MIB


def test_a_failing_release_never_reaches_training(gpu: SimulatedGpu, open_session: Opener) -> None:
    """If emptying the cache raises, the step goes on and the error is counted."""

    class Failing(CountingBackend):
        def empty_cache(self) -> None:
            raise RuntimeError("broken driver")

    backend = Failing(gpu)
    session = open_session(backend, interval=1e-9, release=0.3, release_interval=1e-9)
    train(backend, 3900, *[100] * RECENT_WINDOWS)

    assert session.errors.counts["release"] == 1


class Cache:
    """A cache of the script that gives memory back when asked."""

    def __init__(self, backend: CountingBackend, *sizes: int) -> None:
        self.backend = backend
        self.blocks = [backend.allocator.malloc(size * MIB) for size in sizes]
        self.asked: list[int] = []

    def __call__(self, wanted: int) -> int:
        self.asked.append(wanted)
        assert not self.backend.stepping or self.backend.emptied == ()
        freed = 0
        while self.blocks and freed < wanted:
            freed += self.blocks[-1].size
            self.backend.allocator.free(self.blocks.pop())
        return freed


def test_hooks_free_what_is_wanted_and_it_returns_to_the_driver(
    counting: CountingBackend, gpu: SimulatedGpu, open_session: Opener, published: Published
) -> None:
    """The bytes that hooks free are returned to the driver, and no hook is asked for more."""
    session = open_session(counting, interval=1e-9, release="hooks=0.5", release_interval=1e-9)
    cache = Cache(counting, *[500] * 6)
    session.on_pressure(cache)
    train(counting, 100, 100)
    session.close()

    done = releases(published)["hooks"]
    assert [int(0.5 * 4096 * MIB) - (4096 - 3100) * MIB] == cache.asked
    assert (done["times"], done["released_bytes"]) == (1, 1600 * MIB)
    assert gpu.mem_get_info()[0] == 2496 * MIB


def test_hooks_are_asked_by_priority(counting: CountingBackend, open_session: Opener) -> None:
    """The lowest priority frees first, and a higher one only what is still missing."""
    session = open_session(counting, interval=1e-9, release="hooks=0.6", release_interval=1e-9)
    precious, spare = Cache(counting, 1000, 1000), Cache(counting, 1000)
    session.on_pressure(precious, priority=2)
    session.on_pressure(spare, priority=1)
    train(counting, 10)

    assert spare.asked[0] - precious.asked[0] == 1000 * MIB
    assert (spare.blocks, len(precious.blocks)) == ([], 1)


@pytest.mark.parametrize(("wanted", "kept"), [(None, 0), (400 * MIB, 500)])
def test_the_script_releases_at_the_end_of_a_phase(
    counting: CountingBackend, gpu: SimulatedGpu, open_session: Opener, wanted: int, kept: int
) -> None:
    """Without any tier the driver gets what the hooks free, as much as is wanted, and the cache."""
    session = open_session(counting, interval=1e-9)
    for priority in range(2):
        session.on_pressure(Cache(counting, 500), priority)
    train(counting, 100)

    assert (1100 - kept) * MIB == session.release(wanted)
    assert (4096 - kept) * MIB == gpu.mem_get_info()[0]


def test_what_the_script_releases_is_counted(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """It counts as the tier request, once, and not for a call that finds nothing."""
    session = open_session(counting, interval=1e-9)
    train(counting, 100)
    session.release()
    session.release()
    session.close()

    done = releases(published)["request"]
    assert (done["times"], done["released_bytes"]) == (1, 100 * MIB)


def test_the_script_releases_nothing_during_a_capture(
    counting: CountingBackend, open_session: Opener
) -> None:
    """While a CUDA graph is captured neither hooks nor cache are touched."""
    session = open_session(counting, interval=1e-9)
    cache = Cache(counting, 500)
    session.on_pressure(cache)
    train(counting, 100)
    counting.is_capturing = lambda: True  # type: ignore[method-assign]

    assert (session.release(), cache.asked, counting.emptied) == (0, [], ())


def test_a_removed_hook_is_never_called(counting: CountingBackend, open_session: Opener) -> None:
    """After `remove`, a hook is not called however short memory is."""
    session = open_session(counting, interval=1e-9, release="hooks=0.5", release_interval=1e-9)
    cache = Cache(counting, 3000)
    session.on_pressure(cache).remove()
    train(counting, 10, 10)

    assert cache.asked == []


def raising(wanted: int) -> int:
    raise KeyError("no such cache")


def lying(wanted: int) -> int:
    return wanted


def silent(wanted: int) -> None:
    pass


@pytest.mark.parametrize(
    "case",
    [
        (raising, 1, "it raised KeyError: 'no such cache'"),
        (lying, 3, "it freed 0 bytes in the last of 3 calls, although it returned"),
        (silent, 3, "it freed 0 bytes in the last of 3 calls"),
    ],
)
def test_a_bad_hook_is_dropped_with_a_warning(
    counting: CountingBackend,
    open_session: Opener,
    caplog: pytest.LogCaptureFixture,
    case: tuple[Callable[[int], Any], int, str],
) -> None:
    """A hook that raises, lies, or frees nothing is called no more; training goes on."""
    hook, calls, reason = case
    asked: list[int] = []

    def counted(wanted: int) -> Any:
        asked.append(wanted)
        return hook(wanted)

    session = open_session(counting, interval=1e-9, release="hooks=0.5", release_interval=1e-9)
    counting.allocator.malloc(3000 * MIB)
    session.on_pressure(counted)
    train(counting, *[10] * 6)
    session.close()

    assert (calls, True) == (len(asked), reason in caplog.text)


def test_a_hook_that_allocates_is_dropped(
    counting: CountingBackend, open_session: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that takes memory is dropped, and its calls do not count as releases."""
    session = open_session(counting, interval=1e-9, release="hooks=0.5", release_interval=1e-9)
    counting.allocator.malloc(3000 * MIB)
    taken: list[object] = []
    session.on_pressure(lambda wanted: taken.append(counting.allocator.malloc(MIB)))
    train(counting, *[10] * 6)
    session.close()

    assert (len(taken), "no longer calls the pressure hook" in caplog.text) == (3, True)


def test_a_slow_hook_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that takes longer than 5 s by the clock is called only once."""
    times = iter([0.0, 5.1])
    hooks = PressureHooks(lambda: next(times))
    hooks.add(lambda wanted: 10, 0.0)

    assert (hooks.call(10, lambda: 0), hooks.call(10, lambda: 0)) == (0, 0)
    assert "it took 5.1 s, more than 5 s" in caplog.text


def test_a_hook_may_take_longer_for_what_it_frees(caplog: pytest.LogCaptureFixture) -> None:
    """The first copy of a GiB to the host takes its time, and the hook stays."""
    times, allocated = iter([0.0, 6.9] * 2), iter([2048 * MIB, 1024 * MIB] * 2)
    hooks = PressureHooks(lambda: next(times))
    hooks.add(lambda wanted: 1024 * MIB, 0.0)

    assert [hooks.call(1, lambda: next(allocated)) for _ in range(2)] == [1024 * MIB] * 2
    assert caplog.text == ""


def test_an_interruption_in_a_hook_reaches_the_script(
    counting: CountingBackend, open_session: Opener
) -> None:
    """Ctrl-C in a hook is not swallowed."""

    def interrupted(wanted: int) -> None:
        raise KeyboardInterrupt

    session = open_session(counting, interval=1e-9, release="hooks=0.5", release_interval=1e-9)
    counting.allocator.malloc(3000 * MIB)
    session.on_pressure(interrupted)

    with pytest.raises(KeyboardInterrupt):
        train(counting, 10)


def test_what_a_hook_does_in_the_session_releases_nothing_twice(
    counting: CountingBackend, gpu: SimulatedGpu, open_session: Opener, published: Published
) -> None:
    """A hook may step, wait for memory, ask hooks and steps again: what it frees counts once."""
    session = open_session(
        counting, interval=1e-9, release="hooks=0.99,cache=0.99,neighbors", release_interval=1e-9
    )
    cache = Cache(counting, 1000)

    def busy(wanted: int) -> int:
        freed = cache(wanted)
        for _ in range(5):
            counting.step()
            session.step()
        assert not session.wait_for_memory(8192 * MIB, timeout=0.01)
        return freed

    session.on_pressure(busy)
    counting.step()
    session.close()

    done = releases(published)
    assert {t: r["times"] for t, r in done.items()} == {"hooks": 1, "cache": 0, "neighbors": 0}
    assert (done["hooks"]["released_bytes"], len(counting.emptied)) == (1000 * MIB, 1)
    assert session.errors.counts["release"] == 0


def test_a_hook_may_close_the_session(counting: CountingBackend, open_session: Opener) -> None:
    """Training goes on, and no hook is called any more."""
    session = open_session(counting, interval=1e-9, release="hooks=0.99", release_interval=1e-9)
    counting.allocator.malloc(3000 * MIB)
    asked: list[int] = []

    def close(wanted: int) -> None:
        asked.append(wanted)
        session.close()

    session.on_pressure(close)
    train(counting, 10, 10)

    assert (len(asked), session.errors.counts["release"]) == (1, 0)


def test_a_hook_that_hangs_can_be_seen_while_it_hangs(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """The time of the release grows in the published sample while the hook has not returned."""
    session = open_session(counting, interval=0.01, release="hooks=0.99", release_interval=1e-9)
    counting.allocator.malloc(3000 * MIB)
    seen: list[float] = []

    def hanging(wanted: int) -> None:
        until(lambda: published() and releases(published).get("hooks", {}).get("seconds"))
        seen.append(releases(published)["hooks"]["seconds"])

    session.on_pressure(hanging)
    while not seen:
        counting.step()
    session.close()

    assert 0 < seen[0] <= releases(published)["hooks"]["seconds"]


def test_several_devices_share_the_hooks_and_the_time(
    open_session: Opener, published: Published
) -> None:
    """Hooks are asked once for all devices; each counts its own bytes, and their times add up."""
    gpus = [SimulatedGpu(4096 * MIB, uuid=f"GPU-{n}", context_bytes=0) for n in range(3)]
    allocators = [DeviceCachingAllocator(gpu, device=n) for n, gpu in enumerate(gpus)]
    backend = SimulatedBackend(allocators)
    caches = [a.malloc(size * MIB) for a, size in zip(allocators, (3000, 2000, 10), strict=True)]
    session = open_session(backend, interval=1e-9, release="hooks=0.5", release_interval=1e-9)
    asked: list[int] = []

    def free(wanted: int) -> None:
        asked.append(wanted)
        time.sleep(0.02)
        for allocator, block in zip(allocators[:2], caches, strict=False):
            allocator.free(block)

    session.on_pressure(free)
    started = time.perf_counter()
    backend.step()
    spent = time.perf_counter() - started
    session.close()

    done = [device["releases"]["hooks"] for device in published()[0]["devices"]]
    assert asked == [(3000 - 2048) * MIB]
    assert [each["released_bytes"] for each in done] == [3000 * MIB, 2000 * MIB, 0]
    assert [each["times"] for each in done] == [1, 1, 0]
    assert 0.02 <= sum(each["seconds"] for each in done) <= spent


def test_a_hook_that_no_tier_calls_is_said(
    counting: CountingBackend, open_session: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Registering a hook without the tiers hooks, emergency and neighbors logs a warning."""
    open_session(counting, release="cache").on_pressure(lambda wanted: None)

    assert "release names no tier that calls hooks (hooks, emergency, neighbors)" in caplog.text


def test_after_an_oom_hooks_and_cache_are_released(
    counting: CountingBackend, gpu: SimulatedGpu, open_session: Opener, published: Published
) -> None:
    """At an OutOfMemoryError that the script catches, the hooks free memory for its retry."""
    session = open_session(counting, interval=1e-9, release="emergency")
    cache = Cache(counting, 2000, 1000)
    session.on_pressure(cache)
    with pytest.raises(OutOfMemoryError):
        counting.allocator.malloc(2000 * MIB)
    assert cache.asked == []

    counting.step()
    counting.allocator.malloc(2000 * MIB)
    session.close()

    done = releases(published)["emergency"]
    assert (cache.asked, done["times"], done["released_bytes"]) == ([2000 * MIB], 1, 3000 * MIB)


def free(backend: CountingBackend, block: Block, wanted: int) -> None:
    backend.allocator.free(block)


def test_an_emergency_is_not_given_up_because_the_retry_takes_the_memory(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """A retry that needs all that was released is what the tier is for."""
    session = open_session(counting, interval=1e-9, release="emergency")
    for _ in range(2 * MAX_UNPAID):
        cache = counting.allocator.malloc(3000 * MIB)
        hook = session.on_pressure(partial(free, counting, cache))
        with pytest.raises(OutOfMemoryError):
            counting.allocator.malloc(3000 * MIB)
        counting.step()
        hook.remove()
        train(counting, 3000, 3000)
        counting.allocator.empty_cache()
    session.close()

    emergency = releases(published)["emergency"]
    assert (emergency["times"], emergency["given_up"]) == (2 * MAX_UNPAID, False)


def test_an_oom_in_a_hook_calls_no_hooks(counting: CountingBackend, open_session: Opener) -> None:
    """A hook that runs out of memory itself is dropped, and does not start another emergency."""
    asked: list[int] = []

    def greedy(wanted: int) -> None:
        asked.append(wanted)
        counting.allocator.malloc(8192 * MIB)

    session = open_session(counting, interval=1e-9, release="emergency")
    session.on_pressure(greedy)
    with pytest.raises(OutOfMemoryError):
        counting.allocator.malloc(8192 * MIB)
    counting.step()
    counting.step()

    assert asked == [8192 * MIB]


def test_a_tier_that_never_pays_is_given_up(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """A job that takes the released memory again each time keeps its cache from then on."""
    session = open_session(counting, interval=1e-9, release=0.3, release_interval=1e-9)
    train(counting, *([3900, 100, 100, 100] * 6))
    session.close()

    cache = releases(published)["cache"]
    assert (cache["times"], cache["given_up"]) == (MAX_UNPAID, True)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=40))
def test_an_account_counts_all_releases(events: list[tuple[int, int]]) -> None:
    """Whatever happens, times and bytes are those of the releases that returned something."""
    account = ReleaseAccount("cache")
    for returned, taken in events:
        account.add(returned)
        account.end_window(taken)

    helped = [returned for returned, _ in events if returned]
    done = account.published()
    assert (len(helped), sum(helped)) == (done.times, done.released_bytes)


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 10))
def test_what_a_job_took_before_is_not_held_against_a_release(
    released: int, usual: int, times: int
) -> None:
    """A job that takes as much from the driver as in the windows before has lost nothing."""
    account = ReleaseAccount("cache")
    account.end_window(usual)
    for _ in range(times):
        account.add(released)
        for _ in range(PAYBACK_WINDOWS):
            account.end_window(usual)

    assert not account.published().given_up


@pytest.mark.parametrize("by_script", [False, True])
def test_after_a_release_the_sample_is_true_at_once(
    counting: CountingBackend, open_session: Opener, published: Published, by_script: bool
) -> None:
    """What went to the driver is not releasable any more, and is headroom; a snapshot follows."""
    session = open_session(counting, interval=0.005, snapshot_interval=3600.0)
    counting.allocator.malloc(10 * MIB)
    train(counting, 3000)
    layout = partial(lambda: published()[0]["devices"][0]["layout"])
    until(lambda: published() and (layout() or {}).get("releasable_bytes") == 3000 * MIB)
    snapshot = layout()["timestamp"]

    if by_script:
        counting.empty_cache()
        counting.step()
    else:
        session.release()
    until(lambda: layout()["releasable_bytes"] == 0)
    assert layout()["headroom_bytes"] == 4086 * MIB
    until(lambda: layout()["timestamp"] > snapshot)
    assert layout()["headroom_bytes"] == 4086 * MIB
    assert layout()["free_block_counts"] is not None


class BusyBackend(CountingBackend):
    """A process whose main thread stays in a call to C, once it is busy."""

    is_busy = False

    def call_soon(self, call: Callable[[], None]) -> None:
        if not self.is_busy:
            call()


def test_a_release_has_its_own_snapshot(
    gpu: SimulatedGpu, open_session: Opener, published: Published
) -> None:
    """It comes although the script then waits in a call to C, where nothing can be read."""
    busy = BusyBackend(gpu)
    session = open_session(busy, interval=0.005, snapshot_budget=1.0, snapshot_interval=1e-9)
    busy.allocator.malloc(10 * MIB)
    train(busy, 3000)
    layout = partial(lambda: published()[0]["devices"][0]["layout"])
    until(lambda: published() and (layout() or {}).get("releasable_bytes") == 3000 * MIB)

    busy.is_busy = True
    time.sleep(0.02)

    def is_shown() -> bool:
        session.release()  # again if the snapshot before took long, so that none was due
        return bool(layout()["releasable_bytes"] == 0 and layout()["in_use_bytes"] == 10 * MIB)

    until(is_shown)
