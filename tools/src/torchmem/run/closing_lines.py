"""The two lines that `torchmem run` prints on a terminal when the program ends.

They show how much memory it needed, and where to find more. The process that used the GPU writes
them when Python exits, after the session has ended and after a traceback: `torchmem run` was
replaced by the command and no longer exists. After an OOM they are also written to a file or a
pipe; what the traceback has said is left out.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchmem.sample.run_directory import run_directory

if TYPE_CHECKING:
    from torchmem.explain.oom_report import OomReport
    from torchmem.sample.sample import DeviceSample, Process, Sample

VARIABLE = "TORCHMEM_SUMMARY"
"""Environment variable by which `torchmem run` asks for the lines: always, or after an OOM."""
ALWAYS, AFTER_OOM = "1", "oom"


def wanted(stderr: TextIO | None) -> str:
    """Return the value of the variable for a command with this stderr."""
    return ALWAYS if is_watched(stderr) else AFTER_OOM


def register(value: str) -> None:
    """Write the lines when this process exits; its sessions must begin later, to end before."""
    atexit.register(_write, os.getpid(), value)


def _write(pid: int, value: str) -> None:
    """Write the lines; a child that was forked inherits the call, and is another process."""
    with suppress(Exception):
        if os.getpid() == pid and sys.stderr is not None:
            from torchmem import sdk

            published = sdk.newest_sample()
            if published and _is_wanted(published.sample, value, sys.stderr):
                sample, directory, is_explained = published
                report = own_report(sample, directory)
                text = lines(sample, report, directory, is_explained=is_explained)
                print(*text, sep="\n", file=sys.stderr, flush=True)


def _is_wanted(sample: Sample, value: str, stderr: TextIO) -> bool:
    """Return whether this process writes the lines on this stderr."""
    is_oom = sample.ended == "oom"
    is_shown = (value == ALWAYS and is_watched(stderr)) or (is_oom and not stderr.isatty())
    return is_shown and (is_oom or speaks(sample.process))


def is_watched(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal that this process may write to undisturbed.

    In the background, the lines would appear in the middle of another program's screen.
    """
    if stream is None or not stream.isatty():
        return False
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:  # not the terminal of this session, as of the ranks of torchrun
        return True


def speaks(process: Process) -> bool:
    """Return whether this is the one process of a job on this node that writes the lines.

    Besides it, each one that has died of an OOM writes its own.
    """
    if process.local_rank is not None:
        return process.local_rank == 0
    return process.rank == 0 or (process.world_size or 1) == 1


def lines(
    sample: Sample, report: OomReport | None, directory: Path, *, is_explained: bool = False
) -> tuple[str, ...]:
    """Return the lines about a process that has ended, or nothing if no peak is known.

    `report` is the report of the OOM that ended it, which `is_explained` if the traceback has said
    why, and where to find more.
    """
    from torchmem.explain.growth import room_left

    known = [device for device in sample.devices if _peak(device)]
    if not known:
        return ()
    fullest = report.device if report and _peak(report.device) else max(known, key=_share)
    where = f" on cuda:{fullest.index}" if len(known) > 1 else ""
    left = room_left(fullest)
    room = f", {_short(left)} left" if left is not None else ""
    rank = "" if speaks(sample.process) else f"rank {sample.process.rank}, "
    peak = f"torchmem: {rank}peak {_of_total(fullest)}{where}{room}"
    if is_explained:
        return (peak,)
    verdict = _verdict(sample, fullest, report)
    first = f"{peak}; {verdict}" if verdict else peak
    return first, f"torchmem: {_next(sample, report, directory)}"


def own_report(sample: Sample, directory: Path) -> OomReport | None:
    """Return the report of the OOM that ended the process of a sample."""
    if sample.ended != "oom":
        return None
    from torchmem.node.reports import load_all

    own = (sample.process.pid, sample.process.start_ticks)
    with suppress(Exception):
        for _, report in load_all(directory, own_only=True):
            if (report.process.pid, report.process.start_ticks) == own:
                return report
    return None


def _verdict(sample: Sample, device: DeviceSample, report: OomReport | None) -> str:
    """Return what is wrong, or that nothing grew; "" if neither is known."""
    from torchmem.explain.growth import is_known, steps_left
    from torchmem.explain.headline import growth_sentence, headline, short_headline

    if report:
        sentence = headline(report)
    elif sample.ended == "oom" and device.last_oom:
        sentence = short_headline(device.last_oom)
    elif device.growth:
        sentence = growth_sentence(device.growth, steps_left(device))
    else:
        return "no growth" if device.run_history and is_known(device.run_history) else ""
    return f"{sentence[0].lower()}{sentence[1:]}"


def _next(sample: Sample, report: OomReport | None, directory: Path) -> str:
    place = "" if directory == run_directory({}) else f" --run-dir {directory}"
    if report:
        return f"`torchmem why{place}` explains it"
    return f"`torchmem why --pid {sample.process.pid}{place}` shows the rest"


def _peak(device: DeviceSample) -> int:
    return (device.allocator.active_peak_bytes if device.allocator else None) or 0


def _share(device: DeviceSample) -> float:
    return _peak(device) / device.total_bytes if device.total_bytes else 0.0


def _of_total(device: DeviceSample) -> str:
    if not device.total_bytes:
        return _short(_peak(device))
    total = _short(device.total_bytes)
    peak = _short(_peak(device)).removesuffix(total[total.index(" ") :])
    return f"{peak} of {total} ({_share(device):.0%})"


def _short(size: int) -> str:
    """Format a size with one digit after the point, such as "10.2 GiB"."""
    from torchmem.allocator.sizes import format_size

    number, _, unit = format_size(size).partition(" ")
    return f"{float(number):.1f} {unit}" if unit != "bytes" else f"{number} {unit}"
