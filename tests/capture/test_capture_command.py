"""`torchmem capture` as a process: a snapshot, or one sentence about why there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.publishing import own_process, own_sample, publish, user_directory
from support.snapshots import load_snapshot
from support.users import as_user, needs_root
from support.waiting import until

from torchmem.node.ranks import START, ProcessFilter, find_process
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import RESERVE_SUFFIX, SAMPLE_SUFFIX
from torchmem.sample.sample import encode

TRAIN = """
import sys, time
from torchmem import sdk
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu
GPU = SimulatedGpu(1 << 30, context_bytes=0, uuid="GPU-1")
backend = SimulatedBackend([DeviceCachingAllocator(GPU)])
session = sdk.instrument(backend=backend, interval=0.02, run="night", rank=int(sys.argv[1]))
if sys.argv[2:]: backend.start_history(1)
while True: backend.step(); time.sleep(0.002)
"""
Train = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Return a function that starts a rank of the run `night` and waits until it has published."""
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, *arguments: str, folder: Path = tmp_path) -> subprocess.Popen[bytes]:
        environment = os.environ | {"TORCHMEM_RUN_DIR": str(folder / "run")}
        started.append(
            subprocess.Popen([sys.executable, "-c", TRAIN, str(rank), *arguments], env=environment)
        )
        until(lambda: list((folder / "run").rglob(f"*-{started[-1].pid}-*{SAMPLE_SUFFIX}")))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


COMMAND = [sys.executable, "-m", "torchmem.cli", "capture"]
# The help is printed first, so that everything is imported while the process may still read it.
AS_NOBODY = """
import contextlib, os, sys
from torchmem.cli.main import main
with contextlib.suppress(SystemExit):
    main(["capture", "--help"])
os.seteuid(65534)
sys.exit(main())
"""


def capture(
    tmp_path: Path, *arguments: str, command: list[str] = COMMAND
) -> subprocess.CompletedProcess[str]:
    """Run the command in `tmp_path` on its run directory."""
    arguments = ("--run-dir", str(tmp_path / "run"), *arguments)
    return subprocess.run(
        [*command, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_one_command_gives_a_snapshot(train: Train, tmp_path: Path) -> None:
    """The selected rank delivers a private file, and nothing else is left in the run directory."""
    train(0)
    process = train(3)
    done = capture(tmp_path, "--rank", "3", "--seconds", "0.5", "--out", "mine.pickle")

    assert done.returncode == 0, done.stderr
    assert (
        f"torchmem: rank 3 of run night (pid {process.pid}) records for 0.5 s …"
        in done.stderr.splitlines()
    )
    assert load_snapshot(tmp_path / "mine.pickle")
    assert (tmp_path / "mine.pickle").stat().st_mode & 0o777 == 0o600

    def is_clean() -> bool:
        left = {path.name for path in (tmp_path / "run" / str(os.geteuid())).iterdir()}
        return all(name.endswith((SAMPLE_SUFFIX, RESERVE_SUFFIX)) for name in left)

    until(is_clean)  # for a moment, a rank that publishes has a temporary file


def test_the_file_is_named_after_the_rank(train: Train, tmp_path: Path) -> None:
    """A single process needs no flag, and the default file name holds its rank."""
    train(7)
    done = capture(tmp_path, "--seconds", "0.01")

    (out,) = tmp_path.glob("rank7-*.pickle")
    assert (done.returncode, done.stdout.startswith(f"{out.name}: ")) == (0, True), done.stderr


def test_an_existing_file_is_replaced_and_a_link_is_not_followed(
    train: Train, tmp_path: Path
) -> None:
    """The file is the caller's own and private, whatever had its name before."""
    train(0)
    mine, linked, target = (tmp_path / name for name in ("mine.pickle", "linked.pickle", "target"))
    for file in (mine, target):
        file.write_text("precious")
        file.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(mine, 65534, 65534)
    linked.symlink_to(target)
    done = [capture(tmp_path, "--seconds", "0.01", "--out", out.name) for out in (mine, linked)]

    assert [process.returncode for process in done] == [0, 0], done
    assert [(0o100600, os.geteuid())] * 2 == [
        (file.lstat().st_mode, file.lstat().st_uid) for file in (mine, linked)
    ]
    assert load_snapshot(linked)
    assert target.read_text() == "precious"
    assert {mine, linked, target, tmp_path / "run"} == set(tmp_path.iterdir())


def test_a_refusal_is_passed_on(train: Train, tmp_path: Path) -> None:
    """The error is the reason that the process gives."""
    train(0, "records")
    done = capture(tmp_path, "--rank", "0")

    assert (done.returncode, done.stdout) == (2, "")
    assert "refused: its memory history is being recorded already. Remove" in done.stderr


def test_a_process_that_ends_while_it_records(train: Train, tmp_path: Path) -> None:
    """The command ends with an error as soon as the recording rank is killed."""
    process = train(0)
    command = [*COMMAND, "--run-dir", str(tmp_path / "run"), "--seconds", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        errors = waiting.stderr
        assert errors is not None
        until(lambda: "records" in errors.readline())
        process.kill()
        process.wait()

        assert "ended before it wrote the snapshot." in errors.read()
    assert waiting.returncode == 2


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    """No match, several matches, an ended process, bad flags: exit code 2 and what to do next."""
    own = own_process(rank=0, run="night")
    publish(tmp_path / "run", own_sample(process=own), f"a{SAMPLE_SUFFIX}")
    publish(
        tmp_path / "run", own_sample(process=own_process(rank=0, run="day")), f"b{SAMPLE_SUFFIX}"
    )
    publish(
        tmp_path / "run",
        own_sample(process=own_process(rank=5, start_ticks=1)),
        f"c{SAMPLE_SUFFIX}",
    )
    publish(tmp_path / "run", b"\xff hostile", f"d{SAMPLE_SUFFIX}")
    os.mkfifo(user_directory(tmp_path / "run") / f"e{SAMPLE_SUFFIX}")
    (user_directory(tmp_path / "run") / f"f{SAMPLE_SUFFIX}").mkdir()
    both = f"rank 0 of run day (pid {own.pid}), rank 0 of run night (pid {own.pid})"
    ended = f"rank 5 of run night (pid {own.pid})"
    several = f"several processes match: {both}; select one with --rank, --run, --launch or --pid."
    missing = f"the run directory /no does not exist: {START}"
    expected = {
        "--rank 9": f"no process in {tmp_path}/run matches; running processes: {both}.",
        "--rank 0": several,
        "--rank 5": f"{ended} has ended; select a running process.",
        "--seconds 0": "--seconds must be above 0 and at most 300.",
        "--run day --out no/where": "--out: the directory no does not exist; create it first.",
        "--run day --out run": "--out: run is not a regular file; give another name.",
        "--run-dir /no": missing,
    }
    done = {arguments: capture(tmp_path, *arguments.split()) for arguments in expected}

    assert {arguments: f"torchmem: {text}\n" for arguments, text in expected.items()} == {
        arguments: process.stderr for arguments, process in done.items()
    }
    assert {process.returncode for process in done.values()} == {2}


def test_of_two_launches_of_a_run_the_newest_is_selected(tmp_path: Path) -> None:
    """The name of a run selects the launch that started last, and never ranks of both."""
    uid = os.geteuid()
    old, new = f"{uid}-aaaaaaaa", f"{uid}-bbbbbbbb"
    for launch, rank, start in ((old, 0, 100.0), (old, 1, 101.0), (new, 0, 200.0)):
        process = own_process(rank=rank, run="night", launch=launch, start_timestamp=start)
        publish(tmp_path, own_sample(process=process), f"{launch}-{rank}{SAMPLE_SUFFIX}")

    def launch_of(**selected: Any) -> str | None:
        return find_process(tmp_path, ProcessFilter(**selected)).process.launch

    assert launch_of(run="night") == new
    assert launch_of(run="night", rank=0) == new
    assert launch_of(launch=old, rank=0) == old
    with pytest.raises(UsageError, match="several processes match"):
        launch_of(rank=0)


def test_a_second_capture_is_refused(train: Train, tmp_path: Path) -> None:
    """While one command captures a process, another one cannot."""
    train(0)
    (sample,) = (tmp_path / "run").rglob(f"*{SAMPLE_SUFFIX}")
    request = sample.with_name(sample.name.replace(SAMPLE_SUFFIX, ".capture-request.json"))
    request.write_text('{"seconds": 60}')
    done = capture(tmp_path)

    assert done.returncode == 2
    assert "is in progress; if it was aborted, remove" in done.stderr
    assert request.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a command as another user")
def test_other_users_are_refused(shared_dir: Path, train: Train) -> None:
    """Only root and the user of the process may capture it; nothing is requested for others."""
    train(0, folder=shared_dir)
    done = capture(shared_dir, command=[sys.executable, "-c", AS_NOBODY, "capture"])

    assert done.returncode == 2, done.stderr
    assert "no process of yours runs in " in done.stderr
    assert done.stderr.endswith(f"{START} Only root can select processes of other users.\n")


@needs_root
@pytest.mark.parametrize("folder", ["61001", ""], ids=["directory", "old file"])
def test_a_strangers_file_does_not_block_a_capture(shared_dir: Path, folder: str) -> None:
    """Another user who claims the same rank of the same run is not found."""

    def claim(namespace: int) -> None:
        sample = own_sample(process=own_process(rank=0, run="night", pid_namespace=namespace))
        (shared_dir / folder).mkdir(exist_ok=True)
        (shared_dir / folder / f"1-2-3{SAMPLE_SUFFIX}").write_bytes(encode(sample))

    def find() -> int:
        publish(shared_dir, own_sample(process=own_process(rank=0, run="night")))
        return find_process(shared_dir, ProcessFilter(rank=0, run="night")).uid

    as_user(61001, lambda: claim(1))

    assert as_user(61002, find) == 61002
