"""CPU time of `import torchmem.sdk` and of `instrument()` in a script that has imported torch.

    python -m benchmarks.overhead.startup_cpu [PROCESSES]      # needs PyTorch

Prints medians of 15 processes. Each collects garbage and freezes what is left before the import, so
that no full collection, which visits torch's objects, falls into it. Another checkout is measured
with its `core/src` and `sdk/src` in PYTHONPATH.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

SCRIPT = """
import gc, sys, time
import torch
gc.collect()
gc.freeze()
started = time.process_time()
import torchmem.sdk
imported = time.process_time()
torchmem.sdk.instrument(run_dir=sys.argv[1])
print(imported - started, time.process_time() - imported)
"""


def main() -> None:
    """Print one line for each."""
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="torchmem-benchmark-") as folder:
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, folder]
        times = [_seconds(command, environment) for _ in range(1 + processes)][1:]
    for place, name in enumerate(("import torchmem.sdk", "instrument()")):
        median = statistics.median(seconds[place] for seconds in times)
        print(f"{name:20}{median * 1e3:6.1f} ms")


def _seconds(command: list[str], environment: dict[str, str]) -> tuple[float, ...]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))


if __name__ == "__main__":
    main()
