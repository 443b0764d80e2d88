"""What hostile users do for hours costs the others no sample, and the exporter no memory."""

from __future__ import annotations

import os
import shutil
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exposition import Exposition, scrape
from support.publishing import own_process, own_sample
from support.samples import samples
from support.users import as_user, needs_root

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.budgets import MAX_SERIES_PER_USER, PageShare
from torchmem.exporter.churn import (
    MAX_HOURLY_SERIES,
    MAX_HOURLY_SERIES_PER_USER,
    WINDOW_SECONDS,
    Churn,
)
from torchmem.exporter.collect import Exporter
from torchmem.exporter.rejections import MAX_COUNTED, Refusals
from torchmem.exporter.sample_files import MAX_USERS, RunDirectory
from torchmem.exporter.user_directories import MAX_DIRECTORIES_PER_USER, list_files
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import Process, Sample, encode
from torchmem.sdk.publish.sample_file import make_user_directory

VICTIM, ATTACKER, OTHER = 61001, 61002, 61003
SUBORDINATE = 100_000
"""The first of the user IDs that belong to one hostile user."""
REJECTED = "torchmem_exporter_rejected_samples_total"


def ended(rank: int, **changes: object) -> Sample:
    """Return the last sample of a process that has ended."""
    process = Process(4_000_000 + rank, None, 1, "h", "night", rank)
    return own_sample(process=replace(process, **changes), ended="exited")  # type: ignore[arg-type]


def give(user: int, folder: Path, **files: bytes) -> Path:
    """Create a user's directory with these sample files."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / f"{name}{SAMPLE_SUFFIX}"
        path.write_bytes(content)
        os.chown(path, user, user)
    os.chown(folder, user, user)
    return folder


def ranks(metrics: Exposition, run: str = "night") -> set[str]:
    """Return the ranks of a run that are on the page."""
    return set(metrics.by("rank", "torchmem_process_state", run=run, state="exited"))


def read(directory: RunDirectory) -> set[tuple[int | None, int]]:
    """Return user and rank of the processes that are exported now."""
    return {(item.uid, item.sample.process.rank) for item in directory.read(time.time())}


@needs_root
def test_live_ranks_are_found_in_any_number_of_directories(shared_dir: Path) -> None:
    """Of a user's many fallback directories, those in which something happens are read."""
    for number in range(3 * MAX_DIRECTORIES_PER_USER):
        give(VICTIM, shared_dir / f"{VICTIM}-{number:016x}")
    for number in range(8):
        folder = shared_dir / f"{VICTIM}-{number * 23:016x}"
        give(VICTIM, folder, **{f"rank{number}": encode(ended(number))})

    assert set(map(str, range(8))) == ranks(scrape(exporter(shared_dir)))


def exporter(run_dir: Path) -> Exporter:
    """Return an exporter of a node without GPUs."""
    return Exporter(FakeNvml.of(), RunDirectory(run_dir))


@needs_root
def test_nobody_publishes_a_rank_of_another_users_launch(shared_dir: Path) -> None:
    """The label `launch` names the owner of the file, whatever launch the file claims."""
    claimed = encode(ended(0, launch=f"{VICTIM}-3f9a2c71"))
    for user in (VICTIM, ATTACKER):
        give(user, shared_dir / str(user), rank0=claimed)

    shown = scrape(exporter(shared_dir)).by("launch", "torchmem_process_state", state="exited")

    assert shown.keys() == {f"{VICTIM}-3f9a2c71", f"{ATTACKER}-3f9a2c71"}


JUNK: dict[str, bytes] = {
    "malformed": b"{",
    "expired": encode(ended(0)),
    "empty": b"",
}


@needs_root
@pytest.mark.parametrize("kind", JUNK)
def test_junk_takes_no_place(shared_dir: Path, kind: str) -> None:
    """Thousands of user ids with junk, before or after, leave every place to users with ranks."""
    long_ago = time.time() - 2000
    directory = RunDirectory(shared_dir)
    for number in range(MAX_USERS + 40):
        user = SUBORDINATE + number
        folder = give(user, shared_dir / str(user), junk=JUNK[kind])
        os.utime(folder / f"junk{SAMPLE_SUFFIX}", (long_ago, long_ago))
    read(directory)
    for user in (VICTIM, OTHER):
        give(user, shared_dir / str(user), mine=encode(ended(user)))

    assert {(VICTIM, VICTIM), (OTHER, OTHER)} <= read(directory)


@needs_root
def test_expired_users_make_room(shared_dir: Path) -> None:
    """A place is free again when the last values of its user have expired."""
    directory = RunDirectory(shared_dir, ttl_seconds=900)
    for number in range(MAX_USERS):
        user = SUBORDINATE + number
        give(user, shared_dir / str(user), mine=encode(ended(number)))
    now = time.time()
    assert len(directory.read(now)) == MAX_USERS
    path = give(VICTIM, shared_dir / str(VICTIM), mine=encode(ended(5))) / f"mine{SAMPLE_SUFFIX}"
    assert len(directory.read(now)) == MAX_USERS
    assert directory.rejections["too_many"] == 1

    path.touch()
    os.utime(path, (now + 800, now + 800))
    for number in range(0, MAX_USERS, 2):
        shutil.rmtree(shared_dir / str(SUBORDINATE + number))
    assert VICTIM in {item.uid for item in directory.read(now + 800)}


@needs_root
def test_a_live_rank_comes_before_those_that_ended(shared_dir: Path) -> None:
    """A rank that runs is exported although more users than have room were there first."""
    directory = RunDirectory(shared_dir)
    for number in range(MAX_USERS):
        user = SUBORDINATE + number
        give(user, shared_dir / str(user), mine=encode(ended(number)))
    assert len(read(directory)) == MAX_USERS
    give(os.geteuid(), shared_dir / "0", mine=encode(own_sample(process=own_process(rank=77))))

    assert (os.geteuid(), 77) in read(directory)


@needs_root
def test_each_of_very_many_users_has_a_turn(shared_dir: Path) -> None:
    """With more users than can be read, known ones are always read, and others now and then."""
    for user in range(SUBORDINATE, SUBORDINATE + 64):
        give(user, shared_dir / str(user), junk=b"{")
    for user in (VICTIM, OTHER):
        give(user, shared_dir / str(user), mine=encode(ended(user)))
    descriptor, refusals = os.open(shared_dir, os.O_RDONLY), Refusals()
    found = [set(list_files(descriptor, {str(VICTIM)}, refusals, 16)) for _ in range(200)]
    os.close(descriptor)

    assert all(str(VICTIM) in users for users in found)
    assert any(str(OTHER) in users for users in found)
    assert set(map(len, found)) == {16}


def rename(run_dir: Path, number: int) -> None:
    """Publish 200 processes of the current user in runs with new names, and remove the others."""
    directory = make_user_directory(run_dir)
    for path in directory.glob("new*"):
        path.unlink()
    for rank in range(200):
        sample = encode(ended(rank, run=f"{number}-{rank}", start_ticks=number))
        (directory / f"new{rank}{SAMPLE_SUFFIX}").write_bytes(sample)


@needs_root
def test_new_names_at_every_scrape_end_after_a_while(shared_dir: Path) -> None:
    """One user's new runs create no more series in an hour than the budget; old runs continue."""
    give(VICTIM, shared_dir / str(VICTIM), **{f"r{n}": encode(ended(n)) for n in range(8)})
    keeping = encode(ended(99, run="long"))
    give(ATTACKER, shared_dir / str(ATTACKER), long=keeping).chmod(0o750)
    directory, seen = RunDirectory(shared_dir), set[int]()
    for number in range(5):
        as_user(ATTACKER, lambda number=number: rename(shared_dir, number))  # type: ignore[misc]
        shown = directory.read(time.time())
        for item in shown:
            if item.uid == ATTACKER:
                seen.update(PageShare.of(item.sample, item.pid).series)
        assert sum(item.uid == VICTIM for item in shown) == 8
        assert "long" in {item.sample.process.run for item in shown}

    assert 0.9 * MAX_HOURLY_SERIES_PER_USER < len(seen) <= MAX_HOURLY_SERIES_PER_USER
    assert directory.rejections["series_churn"] > 0


def ids(first: int, count: int) -> Callable[[], PageShare]:
    """Return a function that returns a share with numbers in place of series."""
    return lambda: PageShare(array("q", range(first, first + count)), 0)


def test_the_budget_of_new_series_comes_back_after_an_hour() -> None:
    """Refused processes are admitted when the hour is over; what is shown costs nothing again."""
    churn = Churn()
    assert churn.admit("1", "a", ids(0, MAX_HOURLY_SERIES_PER_USER), 0.0)
    assert not churn.admit("1", "b", ids(10**6, 9), 1.0)
    churn.end_scan(1.0)
    assert churn.admit("1", "a", ids(0, 0), WINDOW_SECONDS)
    churn.end_scan(WINDOW_SECONDS)
    assert not churn.admit("1", "b", ids(10**6, 9), WINDOW_SECONDS)
    churn.end_scan(WINDOW_SECONDS)
    churn.end_scan(2 * WINDOW_SECONDS)
    assert churn.admit("1", "b", ids(10**6, 9), 2 * WINDOW_SECONDS)


def test_users_who_use_up_the_node_leave_a_part_for_each_other_one() -> None:
    """However many series others have created, a user with a live process has an equal part."""
    churn = Churn()
    for user in range(3):
        for start in range(0, MAX_HOURLY_SERIES_PER_USER, 1000):
            churn.admit(str(user), start, ids((user + 1) * 10**6 + start, 1000), 0.0)

    assert churn.admit("victim", "a", ids(0, MAX_HOURLY_SERIES // 4), 0.0, is_live=True)
    assert MAX_HOURLY_SERIES // 4 >= MAX_SERIES_PER_USER


def test_users_who_come_and_go_take_no_users_budget() -> None:
    """User ids without live processes share one budget; a user with a live one has a part of it."""
    churn, admitted = Churn(), 0
    for user in range(3000):
        share = churn.admit(f"hostile {user}", "a", ids(user * 1000, 500), 0.0)
        admitted += len(share.series) if share else 0
        if user % 200 == 0:
            churn.end_scan(0.0)
    churn.end_scan(0.0)

    assert admitted == MAX_HOURLY_SERIES
    assert churn.admit("victim", "a", ids(10**8, 137), 0.0, is_live=True)


def documents() -> Iterator[tuple[Sample, Sample]]:
    """Yield samples whose labels are the same and samples whose labels differ."""
    first = own_sample()
    device = first.devices[0]
    yield first, replace(first, timestamp=first.timestamp + 1)
    for run in ("a:1", 'a"b', "a\\"):
        yield first, replace(first, process=replace(first.process, run=run))
    yield first, replace(first, devices=(replace(device, uuid="GPU-7"),))
    yield first, replace(first, devices=(replace(device, components={"new": 1}),))
    yield first, replace(first, process=replace(first.process, rank=5))


@needs_root
@pytest.mark.parametrize("pair", list(documents()))
def test_new_labels_are_noticed(shared_dir: Path, pair: tuple[Sample, Sample]) -> None:
    """A process that changes a label counts again; one with new values does not."""
    counted = []
    churn = Churn()
    directory = RunDirectory(shared_dir, churn=churn)
    for sample in pair:
        give(os.geteuid(), shared_dir / "0", rank=encode(sample))
        (item,) = directory.read(time.time())
        counted.append(set(PageShare.of(item.sample, item.pid).series))
        (user,) = churn._users.values()  # noqa: SLF001 - the page does not show what counts
        assert len(user.known) == len(set.union(*counted))


@settings(max_examples=50)
@given(samples, st.floats(1, 2), st.integers(1, 9))
def test_values_are_no_labels(sample: Sample, timestamp: float, count: int) -> None:
    """Two samples of a process that differ only in values have the same series.

    Without a step, those of steps are absent.
    """
    count = max(count, 1) if sample.steps.count else 0
    changed = replace(sample, timestamp=timestamp, steps=replace(sample.steps, count=count))
    assert PageShare.of(sample, 1) == PageShare.of(changed, 1)


@needs_root
def test_invented_names_leave_nothing_behind(shared_dir: Path) -> None:
    """New names of directories and files at every scrape do not make the exporter grow."""
    directory, sizes = RunDirectory(shared_dir), []
    tracemalloc.start()
    for number in range(40):
        made = [shared_dir / str(number * 1000 + name) for name in range(30)]
        made += [shared_dir / f"{ATTACKER}-{number * 1000 + name:016x}" for name in range(30)]
        for path in made:
            path.touch()
        directory.read(time.time())
        for path in made:
            path.unlink()
        # Only what the exporter allocates: Python's table of interned names doubles at times.
        own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/torchmem/*")])
        sizes.append(sum(trace.size for trace in own.traces))
    tracemalloc.stop()

    assert max(sizes[20:]) - max(sizes[:20]) < 50_000


def test_refusals_of_invented_users_are_bounded() -> None:
    """Users beyond the limit are counted together, and each refusal is counted once."""
    refusals = Refusals()
    for _ in range(2):
        for user in range(3 * MAX_COUNTED):
            refusals.exceed(str(user), user, "unsafe_directory")
        refusals.end_scan(())

    assert refusals.counts["unsafe_directory"] == 3 * MAX_COUNTED
