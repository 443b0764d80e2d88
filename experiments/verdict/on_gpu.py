"""Run the jobs of `experiments.verdict` once on this machine's GPU, and print what torchmem says.

    PYTHONPATH=tests python -m experiments.verdict.on_gpu
    PYTHONPATH=tests python -m experiments.verdict.on_gpu --kinds hook long_batch --seconds 60

The jobs fill the whole GPU, one after the other. A job that takes longer than `--seconds` is ended
and not counted. The comparison with expandable segments and with the advice is left to the phantom
GPU, so where both causes are possible, both count as right.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from experiments.verdict.kinds import KINDS, SEEDS, Case, Kind
from experiments.verdict.runs import Ended, ended, program


def run(case: Case, seconds: float, variables: Mapping[str, str] | None = None) -> Ended | None:
    """Run a job on this machine's GPU, with these variables; None if it takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHMEM_RUN_DIR": f"{folder}/run"}
        environment = os.environ | own | dict(variables or {})
        command = [sys.executable, "-W", "ignore", "-c", program(case)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return ended(case, done, Path(folder))


def true_causes(kind: Kind) -> frozenset[str]:
    """Return the causes that are true, or may be."""
    return kind.causes | ({"fragmentation"} if kind.expandable == "any" else frozenset())


def line(case: Case, found: Ended | None) -> str:
    """Return a row of the table."""
    if found is None or found.report is None:
        return f"| {case.name} | {'took too long' if found is None else 'finished'} | | | | |"
    verdict = found.document
    kind = case.kind
    right = [verdict["cause"] in true_causes(kind), verdict["onset"] in kind.onsets]
    marks = " | ".join("right" if each else "WRONG" for each in right)
    return (
        f"| {case.name} | {found.progress} | {verdict['cause']} | {verdict['onset']} | {marks} |\n"
        f"    {verdict['headline']}"
    )


def main() -> None:
    """Run the jobs and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=[kind.function for kind in KINDS])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each job (default 120)")
    parser.add_argument("--seed", type=int, default=SEEDS["report"].start)
    arguments = parser.parse_args()
    print("| job | steps | cause | onset | cause is | onset is |\n|---|---|---|---|---|---|")
    for kind in KINDS:
        if not arguments.kinds or kind.function in arguments.kinds:
            case = Case(kind, arguments.seed)
            print(line(case, run(case, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
