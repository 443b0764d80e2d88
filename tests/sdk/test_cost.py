"""What the SDK may cost: how often it reads and takes snapshots, what it imports and meters."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from torchmem.sdk.safety.cost import (
    BACK_OFF_SECONDS,
    MAX_PAUSE_SECONDS,
    MAX_STRETCH,
    MAX_STRETCHED_SECONDS,
    PAGE_SECONDS,
    READ_BUDGET,
    SLOW_READ_SECONDS,
    TICK_BUDGET,
    Cadence,
    routine_pause,
)
from torchmem.sdk.session import Session
from torchmem.sdk.settings import Settings
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

DAY = 86_400.0
# One snapshot, read and measured: twice what PyTorch's allocator took (measurements/overhead.md).
SECONDS_PER_BLOCK = 4e-6


@given(st.floats(0, 10), st.floats(0.001, 100), st.floats(1e-4, 0.1), st.integers())
def test_reads_stay_within_their_budget(
    duration: float, interval: float, budget: float, seed: int
) -> None:
    """A pause is at least half of what interval and budget ask for, up to the longest pause."""
    cadence = Cadence(interval, budget, random.Random(seed))
    cadence.record(0.0, duration)
    mean = min(max(interval, duration / budget), MAX_PAUSE_SECONDS)

    assert not cadence.is_due(0.499 * mean)
    assert cadence.is_due(1.501 * max(mean, BACK_OFF_SECONDS))


def test_a_slow_read_backs_off() -> None:
    """A read over 5 ms waited for the allocator's lock; at least half the back-off follows it."""
    cadence = Cadence(0.01, 1.0, random.Random(1))
    cadence.record(0.0, SLOW_READ_SECONDS * 1.01)

    assert not cadence.is_due(BACK_OFF_SECONDS / 2.01)


@given(st.floats(1e-6, 60), st.floats(0, 10), st.floats(1e-6, 1))
def test_routine_work_is_stretched_to_its_budget_and_no_further(
    interval: float, spent: float, budget: float
) -> None:
    """The pause is the interval, or longer to keep the budget, but never too long for a scrape."""
    pause = routine_pause(interval, spent, budget)
    longest = max(interval, min(MAX_STRETCH * interval, MAX_STRETCHED_SECONDS))

    assert interval <= pause <= longest
    assert pause in {interval, longest} or spent / pause == pytest.approx(budget)


def snapshot_times(cost: float, settings: Settings, generator: random.Random) -> Iterator[float]:
    """The times of the snapshots of one simulated day, if each takes `cost` seconds."""
    cadence = Cadence(settings.snapshot_interval, settings.snapshot_budget, generator)
    now = 0.0
    while now < DAY:
        if cadence.is_due(now):
            yield now
            now += cost
            cadence.record(now, cost)
        now += settings.interval


@pytest.mark.parametrize("blocks", [100, 1_000, 2_000, 10_000, 100_000])
def test_the_sdk_stays_within_a_thousandth_of_a_core(blocks: int) -> None:
    """In a simulated day snapshots, reads, and ticks take 0.1 % of a core, up to 100,000 blocks."""
    cost = blocks * SECONDS_PER_BLOCK
    taken = sum(1 for _ in snapshot_times(cost, Settings(), random.Random(1)))

    assert taken >= DAY / 900
    assert taken * cost / DAY + TICK_BUDGET + READ_BUDGET <= 0.001


def test_importing_the_sdk_loads_no_server() -> None:
    """`import torchmem.sdk` loads nothing that only some settings or processes need."""
    script = "import sys, torchmem.sdk; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()

    optional = {
        "prometheus_client",
        "http.server",
        "wsgiref.simple_server",
        "socketserver",
        "ssl",
        "multiprocessing",
    }
    assert optional & set(loaded) == set()
    assert {"torch", "torchmem.sdk.pytorch.backend", "msgspec"} & set(loaded) == set()


def cpu_seconds(session: Session, form: str = "text/plain") -> float:
    """The SDK's own account, as its endpoint serves it.

    A page is kept for a second, but one of a new form is rendered at once.
    """
    assert session.url is not None
    request = urllib.request.Request(session.url, headers={"Accept": form})  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
        page = answer.read().decode()
    account = re.search(r"^torchmem_sdk_cpu_seconds_total\S* (\S+)", page, re.MULTILINE)
    assert account
    return float(account[1])


def settled_cpu_seconds(session: Session) -> float:
    """The account once the background thread has done what it does at the start."""
    before, now = -1.0, cpu_seconds(session)
    while now != before:
        time.sleep(1.5 * PAGE_SECONDS)
        before, now = now, cpu_seconds(session)
    return now


def test_the_own_account_is_what_the_training_thread_spent(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Callable[..., Session],
) -> None:
    """CPU seconds cover every call of the hook, and nothing that the script did in between."""
    allocator.malloc(1)
    session = open_session(backend, port=0)
    until(lambda: session.url)
    before = settled_cpu_seconds(session)
    started = time.thread_time()
    for _ in range(2000):
        session.step()
    spent = time.thread_time() - started
    counted = cpu_seconds(session, "application/openmetrics-text") - before

    assert 0.3 * spent < counted <= spent
