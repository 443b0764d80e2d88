"""How many jobs that die of fragmentation finish after a restart, with and without advice.

A job has phases. Each one takes large buffers and returns them to PyTorch's cache, in which tensors
that stay then lie beside tensors that go. At its end it needs one large tensor. The sizes differ by
seed. Jobs of the kind `phases` have enough free memory for it, but in pieces. In those of the kinds
`pages` and `full`, the pieces are smaller than the pages of expandable segments, so that this
setting is in vain. Those of the kind `full` use so much memory that no setting can help. A job that
dies is started once more, as by a shell loop, a requeue or a restart policy.

    python -m benchmarks.advice    # on a phantom GPU of 4 GiB, in about 10 minutes
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ATTEMPTS = 2
SEEDS = {"phases": range(7), "pages": range(3), "full": range(3)}
ADVICE = ["--apply-advice"]
RECORDING = {"TORCHMEM_CAPTURE_ON_OOM": "trace"}
COLUMNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "restarts alone": ([], {}),
    "--apply-advice": (ADVICE, {}),
    "with recordings": (ADVICE, RECORDING),
}
"""Flags of `torchmem run`, and environment."""
JOB = """
import random, sys, torch
kind, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
def take(mib): return torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")
weight = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
def step():
    weight(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
if kind == "phases":
    kept, going = [], []
    buffers = [take(draw.randint(800, 1100)) for _ in range(3)]
    del buffers
    while sum(map(len, going)) < 2000 << 20:
        kept.append(take(draw.randint(12, 40)))
        going.append(take(draw.randint(60, 140)))
        step()
    del going
    last = take(draw.randint(1500, 1800))
else:
    count, *sizes = {"pages": (150, 8, 12), "full": (175, 9, 11)}[kind]
    held = [take(mib) for _ in range(count) for mib in sizes]
    del held[::2]
    for _ in range(draw.randint(1, 50)): step()
    last = take(draw.randint(1200, 1300))
step()
"""


def finishes(kind: str, seed: int, flags: list[str], variables: dict[str, str]) -> bool:
    """Return whether one of the attempts finishes, and print what was applied."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["run", "--name", "job", "--run-dir", f"{folder}/run", *flags, "--"]
        command = [sys.executable, "-m", "torchmem.cli", *run, sys.executable, "-c", JOB]
        phantom = ["-m", "torchmem.phantom", "--memory", "4GiB", "--state", f"{folder}/card", "--"]
        for _ in range(ATTEMPTS):
            done = subprocess.run(
                [sys.executable, *phantom, *command, kind, str(seed)],
                env=os.environ | {"PYTHONWARNINGS": "ignore"} | variables,
                cwd=Path(folder),
                capture_output=True,
                text=True,
                check=False,
            )
            said = [line for line in done.stderr.splitlines() if line.startswith("torchmem:")]
            print(f"{kind} {seed}:", *said or ["torchmem: nothing"], file=sys.stderr)
            if done.returncode == 0:
                return True
            if "OutOfMemoryError" not in done.stderr:
                raise RuntimeError(done.stderr)
    return False


def main() -> None:
    """Print how many jobs of each kind finished."""
    print(f"{'jobs':8} " + " ".join(f"{column:>16}" for column in COLUMNS))
    for kind, seeds in SEEDS.items():
        finished = [
            sum(finishes(kind, seed, flags, variables) for seed in seeds)
            for flags, variables in COLUMNS.values()
        ]
        shown = (f"{count} of {len(seeds)}" for count in finished)
        print(f"{kind:8} " + " ".join(f"{text:>16}" for text in shown))


if __name__ == "__main__":
    main()
