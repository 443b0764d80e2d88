"""The jobs of Slurm on this node, with the GPUs that Slurm has given them.

The control groups say which jobs are here; root alone makes them. `scontrol show job` says the rest
of each, and is asked once for a job: a node makes one request to Slurm's controller for each job.
From 26.05 on, Slurm names control groups by SLUID instead of by job ID, unless cgroup.conf has
CgroupJobIdPaths=yes; scontrol takes both.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmem.exporter.worker import JobThread
from torchmem.sample.untrusted import sanitize_text

_log = logging.getLogger(__name__)

CGROUPS = Path("/sys/fs/cgroup")
# https://slurm.schedmd.com/cgroup_v2.html, and below devices or freezer in version 1.
_FOLDERS = (
    "system.slice/*slurmstepd.scope/*",
    "devices/slurm*/uid_*/job_*",
    "freezer/slurm*/uid_*/job_*",
)
SLUID = r"s[0-9A-Z]{13}"
_JOB = re.compile(rf"job_(?P<id>\d+)|(?P<sluid>{SLUID})")
MAX_JOBS = 256
_COMMAND_SECONDS = 10.0
RETRY_SECONDS = 60.0
_WAIT_SECONDS = 0.5
"""How long a scrape waits for scontrol. What it does not know then, the next one does."""

_FIELD = re.compile(r"(\w+)=(\S+)")
# Of each node, or of several with the same: Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:h100:2(IDX:0-1)
_GRES = re.compile(r"Nodes=(?P<nodes>\S+) CPU_IDs=\S* Mem=\S* GRES=(?P<gres>\S+)")
_GPUS = re.compile(r"(?:^|,)gpu:(?P<type>[^(]*)\(IDX:(?P<indices>[\d,-]+)\)")
# The end of a type's name, such as nvidia_a100_1g.5gb: Slurm's AutoDetect=nvml.
_PROFILE = re.compile(r"(?<![0-9a-z.])\d+g\.\d+gb(?=:)")
_RANGES = re.compile(r"(?P<before>[^\[\]]*)\[(?P<ranges>[\d,-]+)\](?P<after>[^\[\]]*)")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job on this node; `gpus` are the minor numbers of its GPUs here, as in /dev/nvidia0.

    `profiles`: those of its MIG devices here, which Slurm's numbers do not tell apart.
    """

    id: str
    user: str | None = None
    account: str | None = None
    gpus: frozenset[int] = frozenset()
    profiles: tuple[str, ...] = ()

    def labels(self) -> Mapping[str, str]:
        """Return the labels that say whose the GPUs are."""
        known = {"slurm_job_id": self.id, "user": self.user, "account": self.account}
        return {label: sanitize_text(text) for label, text in known.items() if text}


class SlurmJobs:
    """Follows the jobs from scrape to scrape.

    `ask` returns the output of `scontrol show job`, by default of `scontrol`; it raises OSError or
    subprocess.SubprocessError. `node`: the name of this node in Slurm, by default the host's.
    `clock` returns seconds that never go back.
    """

    def __init__(
        self,
        scontrol: Path,
        cgroups: Path = CGROUPS,
        node: str | None = None,
        ask: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cgroups = cgroups
        self._node = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._ask = ask or (lambda job: _show_job(scontrol, job))
        self._clock = clock
        self._jobs: dict[str, SlurmJob | None] = {}
        self._again: dict[str, float] = {}
        self._worker = JobThread()
        self._problem = ""

    def __call__(self) -> Mapping[str, SlurmJob]:
        """Return the jobs that are known, by the job ID or SLUID of their control groups."""
        names, now = self._names(), self._clock()
        self._jobs = {name: job for name, job in self._jobs.items() if name in names}
        self._again = {name: at for name, at in self._again.items() if name in names}
        new = [n for n in names if n not in self._jobs and now >= self._again.get(n, now)]
        if new:
            self._worker.run(lambda: self._look_up(new), _WAIT_SECONDS)
        return {name: job for name, job in self._jobs.items() if job}

    def close(self) -> None:
        """Ask nothing more."""
        self._worker.close()

    def _names(self) -> Sequence[str]:
        found = (path.name for folder in _FOLDERS for path in self._cgroups.glob(folder))
        matches = filter(None, map(_JOB.fullmatch, found))
        return list(dict.fromkeys(match["id"] or match["sluid"] for match in matches))[:MAX_JOBS]

    def _look_up(self, names: Sequence[str]) -> None:
        problem = ""
        for name in names:
            try:
                self._jobs[name] = parsed(self._ask(name), self._node)
            except (OSError, subprocess.SubprocessError) as error:  # noqa: PERF203 - a few jobs
                problem, self._again[name] = str(error), self._clock() + RETRY_SECONDS
        self._note(problem)

    def _note(self, problem: str) -> None:
        if problem and not self._problem:
            _log.warning("the GPUs of new jobs of Slurm are unknown: %s", problem)
        self._problem = problem


def _show_job(scontrol: Path, job: str) -> str:
    command = [str(scontrol), "--details", "--oneliner", "show", "job", job]
    done = subprocess.run(
        command, capture_output=True, check=True, timeout=_COMMAND_SECONDS, stdin=subprocess.DEVNULL
    )
    return done.stdout.decode(errors="replace")


def parsed(text: str, node: str) -> SlurmJob | None:
    """Return the job that `scontrol --details --oneliner show job` describes; None without one."""
    line = next((line for line in text.splitlines() if line.startswith("JobId=")), None)
    if line is None:
        return None
    fields = dict(reversed(_FIELD.findall(line)))
    given = [
        (number, _PROFILE.search(gres["type"]))
        for match in _GRES.finditer(line)
        if node.partition(".")[0] in set(hosts(match["nodes"]))
        for gres in _GPUS.finditer(match["gres"])
        for number in numbers(gres["indices"])
    ]
    gpus = frozenset(number for number, profile in given if profile is None)
    profiles = tuple(profile[0] for _, profile in given if profile)
    user = fields.get("UserId", "").partition("(")[0]
    return SlurmJob(fields["JobId"], user or None, fields.get("Account"), gpus, profiles)


def hosts(text: str) -> Iterator[str]:
    """Yield the names in a host list of Slurm, such as a,n[1-3,07]."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        match = _RANGES.fullmatch(part)
        if match is None:
            yield part
            continue
        for each in match["ranges"].split(","):
            width = len(each.partition("-")[0])
            for number in numbers(each):
                yield f"{match['before']}{number:0{width}}{match['after']}"


def numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list of ranges, such as 0-3,6; at most 4096 of each."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), min(int(last or first), int(first) + 4095) + 1)
