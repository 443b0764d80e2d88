"""Measure how many jobs that run out of memory finish after a restart, with and without advice.

A job has phases. Each phase takes large buffers and returns them to PyTorch's cache, in which
kept tensors then lie beside temporary ones. At its end it needs one large tensor. The sizes differ
by seed. Jobs of the kind `phases` have enough free memory for it, but in pieces. In jobs of the
kinds `pages` and `full`, the pieces are smaller than the pages of expandable segments, so this
setting does not help. Jobs of the kind `full` use so much memory that no setting can help. Jobs of
the kinds `leak`, `graphs` and `longer` need more in each step: they keep outputs, keep the graph of
a sum of losses, and get longer batches, also of different lengths. No setting can help them either.
A job that dies is started again, as by a shell loop, a requeue or a restart policy.

    python -m experiments.advice    # on a phantom GPU of 4 GiB, in about 20 minutes
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ATTEMPTS = {"leak": 4, "graphs": 4, "longer": 4}
"""Times that a job is started; 2 for other kinds."""
SEEDS = {
    "phases": range(7),
    "pages": range(3),
    "full": range(3),
    "leak": range(4),
    "graphs": range(2),
    "longer": range(2),
}
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
elif kind in ("leak", "graphs", "longer"):
    width, rows = draw.choice([512, 1024]), draw.randint(1000, 4000)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept, total, number = [], 0.0, 0
    while True:
        number += 1
        length = rows + 200 * number if kind == "longer" else rows
        if seed % 2: length = draw.randint(length // 2, length)
        output = model(torch.ones(length, width, device="cuda"))
        loss = output.square().mean()
        if kind == "graphs": total = total + loss
        loss.backward(retain_graph=kind == "graphs")
        optimizer.step()
        optimizer.zero_grad()
        if kind == "leak": kept.append(output.detach())
        del output, loss
else:
    count, *sizes = {"pages": (150, 8, 12), "full": (175, 9, 11)}[kind]
    held = [take(mib) for _ in range(count) for mib in sizes]
    del held[::2]
    for _ in range(draw.randint(1, 50)): step()
    last = take(draw.randint(1200, 1300))
step()
"""


def attempts(kind: str, seed: int, flags: list[str], variables: dict[str, str]) -> tuple[bool, int]:
    """Return whether one of the attempts finishes, and how many got a setting; print what is said.

    Each attempt is a process of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = ["run", "--name", "job", "--run-dir", f"{folder}/run", *flags, "--"]
        command = [sys.executable, "-m", "torchmem.cli", *run, sys.executable, "-c", JOB]
        phantom = ["-m", "torchmem.phantom", "--memory", "4GiB", "--state", f"{folder}/gpus", "--"]
        settings = 0
        for _ in range(ATTEMPTS.get(kind, 2)):
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
            settings += any(" is added to " in line for line in said)
            if done.returncode == 0:
                return True, settings
            if "OutOfMemoryError" not in done.stderr:
                raise RuntimeError(done.stderr)
    return False, settings


def main() -> None:
    """Print how many jobs of each kind finished, and how many attempts got a setting."""
    print(f"{'jobs':8} " + " ".join(f"{column:>22}" for column in COLUMNS))
    for kind, seeds in SEEDS.items():
        cells = []
        for flags, variables in COLUMNS.values():
            ends = [attempts(kind, seed, flags, variables) for seed in seeds]
            finished, settings = (sum(column) for column in zip(*ends, strict=True))
            cells.append(f"{finished} of {len(seeds)}, {settings} added")
        print(f"{kind:8} " + " ".join(f"{text:>22}" for text in cells), flush=True)


if __name__ == "__main__":
    main()
