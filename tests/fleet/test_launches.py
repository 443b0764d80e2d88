"""Which processes of a run are one launch, and who owns it."""

from __future__ import annotations

from collections.abc import Mapping

from torchmem.fleet.launches import RunProcess, launches
from torchmem.fleet.reading import Hours, Key, Past
from torchmem.fleet.report import report
from torchmem.fleet.store import Window

ADA, BOB = "1000-aaaaaaaa", "1001-bbbbbbbb"


def process(rank: str, start: float, seen: float, launch: str, state: str = "exited") -> RunProcess:
    """Return a process of the run train."""
    return RunProcess("torchmem", "train", rank, start, seen, state, steps=100, launch=launch)


def starts(*processes: RunProcess) -> list[list[tuple[float, int]]]:
    """Return start and ranks of each launch, by run and user."""
    return [
        [(launch.start, len(launch.processes)) for launch in of_run]
        for of_run in launches(processes)
    ]


def test_two_users_have_two_runs_of_one_name() -> None:
    """Ranks of two users are never one launch, nor is one the successor of the other."""
    both = [process(rank, start, 900, who) for who, start in ((ADA, 0), (BOB, 5)) for rank in "01"]

    assert starts(*both) == [[(0, 2)], [(5, 2)]]


def test_launches_at_once_are_apart() -> None:
    """Two launches of one user that overlap are two; a rank that starts again begins another."""
    other = "1000-cccccccc"
    at_once = [
        process(rank, start, 900, it) for it, start in ((ADA, 0), (other, 5)) for rank in "01"
    ]

    assert starts(*at_once, process("0", 950, 999, ADA)) == [[(0, 2), (5, 2), (950, 1)]]


def of_run(**values: float) -> Mapping[Key, float]:
    """Return a value for each user's launch of the run train."""
    return {
        ("torchmem", "train", {"ada": ADA, "bob": BOB}[user]): it for user, it in values.items()
    }


def test_what_a_run_needs_is_that_of_its_user() -> None:
    """A user's OOM and a user's need say nothing about another's run of the same name."""
    window = Window(0, 1000)
    held: Mapping[Key, float] = {
        ("torchmem", "train", it, user, "", "", ""): 1.0
        for user, it in (("ada", ADA), ("bob", BOB))
    }
    used, none = Hours(held, {window: 2.0}), Hours({}, {})
    ran = [process("0", 0, 900, ADA, "oom"), process("0", 5, 900, BOB)]
    past = Past(
        window,
        ran,
        used,
        none,
        none,
        none,
        none,
        8.0,
        0.0,
        0.0,
        need=of_run(ada=79 << 30, bob=10 << 30),
        step_peak=of_run(ada=1 << 30, bob=1 << 30),
        device_total=of_run(ada=80 << 30, bob=80 << 30),
    )
    found = report(past)

    assert [(fit.user, fit.need_bytes) for fit in found.fits] == [("bob", 10 << 30)]
    assert {(end.user, end.outcome) for end in found.endings} == {("ada", "oom"), ("bob", "exited")}
