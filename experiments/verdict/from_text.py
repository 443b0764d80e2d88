"""Compare what the message of an OutOfMemoryError allows to be said with the verdict on its run.

    PYTHONPATH=tests .venv-cuda/bin/python -m experiments.verdict.from_text

The jobs are those of `experiments.verdict`. Each runs once. `torchmem why` explains what it wrote
to stderr, without its report; the cause should be that of the report, or unknown. It takes about 5
minutes.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from experiments.verdict.kinds import KINDS, SEEDS, Case, cases
from experiments.verdict.runs import run
from support.phantom import torch_server

from torchmem.why.text import explain_stream

RESULTS = Path(__file__).with_name("from_text.json")


@dataclass(frozen=True, slots=True)
class Compared:
    """One job: the cause by its report, and what its message says.

    `candidates` are the causes between which the message does not decide.
    """

    kind: str
    seed: int
    verdict: str
    text: str | None
    candidates: tuple[str, ...]
    message: str

    @property
    def answer(self) -> str:
        """Return "agrees", "unknown" or "wrong"."""
        if self.text is None:
            return "unknown" if not self.candidates or self.verdict in self.candidates else "wrong"
        return "agrees" if self.text == self.verdict else "wrong"


def compared(case: Case) -> Compared | None:
    """Run a job; None if it does not run out of memory."""
    ended = run(case)
    if ended.report is None:
        return None
    document = explain_stream(io.BytesIO(ended.text.encode())).document()
    found = next(each for each in document["messages"] if each["role"] == "oom")
    return Compared(
        case.kind.function,
        case.seed,
        ended.report.oom.cause,
        found["cause"],
        tuple(found["candidates"]),
        found["excerpt"],
    )


def show(found: Sequence[Compared]) -> None:
    """Print the shares, and what was wrong."""
    counts = Counter(each.answer for each in found)
    for answer in ("agrees", "unknown", "wrong"):
        print(f"{answer}: {counts[answer]} of {len(found)}")
    for each in found:
        if each.answer == "wrong":
            print(f"{each.kind} {each.seed}: {each.text or each.candidates}, true {each.verdict}")
            print(f"    {each.message}")


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", choices=SEEDS, default="report")
    parser.add_argument("--jobs", type=int, default=2, help="at once (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=[kind.function for kind in KINDS])
    arguments = parser.parse_args()
    wanted = arguments.kinds
    jobs = [
        case for case in cases(SEEDS[arguments.seeds]) if not wanted or case.kind.function in wanted
    ]
    torch_server("")  # before threads ask for it
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = []
        for each in filter(None, pool.map(compared, jobs)):
            found.append(each)
            print(f"{each.kind} {each.seed}: {each.answer}", file=sys.stderr, flush=True)
    show(found)
    if arguments.seeds == "report" and not wanted:
        rows = [{"kind": each.kind, "seed": each.seed, "answer": each.answer} for each in found]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
