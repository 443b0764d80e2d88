"""The jobs that a command runs, as its arguments choose them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from experiments.verdict.kinds import KINDS, SEEDS, Case, cases
from support.phantom import torch_server

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs, how many run at once, and the seeds of all if none was left out of the report's."""

    cases: list[Case]
    at_once: int
    reported: range | None

    def run(self, each: Callable[[Case], T]) -> Iterator[tuple[Case, T]]:
        """Yield each job with what `each` returns of it, in their order."""
        torch_server("")  # before threads ask for it
        with ThreadPoolExecutor(self.at_once) as pool:
            yield from zip(self.cases, pool.map(each, self.cases), strict=True)


def chosen(description: str | None) -> Jobs:
    """Return the jobs that the arguments of this process choose."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", choices=SEEDS, default="report")
    parser.add_argument("--jobs", type=int, default=2, help="at once (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=[kind.function for kind in KINDS])
    arguments = parser.parse_args()
    seeds, kinds = SEEDS[arguments.seeds], arguments.kinds
    jobs = [case for case in cases(seeds) if not kinds or case.kind.function in kinds]
    is_reported = arguments.seeds == "report" and not kinds
    return Jobs(jobs, arguments.jobs, seeds if is_reported else None)
