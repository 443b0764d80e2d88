"""What the SDK may cost: how often it publishes, reads and takes snapshots, what it imports, what it accounts for."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import full_sample, samples

from torchmem.sample.sample import Sample, encode
from torchmem.sdk._cost import LONGEST_STRETCH, LONGEST_STRETCH_SECONDS, Cadence, affordable
from torchmem.sdk._monitor import READ_BUDGET, TICK_BUDGET
from torchmem.sdk._outputs import REFRESH_SECONDS, Textfile
from torchmem.sdk._publish import HEARTBEAT_SECONDS, RunFile
from torchmem.sdk._session import Session
from torchmem.sdk._settings import Settings
from torchmem.simulator.backend import SimulatedBackend

DAY = 86_400.0
# Of one snapshot, reading and measuring: twice what was seen on PyTorch's allocator, see docs/overhead.md.
SECONDS_PER_BLOCK = 4e-6


def published(file: RunFile, sample: Sample) -> bool:
    """Whether `refresh` writes the file."""
    file.path.unlink(missing_ok=True)
    file.refresh(sample)
    return file.path.exists()


def later(sample: Sample, seconds: float) -> Sample:
    """The same state at another time, when the SDK has spent more."""
    spent = replace(
        sample.cost, cpu_seconds=sample.cost.cpu_seconds + 1, stats_duration_seconds=1.0
    )
    return replace(sample, timestamp=sample.timestamp + seconds, cost=spent)


def test_what_has_not_changed_is_not_published_again(tmp_path: Path) -> None:
    """A process at rest writes its file once for each heartbeat, not once for each tick."""
    file, sample = RunFile(tmp_path, "1.sample.json"), full_sample()

    ticks = int(20 * HEARTBEAT_SECONDS)
    assert 20 == sum(published(file, later(sample, tick)) for tick in range(ticks))


CHANGES: dict[str, Callable[[Sample], Sample]] = {
    "step": lambda s: replace(s, steps=replace(s.steps, count=s.steps.count + 1)),
    "oom": lambda s: replace(s, oom_pending=not s.oom_pending),
    "end": lambda s: replace(s, ended="exited"),
    "bytes": lambda s: replace(s, devices=(replace(s.devices[0], total_bytes=1),)),
    "snapshot": lambda s: replace(s, devices=(replace(s.devices[0], layout=None),)),
    "settings": lambda s: replace(s, allocator_settings={"backend": "other"}),
    "error": lambda s: replace(s, cost=replace(s.cost, errors={"publish": 2})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_published_at_the_next_tick(
    change: Callable[[Sample], Sample], tmp_path: Path
) -> None:
    """Every change but that of the clock and of the SDK's own cost is worth a publication."""
    file, sample = RunFile(tmp_path, "1.sample.json"), full_sample()
    file.write(sample)

    assert not published(file, later(sample, 1.0))
    assert published(file, change(later(sample, 1.0)))


def test_a_clock_set_back_does_not_silence_the_heartbeat(tmp_path: Path) -> None:
    """When the node's clock jumps back an hour the file is written, not withheld for an hour."""
    file, sample = RunFile(tmp_path, "1.sample.json"), full_sample()
    file.write(sample)

    assert published(file, later(sample, -3600.0))


def test_a_run_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    """A cleaner of temporary files costs one publication nothing."""
    file = RunFile(tmp_path / "run", "1.sample.json")
    file.write(full_sample())
    file.path.unlink()
    file.path.parent.rmdir()
    file.write(full_sample())

    assert encode(full_sample()) == file.path.read_bytes()


@given(samples)
def test_a_sample_is_no_news_beside_itself(sample: Sample) -> None:
    """Whatever it holds, a sample that was published is not published again a moment later."""
    file = RunFile(Path("/nowhere"), "1.sample.json")
    file.newest = sample

    file.refresh(later(sample, 1.0))

    assert sample is file.newest


def test_the_textfile_is_rendered_rarely(tmp_path: Path) -> None:
    """Rendering is the dearest publication, so that ticks within ten seconds share one."""
    textfile, sample = Textfile(tmp_path, 0), full_sample()
    textfile.refresh(sample)
    textfile.path.unlink()

    textfile.refresh(later(sample, REFRESH_SECONDS - 1))
    assert not textfile.path.exists()
    textfile.refresh(later(sample, REFRESH_SECONDS))
    assert textfile.path.exists()


@given(st.floats(1e-6, 60), st.floats(0, 10), st.floats(1e-6, 1))
def test_routine_work_is_stretched_to_its_budget_and_no_further(
    interval: float, spent: float, budget: float
) -> None:
    """The pause is the interval where that is affordable, longer where it is not, and never so long as to be late."""
    pause = affordable(interval, spent, budget)
    longest = max(interval, min(LONGEST_STRETCH * interval, LONGEST_STRETCH_SECONDS))

    assert interval <= pause <= longest
    assert pause in {interval, longest} or spent / pause == pytest.approx(budget)


def snapshot_moments(cost: float, settings: Settings, chance: random.Random) -> Iterator[float]:
    """When snapshots are taken in one simulated day, if each takes `cost` seconds."""
    cadence = Cadence(settings.snapshot_interval, settings.snapshot_budget, chance)
    now = 0.0
    while now < DAY:
        if cadence.is_due(now):
            yield now
            now += cost
            cadence.spent(now, cost)
        now += settings.interval


@pytest.mark.parametrize("blocks", [100, 1_000, 2_000, 10_000, 100_000])
def test_the_whole_stays_within_a_thousandth_of_a_core(blocks: int) -> None:
    """In a simulated day snapshots, reads and ticks together take at most 0.1 % of one core, up to 100,000 blocks."""
    cost = blocks * SECONDS_PER_BLOCK
    taken = sum(1 for _ in snapshot_moments(cost, Settings(), random.Random(1)))

    assert taken >= DAY / 900
    assert taken * cost / DAY + TICK_BUDGET + READ_BUDGET <= 0.001


def test_importing_the_sdk_loads_no_server() -> None:
    """`import torchmem.sdk` takes nothing that only `port`, `textfile` or a child of multiprocessing needs."""
    script = "import sys, torchmem.sdk; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()

    needless = {
        "prometheus_client",
        "http.server",
        "wsgiref.simple_server",
        "socketserver",
        "ssl",
        "multiprocessing",
    }
    assert needless & set(loaded) == set()
    assert {"torch", "torchmem.sdk.torch_backend", "msgspec"} & set(loaded) == set()


def test_the_own_account_is_what_the_training_thread_spent(
    backend: SimulatedBackend, open_session: Callable[..., Session], tmp_path: Path
) -> None:
    """CPU seconds cover the hook, read or no read, and nothing that the script did between."""
    session = open_session(backend)
    before = session._monitor.sample().cost.cpu_seconds
    started = time.thread_time()
    for _ in range(2000):
        session.step()
    spent = time.thread_time() - started
    counted = session._monitor.sample().cost.cpu_seconds - before

    assert 0.3 * spent < counted <= spent
