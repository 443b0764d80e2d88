"""`torchmem capture`: have a running process record its memory history, and fetch the snapshot."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from torchmem.cli.flags import add_process, add_run_directory
from torchmem.node.ranks import ProcessFilter, TrainingProcess, find_process
from torchmem.node.requests import Exchange, opened
from torchmem.sample.capture_messages import (
    ANSWER_SUFFIX,
    DEFAULT_ENTRIES,
    MAX_CAPTURE_ENTRIES,
    MAX_SECONDS,
    MAX_SNAPSHOT_BYTES,
    REQUEST_SUFFIX,
    SNAPSHOT_SUFFIX,
    START_GRACE_SECONDS,
    STOP_GRACE_SECONDS,
    AnswerState,
    CaptureAnswer,
    CaptureRequest,
    decode_answer,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.run_directory import run_directory
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted

HELP = "record the memory history of a running process and save the snapshot"
EPILOG = """\
Examples:
  torchmem capture --rank 3 --seconds 20
  torchmem capture --pid 4242 --out rank3.pickle
"""
POLL_SECONDS = 0.1
# The process's background thread may take this long to notice a file, or to write the snapshot.
NOTICE_SECONDS = 60.0
MAX_CAPTURE_SECONDS = START_GRACE_SECONDS + MAX_SECONDS + STOP_GRACE_SECONDS + NOTICE_SECONDS

EXCHANGE = Exchange("capture", REQUEST_SUFFIX, ANSWER_SUFFIX, decode_answer, MAX_CAPTURE_SECONDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add_process(parser)
    add("--seconds", type=float, default=20.0, metavar="S", help="recording time (default 20)")
    add(
        "--max-entries",
        type=int,
        default=DEFAULT_ENTRIES,
        metavar="N",
        help=f"newest entries to keep of each GPU (default {DEFAULT_ENTRIES:,})",
    )
    add("--out", type=Path, metavar="FILE", help="output file (default rankN-TIME.pickle)")
    add_run_directory(parser)


def run(arguments: argparse.Namespace) -> int:
    """Capture a snapshot and return the exit code. Raise UsageError."""
    if not 0 < arguments.seconds <= MAX_SECONDS:
        raise UsageError(f"--seconds must be above 0 and at most {MAX_SECONDS:g}.")
    if not 0 < arguments.max_entries <= MAX_CAPTURE_ENTRIES:
        raise UsageError(f"--max-entries must be above 0 and at most {MAX_CAPTURE_ENTRIES:,}.")
    directory = arguments.run_dir or run_directory(os.environ)
    selected = ProcessFilter(arguments.rank, arguments.run_name, arguments.pid, arguments.launch)
    process = find_process(directory, selected)
    out = arguments.out or Path(
        f"rank{process.process.rank}-{time.strftime('%Y%m%d-%H%M%S')}.pickle"
    )
    _check_out(out)
    request = CaptureRequest(arguments.seconds, arguments.max_entries)
    with opened(process) as sample:
        try:
            with EXCHANGE.asked(process, sample, request) as request_ns:
                answer = _wait(process, sample, request_ns, arguments.seconds)
        except KeyboardInterrupt:
            raise UsageError(f"interrupted; {process} stops recording.") from None
        size = _fetch(process, sample, out)
    print(f"{out}: {size / 1e6:.1f} MB; open it with https://pytorch.org/memory_viz")
    if answer.overwritten:
        print(f"torchmem: {_what_is_lost(request, answer)}", file=sys.stderr)
    return 0


def _what_is_lost(request: CaptureRequest, answer: CaptureAnswer) -> str:
    """Return what the file lacks, and how to keep it."""
    kept = "" if answer.kept_seconds is None else f"; it has the last {answer.kept_seconds:.3g} s"
    lost = f"the file lacks the oldest entries, because a GPU had more than {request.max_entries:,}"
    if request.max_entries == MAX_CAPTURE_ENTRIES:
        return f"{lost}{kept}. Use fewer --seconds."
    return f"{lost}{kept}. Use a larger --max-entries, or fewer --seconds."


def _check_out(out: Path) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"--out: the directory {out.parent} does not exist; create it first.")
    if out.exists() and not out.is_file():
        raise UsageError(f"--out: {out} is not a regular file; give another name.")


def _wait(process: TrainingProcess, sample: Path, request_ns: int, seconds: float) -> CaptureAnswer:
    """Wait until the snapshot is written, and return the answer. Raise UsageError if it is not."""
    timeouts = {
        None: NOTICE_SECONDS,
        "waiting": START_GRACE_SECONDS + NOTICE_SECONDS,
        "recording": seconds + STOP_GRACE_SECONDS + NOTICE_SECONDS,
    }
    progress = {"waiting": "waits for the end of a step", "recording": f"records for {seconds:g} s"}
    state: AnswerState | None = None
    since = time.monotonic()
    _show(f"requesting a capture from {process}")
    while True:
        # In this order: a process may write its answer and then end.
        ended = process.has_ended()
        answer = EXCHANGE.answer(process, sample, request_ns)
        if answer is not None and answer.state != state:
            state, since = answer.state, time.monotonic()
            if state == "done":
                return answer
            if state == "refused":
                raise UsageError(f"{process} refused: {answer.reason}")
            _show(f"{process} {progress[state]}")
        if ended:
            raise UsageError(f"{process} ended before it wrote the snapshot.")
        if time.monotonic() - since > timeouts[state]:
            raise UsageError(f"{process} {_timeout_reason(state)}")
        time.sleep(POLL_SECONDS)


def _timeout_reason(state: AnswerState | None) -> str:
    if state is None:
        return (
            f"did not notice the request within {NOTICE_SECONDS:g} s: it is stopped, hangs in the "
            "driver, has a longer interval than that, or runs an older torchmem."
        )
    return "stopped answering: it is stopped or hangs in the driver."


def _show(progress: str) -> None:
    print(f"torchmem: {progress} …", file=sys.stderr, flush=True)


def _fetch(process: TrainingProcess, sample: Path, out: Path) -> int:
    """Move the snapshot to `out`, readable by the caller only, and return its size in bytes."""
    path, shown = (sibling_path(file, SNAPSHOT_SUFFIX) for file in (sample, process.sample))
    try:
        with open_untrusted(path, MAX_SNAPSHOT_BYTES, process.uid) as (file, status):
            _copy(file.fileno(), out, status.st_size)
    except UntrustedFileError as error:
        raise UsageError(f"the snapshot {shown} {error}.") from None
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written ({error.strerror}); the snapshot is {shown}."
        ) from None
    with contextlib.suppress(OSError):
        path.unlink()
    return status.st_size


def _copy(source: int, out: Path, size: int) -> None:
    """Copy at most `size` bytes, even if the source grows meanwhile.

    The file is new and replaces an existing one, so it belongs to the caller and no link is
    followed.
    """
    target, name = tempfile.mkstemp(".tmp", f".{out.name}.", out.parent)
    temporary = Path(name)
    try:
        offset = 0
        while offset < size and (sent := os.sendfile(target, source, offset, size - offset)):
            offset += sent
        temporary.replace(out)
    except BaseException:
        temporary.unlink()
        raise
    finally:
        os.close(target)
