"""Measure the cost of explaining a large log, and of explaining one message.

    python -m benchmarks.log_reading               # 1 GB
    python -m benchmarks.log_reading --bytes 5e9

The log is that of eight ranks, most of whose lines tell the memory in use; two ranks run out of
memory at its end, and the others are lost. It is piped to `torchmem why -`, so it needs no disk.
Seconds are of one core: user and system time of the process, its start included.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from torchmem.explain.texts.formats import BY_NAME

LINES = 20_000
RANKS = 8
FALLEN = 2


def block(rng: random.Random) -> bytes:
    """Return lines of a training."""
    return "".join(_lines(rng)).encode()


def _lines(rng: random.Random) -> Iterator[str]:
    for step in range(LINES):
        yield (
            f"2026-03-04 05:{step // 60 % 60:02d}:{step % 60:02d},123 [rank{step % RANKS}]: "
            f"iteration {step}/ 90000 | loss {rng.random():.4f} | lr 3.0e-4 | grad norm "
            f"{rng.random():.3f} | memory {60 + rng.random():.2f} GiB | tokens per second "
            f"{rng.randrange(900, 1100)}\n"
        )


def end() -> bytes:
    """Return the end of the log."""
    message, lost = BY_NAME["pytorch"].example, BY_NAME["lost_peer"].example
    ranks = [f"[rank{rank}]: {message if rank < FALLEN else lost}\n" for rank in range(RANKS)]
    return "".join(ranks).encode()


def why(parts: Iterator[bytes]) -> tuple[float, float, int]:
    """Pipe a text to `torchmem why -`; return CPU seconds, wall seconds, and bytes of RAM."""
    command = [sys.executable, "-m", "torchmem.cli", "why", "-", "--json"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        for part in parts:
            process.stdin.write(part)
        process.stdin.close()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return seconds, time.perf_counter() - began, used.ru_maxrss << 10


def main() -> None:
    """Explain a message ten times, then the log, and print what that cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=float, default=1e9, help="of the log (default: 1e9)")
    size = int(parser.parse_args().bytes)
    each = sorted(why(iter([end()]))[0] for _ in range(10))
    print(f"a message: {1000 * each[5]:.0f} ms of CPU, process start included")
    lines = block(random.Random(0))  # noqa: S311 - test data
    seconds, wall, peak = why(iter([*([lines] * (size // len(lines))), end()]))
    print(
        f"{size / 1e9:g} GB of log: {seconds:.1f} s of CPU, {wall:.1f} s, {peak >> 20} MiB of RAM"
    )


if __name__ == "__main__":
    main()
