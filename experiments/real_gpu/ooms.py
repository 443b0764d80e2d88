"""OutOfMemoryErrors of each cause: what torchmem says, and what following its advice gains.

The jobs are those of `experiments.verdict`, which fill the whole GPU. They multiply matrices in
TF32, as that takes an eighth of the time. A job that there is no time for is left out.
"""

from __future__ import annotations

import math
import time

from experiments.real_gpu.figures import Figures
from experiments.verdict.cures import followed
from experiments.verdict.kinds import KINDS, WORTH, Case, Kind
from experiments.verdict.on_gpu import run, true_causes
from experiments.verdict.runs import LEAST_STEPS, Ended, first_advice

JOBS = {
    "outputs_in_a_list": 104,
    "window": 101,
    "fraction_in_first_step": 100,
    "neighbor_before": 100,
    "waiting_frees": 107,
    "large_batch": 100,
    "without_no_grad": 104,
    "cycles": 109,
}
"""One of each cause, then of other onsets; seeds whose jobs compute little."""
MORE = 0.2
"""The share of additional steps after which a job that follows its advice ends."""
JOB_SECONDS = 30.0
FAST = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}


def ooms(figures: Figures) -> None:
    """Run the jobs as long as there is time."""
    for name, seed in JOBS.items():
        (kind,) = (each for each in KINDS if each.function == name)
        if figures.seconds_left < JOB_SECONDS:
            figures.missing(f"{kind.text}: cause", "there was no time left")
        else:
            _job(figures, Case(kind, seed))


def _job(figures: Figures, case: Case) -> None:
    kind, began = case.kind, time.monotonic()
    found = run(case, JOB_SECONDS, FAST)
    if found is None or found.report is None:
        why = f"took more than {JOB_SECONDS:.0f} s" if found is None else "it finished"
        figures.missing(f"{kind.text}: cause", why)
        return
    _verdict(figures, kind, found)
    figures.add(f"{kind.text}: it ran for", time.monotonic() - began, "seconds")
    _advice(figures, case, found)


def _verdict(figures: Figures, kind: Kind, found: Ended) -> None:
    cause, onset = str(found.document["cause"]), str(found.document["onset"])
    causes = true_causes(kind)
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
    """Follow the first advice; the job should take a tenth more steps at least."""
    name = f"{case.kind.text}: steps after the first advice"
    assert found.report is not None
    advice = first_advice(found.report)
    settings = followed(advice)
    if advice is None or not settings:
        figures.missing(name, "there is no advice")
        return
    steps = found.total + max(LEAST_STEPS, int(MORE * found.progress))
    variables = {"VERDICT_STEPS": str(steps), **FAST, **settings}
    seconds = min(JOB_SECONDS, figures.seconds_left - 1.0)
    after = run(case, seconds, variables) if seconds > 0 else None
    if after is None:
        figures.missing(name, f"took more than {max(0.0, seconds):.0f} s")
        return
    gain = after.gain(found)
    reached = "to the end" if math.isinf(gain) else str(after.progress)
    text = f"{advice.text} ({', '.join(f'{key}={value}' for key, value in settings.items())})"
    figures.add(name, reached, "text", str(found.progress), right=gain >= WORTH, note=text)
