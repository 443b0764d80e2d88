"""Compare what the message of an OutOfMemoryError allows to be said with the verdict on its run.

    PYTHONPATH=tests .venv-cuda/bin/python -m experiments.verdict.from_text

The jobs are those of `experiments.verdict`. Each runs once. `torchmem why` explains what it wrote
to stderr, without its report; the cause should be that of the report, or unknown. It takes about 5
minutes.
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.verdict.jobs import chosen
from experiments.verdict.kinds import Case
from experiments.verdict.runs import run

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
    jobs, found = chosen(__doc__), []
    for _, each in jobs.run(compared):
        if each is not None:
            found.append(each)
            print(f"{each.kind} {each.seed}: {each.answer}", file=sys.stderr, flush=True)
    show(found)
    if jobs.reported:
        rows = [{"kind": each.kind, "seed": each.seed, "answer": each.answer} for each in found]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
