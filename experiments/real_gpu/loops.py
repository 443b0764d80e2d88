"""gevent and torch.compile: steps are counted, and values are PyTorch's."""

from __future__ import annotations

from importlib.util import find_spec

from experiments.real_gpu.figures import Figures
from experiments.real_gpu.processes_on_gpu import json_of
from support.exposition import Exposition

STEPS = 20
START = {
    "gevent": "from gevent import monkey; monkey.patch_all()\ncompiled = lambda model: model",
    "torch.compile, reduce-overhead": (
        "import torch; from functools import partial\n"
        "compiled = partial(torch.compile, mode='reduce-overhead')"
    ),
}
TRAINING = """
import json, subprocess, sys, time, torch
from torchmem import sdk
session = sdk.instrument(interval=0.02)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()).cuda()
run = compiled(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1])):
    run(torch.ones(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
torch.cuda.synchronize()
session.close()
command = [sys.executable, "-m", "torchmem.cli", "exporter", "--once"]
page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
stats = torch.cuda.memory_stats()
print(json.dumps({"page": page, "errors": session.errors.counts,
                  "allocated": stats["allocated_bytes.all.current"]}))
"""


def loops(figures: Figures) -> None:
    """Train in each way."""
    for name, start in START.items():
        if name == "gevent" and find_spec("gevent") is None:
            figures.missing(name, "it is not installed")
            continue
        found = json_of(f"{start}\n{TRAINING}", str(STEPS))
        page = Exposition.of_text(found["page"])
        steps = page.value("torchmem_steps_total")
        figures.close(f"{name}: torchmem_steps_total", steps, STEPS, "count")
        allocated = sum(page.matching("torchmem_allocated_bytes").values())
        figures.close(f"{name}: torchmem_allocated_bytes", allocated, found["allocated"])
        errors = sum(found["errors"].values())
        figures.close(f"{name}: errors of the SDK", errors, 0, "count")
