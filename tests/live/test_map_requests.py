"""How the exporter asks ranks of several users for their maps while another user interferes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.publishing import own_sample
from support.users import as_user, needs_root

from torchmem.exporter.live.memory_map import CannotAskError, Requests
from torchmem.node.published import Published
from torchmem.sample.memory_map import request_directory
from torchmem.sdk.publish.memory_map import MapPublisher
from torchmem.sdk.publish.sample_file import make_user_directory

pytestmark = needs_root

VICTIM, ATTACKER, EXPORTER = 61001, 61002, 61009
NAME = "4026531836-7-8.sample.json"


def squat_directory(path: Path) -> None:
    """Take the name with a directory that is not empty."""
    path.mkdir()
    (path / "mine").touch()


def squat_link(path: Path) -> None:
    """Take the name with a link to a directory of the exporter's user."""
    path.symlink_to(str(EXPORTER))


SQUATTERS: dict[str, Callable[[Path], object]] = {
    "directory": squat_directory,
    "file": Path.touch,
    "link": squat_link,
}
EACH = pytest.mark.parametrize("squat", SQUATTERS.values(), ids=SQUATTERS)


def ask(run_dir: Path, user: int) -> str:
    """Ask a rank of a user; return why it cannot be asked, else an empty text."""
    rank = Published(own_sample(), 7, "running", True, uid=user, path=f"{user}/{NAME}")
    try:
        Requests(run_dir).touch(rank, time.time())
    except CannotAskError as error:
        return str(error)
    return ""


def is_asked(run_dir: Path) -> bool:
    """Return whether the rank of the current user sees that it is asked."""
    publisher = MapPublisher(make_user_directory(run_dir) / NAME, enabled=True)
    publisher.at_tick()
    return publisher.is_asked


@EACH
def test_a_squatted_request_directory_costs_nothing(
    shared_dir: Path, squat: Callable[[Path], object]
) -> None:
    """The service, which owns the run directory, asks everyone, and nothing is deleted."""
    os.chown(shared_dir, EXPORTER, EXPORTER)
    taken = request_directory(shared_dir, EXPORTER)
    as_user(ATTACKER, lambda: squat(taken))
    as_user(VICTIM, lambda: make_user_directory(shared_dir).name)

    assert not as_user(VICTIM, lambda: is_asked(shared_dir))
    assert as_user(EXPORTER, lambda: ask(shared_dir, VICTIM)) == ""
    assert as_user(VICTIM, lambda: is_asked(shared_dir))
    (aside,) = (path for path in shared_dir.glob(f"{taken.name}*") if path != taken)
    assert aside.lstat().st_uid == ATTACKER


@EACH
def test_an_exporter_asks_its_own_users_ranks(
    shared_dir: Path, squat: Callable[[Path], object]
) -> None:
    """Where it may not move the squatter aside, it asks beside the samples of its own user."""
    as_user(ATTACKER, lambda: squat(request_directory(shared_dir, VICTIM)))
    as_user(VICTIM, lambda: make_user_directory(shared_dir).name)

    assert as_user(VICTIM, lambda: ask(shared_dir, VICTIM)) == ""
    assert as_user(VICTIM, lambda: is_asked(shared_dir))


def test_an_exporter_that_cannot_ask_says_why(shared_dir: Path) -> None:
    """A full or unreadable directory is named in one sentence."""
    os.chown(shared_dir, EXPORTER, EXPORTER)
    shared_dir.chmod(0o555)

    problem = as_user(EXPORTER, lambda: ask(shared_dir, VICTIM))
    assert f"{request_directory(shared_dir, EXPORTER)} cannot be written" in problem


def test_a_stranger_does_not_ask(shared_dir: Path) -> None:
    """What another user puts in the place of a request does not count as one."""
    as_user(VICTIM, lambda: make_user_directory(shared_dir).name)

    def pretend() -> None:
        for user in (0, EXPORTER, VICTIM, ATTACKER):
            folder = request_directory(shared_dir, user)
            folder.mkdir()
            folder.chmod(0o755)
            (folder / NAME.removesuffix(".sample.json")).touch()

    as_user(ATTACKER, pretend)
    assert not as_user(VICTIM, lambda: is_asked(shared_dir))
