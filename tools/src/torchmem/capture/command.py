"""The training processes of a run directory, for commands that talk to one of them; the files are not trusted.

`torchmem capture`: a running training process records its memory history and hands over the snapshot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmem.sample.capture_messages import (
    ANSWER_SUFFIX,
    MAX_MESSAGE_BYTES,
    MAX_SECONDS,
    MAX_SNAPSHOT_BYTES,
    REQUEST_SUFFIX,
    SNAPSHOT_SUFFIX,
    START_GRACE_SECONDS,
    STOP_GRACE_SECONDS,
    CaptureAnswer,
    CaptureRequest,
    decode_answer,
    encode,
    sibling_path,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.processes import Processes
from torchmem.sample.procfs import start_ticks
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX, run_directory
from torchmem.sample.sample import Process
from torchmem.sample.untrusted import (
    UntrustedFileError,
    open_untrusted,
    read_untrusted,
    sanitize_text,
)

MOST_FILES = 16384
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Target:
    """One process that published a sample: its file, the file's owner, its pid here, and whether it still runs.

    `alive` is None where it may be hidden from this user.
    """

    sample: Path
    uid: int
    process: Process
    pid: int
    alive: bool | None

    def __str__(self) -> str:
        return f"rank {self.process.rank} of run {self.process.run} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which process: None takes any. `pid` as this namespace counts, or as the process itself does."""

    rank: int | None = None
    run: str | None = None
    pid: int | None = None

    def fits(self, target: Target) -> bool:
        """Whether this is a process that was asked for."""
        process = target.process
        return (
            self.rank in {None, process.rank}
            and self.run in {None, process.run}
            and self.pid in {None, target.pid, process.pid}
        )


def find(directory: Path, wanted: Wanted) -> Target:
    """The one living process that is wanted.

    Raises UsageError when there is none, when it is gone, or when there are several.
    """
    everyone = sorted(
        targets(directory), key=lambda target: (target.process.run, target.process.rank, target.pid)
    )
    fitting = [target for target in everyone if wanted.fits(target)]
    living = [target for target in fitting if target.alive is not False]
    if len(living) == 1:
        return living[0]
    if living:
        raise UsageError(
            f"several processes match: {_names(living)}; narrow it with --rank, --run or --pid."
        )
    if fitting:
        raise UsageError(f"{fitting[0]} is gone; a process can only be captured while it runs.")
    there = _names([target for target in everyone if target.alive is not False])
    raise UsageError(
        f"no process in {directory} matches; there {f'are: {there}' if there else 'is none'}."
    )


def _names(found: list[Target]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(str(target) for target in found[:MOST_NAMED]) + more


def targets(directory: Path) -> Iterator[Target]:
    """All processes of the directory; a sample that its process's user does not own is left out."""
    processes = Processes()
    try:
        paths = [path for path in directory.iterdir() if path.name.endswith(SAMPLE_SUFFIX)][
            :MOST_FILES
        ]
    except OSError as error:
        raise UsageError(
            f"the run directory {directory} cannot be read ({error.strerror}); see --run-dir."
        ) from None
    for path in paths:
        target = _target(path, processes)
        if target is not None:
            yield target


def _target(path: Path, processes: Processes) -> Target | None:
    try:
        data, status = read_untrusted(path, MAX_SAMPLE_BYTES)
        sample = json.loads(data)
        process = _process(sample["process"])
    except (UntrustedFileError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sighting = processes.locate(process)
    if sighting.alive and processes.owner(sighting.pid) not in {None, status.st_uid}:
        return None
    ended = sample.get("ended") is not None
    return Target(path, status.st_uid, process, sighting.pid, False if ended else sighting.alive)


def _process(fields: dict[str, Any]) -> Process:
    """What names the process; raises ValueError, KeyError or TypeError for what the SDK does not write."""
    return Process(
        pid=_number(fields["pid"]),
        pid_namespace=None if fields["pid_namespace"] is None else _number(fields["pid_namespace"]),
        start_ticks=None if fields["start_ticks"] is None else _number(fields["start_ticks"]),
        hostname="",
        run=sanitize_text(fields["run"]),
        rank=_number(fields["rank"]),
    )


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not a number of a process")
    return value


def is_gone(target: Target) -> bool:
    """Whether the process has certainly ended by now."""
    ticks = start_ticks(target.pid)
    return target.alive is True and ticks != target.process.start_ticks


HELP = "record a running process's memory history and keep the snapshot"
POLL_SECONDS = 0.1
# How long the process's background thread may take to notice something, or to write the snapshot.
NOTICE_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--rank", type=int, metavar="N", help="global rank of the process")
    parser.add_argument(
        "--run", metavar="NAME", dest="run_name", help="its run, where several are on this node"
    )
    parser.add_argument("--pid", type=int, metavar="N", help="its process id")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="how long to record (default 20)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to put it (default rankN-TIME.pickle)"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="run directory (default TORCHMEM_RUN_DIR)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Capture and return the exit code; raises UsageError."""
    if not 0 < arguments.seconds <= MAX_SECONDS:
        raise UsageError(f"--seconds must be between 0 and {MAX_SECONDS:g}.")
    directory = arguments.run_dir or run_directory(os.environ)
    target = find(directory, Wanted(arguments.rank, arguments.run_name, arguments.pid))
    _check_permission(target)
    out = arguments.out or Path(
        f"rank{target.process.rank}-{time.strftime('%Y%m%d-%H%M%S')}.pickle"
    )
    if not out.parent.is_dir():
        raise UsageError(f"--out: there is no directory {out.parent}; make it first.")
    try:
        with _request(target, arguments.seconds) as request_ns:
            _wait(target, request_ns, arguments.seconds)
    except KeyboardInterrupt:
        raise UsageError(f"interrupted; {target} stops recording.") from None
    size = _fetch(target, out)
    print(f"{out}: {size / 1e6:.1f} MB; drop it on https://pytorch.org/memory_viz")
    return 0


def _check_permission(target: Target) -> None:
    if os.geteuid() in {0, target.uid}:
        return
    try:
        owner = pwd.getpwuid(target.uid).pw_name
    except KeyError:
        owner = str(target.uid)
    raise UsageError(f"{target} belongs to user {owner}; run this as that user or as root.")


@contextmanager
def _request(target: Target, seconds: float) -> Iterator[int]:
    """Ask, and take the question back at the end, whatever happens; gives the request's modification time."""
    from torchmem.sample.run_directory import replace_file

    path, answer = (
        sibling_path(target.sample, REQUEST_SUFFIX),
        sibling_path(target.sample, ANSWER_SUFFIX),
    )
    longest = START_GRACE_SECONDS + MAX_SECONDS + STOP_GRACE_SECONDS + NOTICE_SECONDS
    with contextlib.suppress(FileNotFoundError):
        if time.time() - path.lstat().st_mtime < longest:
            raise UsageError(
                f"another capture of {target} is under way; if it was interrupted, remove {path}."
            )
    try:
        replace_file(path, encode(CaptureRequest(seconds)))
        request_ns = path.lstat().st_mtime_ns
    except OSError as error:
        raise UsageError(f"the request {path} cannot be written ({error.strerror}).") from None
    try:
        yield request_ns
    finally:
        for left in (path, answer):
            with contextlib.suppress(OSError):
                left.unlink()


def _wait(target: Target, request_ns: int, seconds: float) -> None:
    """Wait until the snapshot lies there; raises UsageError when it never will."""
    patience = {
        None: NOTICE_SECONDS,
        "waiting": START_GRACE_SECONDS + NOTICE_SECONDS,
        "recording": seconds + STOP_GRACE_SECONDS + NOTICE_SECONDS,
    }
    state, since = None, time.monotonic()
    _show(f"asking {target}")
    while True:
        gone = is_gone(target)
        answer = _answer(target, request_ns)
        if answer is not None and answer.state != state:
            state, since = answer.state, time.monotonic()
            if state == "done":
                return
            if answer.state == "refused":
                raise UsageError(f"{target} refused: {answer.reason}")
            _show(
                f"{target} {'waits for the end of a step' if state == 'waiting' else f'records for {seconds:g} s'}"
            )
        if gone:
            raise UsageError(f"{target} ended before the snapshot was there.")
        if time.monotonic() - since > patience[state]:
            raise UsageError(f"{target} {_silence(state)}")
        time.sleep(POLL_SECONDS)


def _silence(state: str | None) -> str:
    if state is None:
        return (
            f"did not notice the request within {NOTICE_SECONDS:g} s: it is stopped, hangs in the driver, has an "
            "interval longer than that, or runs an older torchmem."
        )
    return "stopped answering; it may be stopped or hang in the driver."


def _show(progress: str) -> None:
    print(f"torchmem: {progress} …", file=sys.stderr, flush=True)


def _answer(target: Target, request_ns: int) -> CaptureAnswer | None:
    """The process's answer to this request, if there is one yet."""
    try:
        data, _ = read_untrusted(
            sibling_path(target.sample, ANSWER_SUFFIX), MAX_MESSAGE_BYTES, target.uid
        )
        answer = decode_answer(data)
    except (FileNotFoundError, UntrustedFileError, ValueError):
        return None
    return answer if answer.request_ns == request_ns else None


def _fetch(target: Target, out: Path) -> int:
    """Move the snapshot to `out`, private to the caller; gives its size in bytes."""
    path = sibling_path(target.sample, SNAPSHOT_SUFFIX)
    try:
        with open_untrusted(path, MAX_SNAPSHOT_BYTES, target.uid) as (file, status):
            _copy(file.fileno(), out, status.st_size)
    except UntrustedFileError as error:
        raise UsageError(f"the snapshot {path} {error}.") from None
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written ({error.strerror}); the snapshot is {path}."
        ) from None
    with contextlib.suppress(OSError):
        path.unlink()
    return status.st_size


def _copy(source: int, out: Path, size: int) -> None:
    """Copy that many bytes and no more, however the source grows."""
    target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        offset = 0
        while offset < size and (sent := os.sendfile(target, source, offset, size - offset)):
            offset += sent
    finally:
        os.close(target)
