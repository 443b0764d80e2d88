"""`torchmem release`: have running processes return memory to the driver."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torchmem.allocator.sizes import format_size
from torchmem.cli.flags import add_run_directory
from torchmem.node.ranks import ProcessFilter, TrainingProcess, training_processes
from torchmem.node.requests import Exchange, opened
from torchmem.output.terminal import write_out
from torchmem.sample.errors import UsageError
from torchmem.sample.release_messages import (
    ANSWER_SUFFIX,
    MAX_WANTED_BYTES,
    REQUEST_SUFFIX,
    ReleaseAnswer,
    ReleaseRequest,
    decode_answer,
)
from torchmem.sample.run_directory import run_directory
from torchmem.sample.sample import read_sample

HELP = "make running processes return unused memory to the driver"
EPILOG = """\
Each process returns its cache at the end of its step, or at once if it is idle.
You can ask only your own processes; root can ask those of all users.

Examples:
  torchmem release --gpu 0
  torchmem release --run nightly --hooks 8
"""
POLL_SECONDS = 0.1
DEFAULT_SECONDS = 60.0
MAX_SECONDS = 600.0
MAX_HOOK_GIB = 1024.0

EXCHANGE = Exchange("release", REQUEST_SUFFIX, ANSWER_SUFFIX, decode_answer, MAX_SECONDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--gpu", metavar="N", help="processes on this GPU: NVML's index, or the start of its UUID")
    add("--run", metavar="NAME", dest="run_name", help="all ranks of this run's newest launch")
    add("--launch", metavar="ID", help="all ranks of this launch, as in the label `launch`")
    add("--rank", type=int, metavar="N", help="only this global rank")
    add("--pid", type=int, metavar="N", help="only this process")
    add(
        "--hooks",
        type=float,
        default=0.0,
        metavar="GIB",
        help="also call the script's pressure hooks for this much memory (default 0)",
    )
    add(
        "--timeout",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="S",
        help=f"seconds to wait for the processes (default {DEFAULT_SECONDS:g})",
    )
    add_run_directory(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the processes, print what came back, and return the exit code. Raise UsageError.

    The exit code is 1 if a process did not release.
    """
    _check(arguments)
    processes = _selected(arguments)
    request = ReleaseRequest("request", min(int(arguments.hooks * (1 << 30)), MAX_WANTED_BYTES))
    outcomes = _ask(processes, request, arguments.timeout)
    write_out(table(outcomes))
    return 0 if all(outcome.answer is not None for outcome in outcomes) else 1


def _check(arguments: argparse.Namespace) -> None:
    chosen = (
        arguments.gpu,
        arguments.run_name,
        arguments.launch,
        arguments.rank,
        arguments.pid,
    )
    if all(value is None for value in chosen):
        raise UsageError("name the processes to ask: --gpu, --run, --launch, --rank or --pid.")
    if not 0 < arguments.timeout <= MAX_SECONDS:
        raise UsageError(f"--timeout must be above 0 and at most {MAX_SECONDS:g}.")
    if not 0 <= arguments.hooks <= MAX_HOOK_GIB:
        raise UsageError(f"--hooks must be from 0 to {MAX_HOOK_GIB:g}, in GiB.")


def _selected(arguments: argparse.Namespace) -> list[TrainingProcess]:
    """Return the running processes that the flags select. Raise UsageError without any."""
    directory = arguments.run_dir or run_directory(os.environ)
    uuid = None if arguments.gpu is None else gpu_uuid(arguments.gpu)
    selected = ProcessFilter(arguments.rank, arguments.run_name, arguments.pid, arguments.launch)
    found = [
        process
        for process in training_processes(directory)
        if process.alive is not False
        and selected.matches(process)
        and (uuid is None or _uses(process, uuid))
    ]
    if not found:
        hint = "; only root can select processes of other users" if os.geteuid() else ""
        raise UsageError(
            f"no running process in {directory} matches{hint}: `torchmem doctor` shows the runs."
        )
    found = selected.newest(found, TrainingProcess.launched)
    return sorted(found, key=lambda process: (process.process.run, process.process.rank))


def _uses(process: TrainingProcess, uuid: str) -> bool:
    """Return whether the process has memory on the device whose UUID starts with `uuid`."""
    sample = read_sample(process.sample, process.uid)
    return any(
        (device.uuid or "").startswith(uuid) for device in (sample.devices if sample else ())
    )


@dataclass(slots=True)
class Outcome:
    """A process's answer to a request next to its `sample`, written at `request_ns`.

    `reason` is one sentence if there is no answer.
    """

    process: TrainingProcess
    sample: Path = Path()
    request_ns: int = 0
    answer: ReleaseAnswer | None = None
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected from the process."""
        return self.answer is not None or self.reason is not None


def _ask(
    processes: Sequence[TrainingProcess], request: ReleaseRequest, seconds: float
) -> list[Outcome]:
    """Ask all processes at the same time and wait for their answers."""
    outcomes = [Outcome(process) for process in processes]
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        for outcome in outcomes:
            _write(outcome, request, stack)
        while not all(outcome.is_over for outcome in outcomes) and time.monotonic() < deadline:
            for outcome in outcomes:
                if not outcome.is_over:
                    _poll(outcome)
            time.sleep(POLL_SECONDS)
    for outcome in outcomes:
        if not outcome.is_over:
            outcome.reason = f"no step ended within {seconds:g} s"
    return outcomes


def _write(outcome: Outcome, request: ReleaseRequest, stack: ExitStack) -> None:
    """Write the request to a process; the stack removes it."""
    try:
        outcome.sample = stack.enter_context(opened(outcome.process))
        asked = EXCHANGE.asked(outcome.process, outcome.sample, request)
        outcome.request_ns = stack.enter_context(asked)
    except UsageError as error:
        outcome.reason = str(error)


def _poll(outcome: Outcome) -> None:
    # In this order: a process may write its answer and then end.
    has_ended = outcome.process.has_ended()
    answer = EXCHANGE.answer(outcome.process, outcome.sample, outcome.request_ns)
    if answer is not None and answer.state == "done":
        outcome.answer = answer
    elif answer is not None and answer.state == "refused":
        outcome.reason = f"refused: {answer.reason}{_note(answer)}"
    elif has_ended:
        outcome.reason = "ended meanwhile"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return what each process released, and the sum for each GPU."""
    lines = []
    total: dict[str, int] = {}
    for outcome in outcomes:
        lines.append(f"{outcome.process}: {_result(outcome)}")
        for uuid, size in (outcome.answer.released if outcome.answer else {}).items():
            total[uuid] = total.get(uuid, 0) + size
    return "\n".join([*lines, "", *_sums(total)]) + "\n"


def _result(outcome: Outcome) -> str:
    answer = outcome.answer
    if answer is None:
        return (outcome.reason or "").rstrip(".")
    released = sum(answer.released.values())
    if not released:
        return f"had nothing to return{_note(answer)}"
    seconds = f"{answer.seconds * 1000:.0f} ms"
    return f"returned {format_size(released)} in {seconds}{_note(answer)}"


def _note(answer: ReleaseAnswer) -> str:
    return f"; {answer.note}" if answer.note else ""


def _sums(total: Mapping[str, int]) -> list[str]:
    if not total:
        return ["Nothing was returned to the driver."]
    return [f"{uuid}: {format_size(size)} returned to the driver" for uuid, size in total.items()]


def gpu_uuid(name: str) -> str:
    """Return the UUID, or its start, of a GPU that is named by NVML's index or by its UUID.

    An index needs the exporter's packages. Raises UsageError.
    """
    if not name.isdecimal():
        return name
    try:
        from torchmem.exporter.driver import PyNvml
        from torchmem.exporter.gpus import GpuFault
        from torchmem.exporter.nvml import NvmlDownError
    except ModuleNotFoundError:
        raise UsageError(
            "--gpu: an index needs torchmem[exporter]; install it, or give the UUID that "
            "`nvidia-smi -L` shows."
        ) from None
    nvml = PyNvml()
    try:
        nvml.open()
        gpu = nvml.gpu(int(name)) if int(name) < nvml.count() else None
        nvml.close()
    except NvmlDownError as error:
        raise UsageError(
            f"--gpu: {error}; give the UUID of the GPU instead of its index."
        ) from None
    if gpu is None or isinstance(gpu, GpuFault):
        raise UsageError(f"--gpu: there is no working GPU {name}; `nvidia-smi -L` lists them.")
    return gpu.uuid
