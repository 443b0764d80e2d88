"""Record what PyTorch's own allocator does with random programs, one trace per setting.

Run `python tests/simulator/golden/record.py` with the CUDA build of torch. A trace has a program of
this project and PyTorch's answers. Record the traces again if the programs or PyTorch's allocator
change.
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
from support.phantom import run_on_phantom
from support.traces import CHECK_EVERY, Checks

HERE = Path(__file__).resolve().parent
OPERATIONS = 2500


def record(name: str) -> dict[str, Any]:
    """Run a program; return its operations, the driver's addresses, and digests of the results."""
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
        checks.add(operation, outcome)
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            checks.check(real.stats(), real.snapshot(), real.driver())
    changes = [
        [number, address]
        for number, address in enumerate(ranges)
        if number == 0 or address != ranges[number - 1]
    ]
    return {
        "torch": torch.__version__,
        "operations": operations,
        "ranges": changes,
        "refused": checks.refused,
        "digests": checks.digests,
    }


def main() -> None:
    """Record one setting, or each in its own process, because PyTorch reads its settings once."""
    if len(sys.argv) == 2:
        text = json.dumps(record(sys.argv[1]), separators=(",", ":"))
        (HERE / f"{sys.argv[1]}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))
        os._exit(0)
    with tempfile.TemporaryDirectory() as state:
        for name in SETTINGS:
            setting = SETTINGS[name]
            done = run_on_phantom(
                __file__,
                name,
                memory=setting.gpu,
                state=Path(state),
                environment={"PYTORCH_CUDA_ALLOC_CONF": setting.conf},
            )
            print(name, "recorded" if done.returncode == 0 else done.stderr[-2000:])


if __name__ == "__main__":
    main()
