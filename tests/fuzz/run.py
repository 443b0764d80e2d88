"""Try many hostile inputs on everything that reads what others than the user may have written.

    python tests/fuzz/run.py --inputs 2000000

Input NUMBER of a target depends only on the seed, the target and the number. To try one again:

    python tests/fuzz/run.py --replay sample_file:4711

Each part of the inputs runs in a process of its own with bounded memory, each input with bounded
CPU time. The exit code is 1 if an input failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fuzz import TARGETS, make_input

PART_INPUTS = 20_000
MAX_PART_SECONDS = 3600
MAX_MEMORY_BYTES = 2 << 30
"""Address space of a part, most of which is the code of libraries."""
MAX_INPUT_SECONDS = 20.0
"""CPU time of one input."""
MAX_FAILURES = 20
"""Failures that are shown for each part."""
PROGRESS_SECONDS = 60.0


class TooSlowError(BaseException):
    """An input took too much CPU time; no code under test catches this."""


@dataclass(slots=True)
class Part:
    """Inputs `first` to `first + count - 1` of a target, and what became of them.

    `slowest`: CPU seconds of the slowest input. `peak`: bytes of RAM.
    """

    target: str
    first: int
    count: int
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    slowest: float = 0.0
    peak: int = 0
    failures: list[str] = field(default_factory=list)


def run_part(seed: int, part: Part) -> None:
    """Try the inputs of a part in this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _too_slow)
    logging.disable()
    numbers, threads = range(part.first, part.first + part.count), TARGETS[part.target].threads
    attempt = functools.partial(_try_input, seed, part)
    if threads == 1:
        for number in numbers:
            signal.setitimer(signal.ITIMER_PROF, MAX_INPUT_SECONDS)
            attempt(number)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(attempt, numbers))
    signal.setitimer(signal.ITIMER_PROF, 0)
    part.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _too_slow(*_: object) -> NoReturn:
    raise TooSlowError(f"took more than {MAX_INPUT_SECONDS:g} s of CPU time")


def _try_input(seed: int, part: Part, number: int) -> None:
    content = make_input(seed, part.target, number)
    started = time.thread_time()
    try:
        if TARGETS[part.target].check(content):
            part.accepted += 1
        else:
            part.refused += 1
    except (Exception, TooSlowError) as error:  # noqa: BLE001 - whatever it is, it is a finding
        part.failed += 1
        if len(part.failures) < MAX_FAILURES:
            part.failures.append(f"{part.target}:{number} {_described(error)}")
    part.slowest = max(part.slowest, time.thread_time() - started)


def _described(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{type(error).__name__} in {where}: {str(error)[:200]!r}"


def parts_of(inputs: int, targets: list[str]) -> Iterator[Part]:
    """Divide the inputs among the targets by their shares, and into parts."""
    total = sum(TARGETS[target].share for target in targets)
    for target in targets:
        wanted = round(inputs * TARGETS[target].share / total)
        for first in range(0, wanted, PART_INPUTS):
            yield Part(target, first, min(PART_INPUTS, wanted - first))


def run_apart(seed: int, part: Part) -> Part:
    """Run a part in a process of its own; if that dies, all its inputs have failed."""
    given = json.dumps([seed, asdict(part)])
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--part", given],
            capture_output=True,
            text=True,
            timeout=MAX_PART_SECONDS,
            check=False,
        )
        return Part(**json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        problem = f"{part.target}: the process died or hung: {error}"
        return Part(part.target, part.first, part.count, failed=part.count, failures=[problem])


def run_parts(seed: int, inputs: int, jobs: int, targets: list[str]) -> list[Part]:
    """Run all parts, and show progress on stderr."""
    parts = list(parts_of(inputs, targets))
    random.Random(seed).shuffle(parts)
    done, tried, next_line = list[Part](), 0, time.monotonic() + PROGRESS_SECONDS
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_apart, seed, part) for part in parts]):
            part = future.result()
            done.append(part)
            tried += part.count
            for failure in part.failures:
                print(failure, file=sys.stderr, flush=True)
            if time.monotonic() >= next_line:
                next_line += PROGRESS_SECONDS
                print(f"{tried:,} of {inputs:,} inputs", file=sys.stderr, flush=True)
    return done


def table(parts: list[Part]) -> Iterator[str]:
    """Yield a Markdown table with a row for each target, and one for all."""
    of_target = defaultdict[str, list[Part]](list)
    for part in parts:
        of_target[part.target].append(part)
    yield "| input | tried | accepted | refused | failed | slowest, CPU ms | MB of RAM |"
    yield "|---|---|---|---|---|---|---|"
    for target in filter(of_target.get, TARGETS):
        yield _row(target, of_target[target])
    yield _row("all", parts)


def _row(name: str, parts: list[Part]) -> str:
    counts = Counter[str]()
    for part in parts:
        counts.update(accepted=part.accepted, refused=part.refused, failed=part.failed)
    numbers = (counts.total(), counts["accepted"], counts["refused"], counts["failed"])
    slowest = max(part.slowest for part in parts) * 1000
    memory = max(part.peak for part in parts) / 1e6
    cells = [name, *(f"{number:,}" for number in numbers), f"{slowest:,.0f}", f"{memory:,.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run all parts, one of them, or one input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N", help="default 20,000")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--replay", metavar="TARGET:NUMBER", help="try one input, with a traceback")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    arguments = parser.parse_args()
    if arguments.part:
        seed, fields = json.loads(arguments.part)
        part = Part(**fields)
        run_part(seed, part)
        print(json.dumps(asdict(part)), flush=True)
        return 0
    if arguments.replay:
        target, _, number = arguments.replay.partition(":")
        content = make_input(arguments.seed, target, int(number))
        print(content, TARGETS[target].check(content), sep="\n")
        return 0
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}")
    targets = arguments.targets or list(TARGETS)
    parts = run_parts(arguments.seed, arguments.inputs, arguments.jobs, targets)
    print("\n".join(table(parts)))
    return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main())
