"""OutOfMemoryErrors of each cause: what torchmem says, and what following its advice gains.

The jobs are those of `experiments.verdict`. A process holds most of the GPU, as a whole GPU is
filled too slowly, so a job whose first step does not fit may also be called `external`.
"""

from __future__ import annotations

import math
import time

import torch
from experiments.real_gpu.figures import Figures
from experiments.real_gpu.processes_on_gpu import MIB, other_process
from experiments.verdict.cures import followed
from experiments.verdict.kinds import KINDS, WORTH, Case, Kind
from experiments.verdict.on_gpu import run, true_causes
from experiments.verdict.runs import Ended, first_advice

JOBS = (
    "outputs_in_a_list",
    "window",
    "fraction_with_leak",
    "neighbor_grows",
    "waiting_frees",
    "long_batch",
    "without_no_grad",
    "large_batch",
    "cycles",
    "communicators",
)
"""One or two of each cause, those that say most first."""
SEED = 100
LEFT_BYTES = 6 << 30
JOB_SECONDS = 40.0
HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print(flush=True)
sys.stdin.read()
"""


def ooms(figures: Figures) -> None:
    """Run the jobs on what another process leaves of the GPU."""
    free, _ = torch.cuda.mem_get_info()
    with other_process(HOLDER, str(max(MIB, free - LEFT_BYTES))):
        for name in JOBS:
            (kind,) = (each for each in KINDS if each.function == name)
            _job(figures, kind)


def _job(figures: Figures, kind: Kind) -> None:
    case, began = Case(kind, SEED), time.monotonic()
    found = run(case, JOB_SECONDS)
    if found is None or found.report is None:
        why = f"took more than {JOB_SECONDS:.0f} s" if found is None else "it finished"
        figures.missing(f"{kind.text}: cause", why)
        return
    _verdict(figures, kind, found)
    figures.add(f"{kind.text}: it ran for", time.monotonic() - began, "seconds")
    _advice(figures, case, found)


def _verdict(figures: Figures, kind: Kind, found: Ended) -> None:
    cause, onset = str(found.document["cause"]), str(found.document["onset"])
    causes = true_causes(kind) | ({"external"} if "first_step" in kind.onsets else frozenset())
    figures.add(
        f"{kind.text}: cause",
        cause,
        "text",
        " or ".join(sorted(causes)),
        right=cause in causes,
        note=str(found.document["headline"]),
    )
    onsets = " or ".join(sorted(kind.onsets))
    figures.add(f"{kind.text}: onset", onset, "text", onsets, right=onset in kind.onsets)


def _advice(figures: Figures, case: Case, found: Ended) -> None:
    """Follow the first advice; it should let the job take a tenth more steps."""
    name = f"{case.kind.text}: steps after the first advice"
    assert found.report is not None
    advice = first_advice(found.report)
    settings = followed(advice)
    if advice is None or not settings:
        figures.missing(name, "there is no advice")
        return
    variables = {"VERDICT_STEPS": str(found.twice), **settings}
    after = run(case, JOB_SECONDS, variables)
    if after is None:
        figures.missing(name, f"took more than {JOB_SECONDS:.0f} s")
        return
    gain = after.gain(found)
    steps = "to the end" if math.isinf(gain) else str(after.progress)
    text = f"{advice.text} ({', '.join(f'{key}={value}' for key, value in settings.items())})"
    figures.add(name, steps, "text", str(found.progress), right=gain >= WORTH, note=text)
