"""Digests of what an allocator did, so that a short trace covers a long program."""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.allocator_programs import SETTINGS, Operation, Outcome, Simulated

CHECK_EVERY = 5


@dataclass
class Checks:
    """Digests of all outcomes so far and of the current state, one for every few operations."""

    refused: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    outcomes: int = 0
    operations: int = 0

    def add(self, operation: Operation, outcome: Outcome) -> None:
        """Add one operation; of an error's text, only the part before PyTorch's advice."""
        if isinstance(outcome, str):
            self.refused.append(self.operations)
            outcome = outcome.partition(" If reserved")[0]
        self.outcomes = zlib.crc32(json.dumps([operation, outcome]).encode(), self.outcomes)
        self.operations += 1

    def check(
        self, stats: dict[str, Any], segments: Sequence[Mapping[str, Any]], driver: tuple[int, int]
    ) -> None:
        """Add a digest of the statistics, the blocks and the driver's memory."""
        private = {
            str(pool): values for pool, values in stats["reserved_bytes_by_private_pools"].items()
        }
        state = [stats | {"reserved_bytes_by_private_pools": private}, segments, driver]
        self.digests.append(zlib.crc32(json.dumps(state, sort_keys=True).encode(), self.outcomes))


def load(path: Path) -> dict[str, Any]:
    """Load a recorded trace."""
    trace: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return trace


def replay(name: str, trace: dict[str, Any]) -> Checks:
    """Run a recorded program on the simulated allocator, with the recorded addresses."""
    simulated, checks = Simulated(SETTINGS[name]), Checks()
    ranges = dict(trace["ranges"])
    for number, operation in enumerate(trace["operations"]):
        simulated.gpu.newest_range = ranges.get(number, simulated.gpu.newest_range)
        checks.add(operation, simulated.run(operation))
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            checks.check(simulated.stats(), simulated.snapshot(), simulated.driver())
    return checks
