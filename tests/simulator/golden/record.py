"""Record what PyTorch's own allocator does with random programs: one compressed trace for each setting.

With a Python that has the CUDA build of torch: `python tests/simulator/golden/record.py`. Traces are our own programs
and PyTorch's answers; a trace is recorded anew when the programs change, or when PyTorch's allocator does.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.allocator_programs import SETTINGS, Programmer
from support.on_phantom import on_phantom
from support.traces import CHECK_EVERY, Checks

HERE = Path(__file__).resolve().parent
OPERATIONS = 2500


def record(name: str) -> dict[str, Any]:
    """Run one program; the operations, the addresses that the driver gave, and a digest of what came of them."""
    import torch
    from support.real_allocator import Real

    real, programmer, checks = (
        Real(SETTINGS[name]),
        Programmer(SETTINGS[name], random.Random(f"golden {name}")),
        Checks(),
    )
    operations, ranges = [], []
    for number in range(OPERATIONS):
        operation = programmer.next()
        operations.append(operation)
        outcome = real.run(operation)
        programmer.learn(operation, outcome)
        ranges.append(real.newest_range())
        checks.saw(operation, outcome)
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            checks.check(real.stats(), real.snapshot(), real.driver())
    changes = [
        [number, address]
        for number, address in enumerate(ranges)
        if number == 0 or address != ranges[number - 1]
    ]
    return {
        "torch": torch.__version__, "operations": operations, "ranges": changes,
        "refused": checks.refused, "digests": checks.digests,
    }  # fmt: skip


def main() -> None:
    """Record the setting named, or each in a process of its own: PyTorch reads its settings once."""
    if len(sys.argv) == 2:
        text = json.dumps(record(sys.argv[1]), separators=(",", ":"))
        (HERE / f"{sys.argv[1]}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))
        os._exit(0)
    with tempfile.TemporaryDirectory() as state:
        for name in SETTINGS:
            done = on_phantom(Path(state), __file__, name)
            print(name, "recorded" if done.returncode == 0 else done.stderr[-2000:])


if __name__ == "__main__":
    main()
