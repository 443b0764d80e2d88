"""Replays the recording of an attempt that ran out of memory under settings that may have saved it.

A child process replays, and ends after MAX_SECONDS and at MAX_BYTES: the command must start soon.
It prints one verdict a line, so what it has found by then counts.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torchmem
from torchmem.allocator.settings import REQUEST_SETTINGS, format_alloc_conf, parse_alloc_conf
from torchmem.explain.remedies import SPLIT_SIZES_MB
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import printable
from torchmem.trace.interpreter import ErrorOutput, ending, isolated, without_python_variables

if TYPE_CHECKING:
    from torchmem.trace.recording import Recording
    from torchmem.whatif.result import WhatIf

MAX_SECONDS = 30.0
MAX_BYTES = 4 << 30
MAX_CPU_SECONDS = 60
"""For a child whose parent was killed."""
BATCH = 3
"""Settings that are replayed together; each batch replays the recorded settings once more."""
MAX_PROBLEM_LENGTH = 300

EXPANDABLE = "expandable_segments:True"
SETTINGS = (
    EXPANDABLE,
    "large_segment_size_mb:16",
    "large_segment_size_mb:12",
    *(f"roundup_power2_divisions:{count}" for count in (8, 4, 16, 2)),
    *(f"max_split_size_mb:{size}" for size in reversed(SPLIT_SIZES_MB)),
    *(f"{EXPANDABLE},roundup_power2_divisions:{count}" for count in (8, 2)),
)
"""Settings to try, the first that is enough wins: the least memory wasted comes first."""
REPLAYED = REQUEST_SETTINGS - {"per_process_memory_fraction", "garbage_collection_threshold"}
"""Settings of the user that a replay keeps: the recorded limit contains the memory fraction."""
SINCE = {"large_segment_size_mb": (2, 11)}
"""The version of PyTorch that introduced a setting; an older one would not start with it."""

_ROOTS = [str(Path(folder).parent) for folder in torchmem.__path__]
_PROGRAM = "sys.path[:0] = sys.argv[2:]; from torchmem.run.replay import main; main()"

Verdict = Literal["enough", "not enough", "unknown"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the replays of a recording showed.

    Attributes:
        enough: the first setting under which memory suffices.
        failed: settings under which it does not.
        problem: why the recording shows nothing.
    """

    enough: str | None = None
    failed: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """Which setting would have been enough.

    Attributes:
        device: torch's index.
        present: the settings to which one is added.
        settings: those to try, one after the other.
        room: bytes that must be left at the end.
    """

    device: int
    present: Mapping[str, str]
    settings: Sequence[str]
    room: int = 0


def replay(recording: Path, question: Question, seconds: float = MAX_SECONDS) -> Replayed:
    """Replay a recording under one setting after the other, for at most `seconds`."""
    job = {
        "recording": str(recording),
        "device": question.device,
        "present": {key: value for key, value in question.present.items() if key in REPLAYED},
        "settings": list(question.settings),
        "room": question.room,
    }
    with ErrorOutput() as errors:
        output, exit_code = _run(isolated(_PROGRAM, json.dumps(job), *_ROOTS), errors, seconds)
        return _conclude(output, _problem(exit_code, errors.last_line()))


def _run(command: Sequence[str], errors: ErrorOutput, seconds: float) -> tuple[bytes, int]:
    """Return what a command prints within `seconds`, and its exit code."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors.writer,
        env=without_python_variables(os.environ),
        # A replay may fork processes, which end with its group.
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return output, process.returncode


def _problem(exit_code: int, last_line: str) -> str:
    """Return why a child has not answered."""
    if exit_code <= 0 or last_line.startswith(MemoryError.__name__):  # a signal: a limit, mostly
        return "its replay took too much time or memory."
    return f"the process that replays it failed ({ending(exit_code, last_line)})."


def _conclude(output: bytes, problem: str) -> Replayed:
    """Return what the child has printed; its last line may be cut. Without any, `problem`."""
    lines = [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    failed = tuple(text for verdict, text in lines if verdict == "not enough")
    last, text = lines[-1] if lines else ("problem", problem)
    if last == "problem":
        return Replayed(problem=text)
    if last == "enough":
        return Replayed(text, failed)
    return Replayed(
        failed=failed, problem=None if failed else "it does not show what happens after a restart."
    )


def answers(job: Mapping[str, Any]) -> Iterator[tuple[Verdict | Literal["problem"], str]]:
    """Yield the verdict on each setting, until one is enough; or what is wrong."""
    from torchmem.trace import read

    try:
        for recording in read(Path(job["recording"])):
            if recording.device != job["device"]:
                continue
            for verdict, setting in _verdicts(recording, job):
                yield verdict, setting
                if verdict == "enough":
                    return
    except UsageError as error:
        yield "problem", printable(str(error))[:MAX_PROBLEM_LENGTH]


def _verdicts(recording: Recording, job: Mapping[str, Any]) -> Iterator[tuple[Verdict, str]]:
    from torchmem.whatif.engine import what_if

    present, settings = job["present"], job["settings"]
    for start in range(0, len(settings), BATCH):
        confs = {
            setting: format_alloc_conf({**present, **parse_alloc_conf(setting)})
            for setting in settings[start : start + BATCH]
        }
        answer = what_if(recording, settings=list(confs.values()))
        _check(answer)
        for setting, conf in confs.items():
            yield _verdict(answer, conf, job["room"]), setting


def _check(answer: WhatIf) -> None:
    """Raise UsageError if the replay does not show what happens after a restart."""
    if not answer.fidelity.trusted:
        raise UsageError(answer.fidelity.reason or "")
    if answer.outcomes[0].oom is None:
        raise UsageError("it has no OutOfMemoryError.")
    if answer.outcomes[0].start != "empty":
        raise UsageError("it does not start with the program.")


def _verdict(answer: WhatIf, conf: str, room: int) -> Verdict:
    """Return whether memory would have sufficed after a restart with `conf`, with `room` left."""
    outcome = next(each for each in answer.outcomes[1:] if each.conf == conf)
    if outcome.refused is not None:
        return "unknown"
    if outcome.oom is not None:
        return "not enough"
    left = None if answer.gpu_bytes is None else answer.gpu_bytes - outcome.peak_reserved
    return "enough" if left is None or left >= room else "not enough"


def main() -> None:
    """Print the verdicts for the job in the first argument."""
    from torchmem.trace.worker import lower_limit

    lower_limit(resource.RLIMIT_AS, MAX_BYTES)
    lower_limit(resource.RLIMIT_CPU, MAX_CPU_SECONDS)
    for answer in answers(json.loads(sys.argv[1])):
        print(json.dumps(answer), flush=True)
