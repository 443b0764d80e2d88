"""Digests of what an allocator did, so that a short trace holds a long program's every statistic and block."""

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
    """Digests of all outcomes so far and of the state at the moment, one for every few operations."""

    refused: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    outcomes: int = 0
    seen: int = 0

    def saw(self, operation: Operation, outcome: Outcome) -> None:
        """Count one operation in. Of an error's text the numbers before PyTorch's advice count."""
        if isinstance(outcome, str):
            self.refused.append(self.seen)
            outcome = outcome.partition(" If reserved")[0]
        self.outcomes = zlib.crc32(json.dumps([operation, outcome]).encode(), self.outcomes)
        self.seen += 1

    def check(
        self, stats: dict[str, Any], segments: Sequence[Mapping[str, Any]], driver: tuple[int, int]
    ) -> None:
        """Take the digest of the statistics, the blocks and the driver's memory now."""
        private = {
            str(pool): values for pool, values in stats["reserved_bytes_by_private_pools"].items()
        }
        state = [stats | {"reserved_bytes_by_private_pools": private}, segments, driver]
        self.digests.append(zlib.crc32(json.dumps(state, sort_keys=True).encode(), self.outcomes))


def load(path: Path) -> dict[str, Any]:
    """A recorded trace."""
    trace: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return trace


def replay(name: str, trace: dict[str, Any]) -> Checks:
    """Run a recorded program on the simulated allocator, with the addresses that the driver gave then."""
    simulated, checks = Simulated(SETTINGS[name]), Checks()
    ranges = dict(trace["ranges"])
    for number, operation in enumerate(trace["operations"]):
        simulated.card.newest_range = ranges.get(number, simulated.card.newest_range)
        checks.saw(operation, simulated.run(operation))
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            checks.check(simulated.stats(), simulated.snapshot(), simulated.driver())
    return checks
