"""A running training is captured, and what what-if says of a recording is followed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.midrun.compare import EXPANDABLE
from experiments.midrun.runs import PROGRAM, ROOT, WORKLOADS
from experiments.real_gpu.figures import Figures
from experiments.real_gpu.processes_on_gpu import PYTHON, other_process

from torchmem.trace import read
from torchmem.whatif.engine import what_if
from torchmem.whatif.mid_run import ESTIMATE_MARGIN
from torchmem.whatif.result import WhatIf

WORKLOAD = WORKLOADS["varying"]
CONFS = (EXPANDABLE, "roundup_power2_divisions:4")
CAPTURED = """
import random, torch
from torchmem import sdk
sdk.instrument(interval=0.1)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
chance = random.Random(0)
for number in range(1_000_000):
    model(torch.ones(8 * chance.randrange(50, 600), 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    if number == 20: print(flush=True)
"""


def whatif(figures: Figures) -> None:
    """Capture a training that knows nothing of it, then record one and follow the answer."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _captured(figures, folder / "captured.pickle")
        recorded = _counted("record", folder / "recorded")
        answer = _answer(folder / "recorded" / "snapshot.pickle")
        _replayed(figures, "recorded", answer)
        peak = answer.outcomes[0].peak_reserved
        figures.close("peak reserved of the recording", peak, recorded["peak_reserved"])
        for number, conf in enumerate(CONFS):
            _followed(figures, answer, conf, folder / str(number))


def _captured(figures: Figures, path: Path) -> None:
    with other_process(CAPTURED) as process:
        command = [*PYTHON, "-m", "torchmem.cli", "capture", "--pid", str(process.pid)]
        done = subprocess.run(
            [*command, "--seconds", "1", "--out", str(path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        figures.add("capture ends with", done.returncode, right=done.returncode == 0)
        figures.add("the training goes on", str(process.poll() is None), "text", right=True)
    if path.exists():
        _replayed(figures, "captured", _answer(path))


def _replayed(figures: Figures, name: str, answer: WhatIf) -> None:
    """The replay under the recorded settings makes the allocations that were recorded."""
    figures.add(
        f"{name}: share of allocations reproduced",
        answer.fidelity.share,
        "share",
        right=answer.fidelity.trusted,
    )
    figures.add(f"{name}: what-if says", answer.verdict.sentence, "text")


def _answer(path: Path) -> WhatIf:
    (recording,) = read(path)
    return what_if(recording, settings=list(CONFS))


def _followed(figures: Figures, answer: WhatIf, conf: str, folder: Path) -> None:
    """Run again with a setting, switched where the recording began, and from the start."""
    (replay,) = (each for each in answer.outcomes if each.conf == conf)
    switched = _counted(f"switch:{conf}", folder / "switch")
    figures.close(f"{conf}, switched: peak", replay.peak_reserved, switched["peak_reserved"])
    figures.close(f"{conf}, switched: retries", replay.retries, switched["retries"], "count")
    restarted = _counted("plain", folder / "restart", conf)
    for restart in answer.restarts:
        if restart.conf == conf and restart.peak_reserved is not None:
            figures.close(
                f"{conf}, from the start: peak",
                restart.peak_reserved,
                restarted["peak_reserved"],
                relative=ESTIMATE_MARGIN,
            )


def _counted(mode: str, folder: Path, conf: str = "") -> dict[str, int]:
    """Run the workload on this GPU; return what the allocator counted."""
    folder.mkdir(parents=True)
    script, *arguments = WORKLOAD.command
    window: Sequence[str] = (mode, str(WORKLOAD.first), str(WORKLOAD.last), str(folder))
    steps = f"--steps={WORKLOAD.last + 1}"
    done = subprocess.run(
        [*PYTHON, str(PROGRAM), *window, str(ROOT / script), *arguments, steps],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    counts: dict[str, int] = json.loads((folder / "counts.json").read_text())
    return counts
