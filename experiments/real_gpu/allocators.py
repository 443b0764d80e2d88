"""Expandable segments, CUDA graphs and MemPool: the series beside PyTorch and the driver."""

from __future__ import annotations

from experiments.real_gpu.figures import Figures
from experiments.real_gpu.processes_on_gpu import MIB, json_of
from support.exposition import Exposition

CONFS = {
    "default": "",
    "expandable segments": "expandable_segments:True",
    "expandable, rounded": "expandable_segments:True,roundup_power2_divisions:4",
}
TOLERANCE = 64 * MIB
PROGRAM = """
import json, os, subprocess, sys, time, torch
from torchmem import sdk
from experiments.phantom_truth.operations import outside
session = sdk.instrument(interval=0.02)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
def step(batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
for rows in (64, 4000, 500, 8000):
    step(torch.ones(rows, 1024, device="cuda"))
batch, graph = torch.ones(256, 1024, device="cuda"), torch.cuda.CUDAGraph()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3): step(batch)
torch.cuda.current_stream().wait_stream(side)
with torch.cuda.graph(graph): model(batch).square().mean().backward()
for _ in range(10):
    graph.replay()
    optimizer.step()
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    kept = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
time.sleep(1.0)
optimizer.step()
time.sleep(0.5)
command = [sys.executable, "-m", "torchmem.cli", "exporter", "--once"]
page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
stats = torch.cuda.memory_stats()
print(json.dumps({
    "page": page, "outside": outside(),
    **{name: stats[f"{name}_bytes.all.current"] for name in ("allocated", "active", "reserved")},
}))
"""


def allocators(figures: Figures) -> None:
    """Run one program under each setting."""
    for name, conf in CONFS.items():
        found = json_of(PROGRAM, environment={"PYTORCH_CUDA_ALLOC_CONF": conf})
        page = Exposition.of_text(found["page"])
        for part in ("allocated", "active", "reserved"):
            value = sum(page.matching(f"torchmem_{part}_bytes").values())
            figures.close(f"{name}: torchmem_{part}_bytes", value, found[part])
        figures.close(
            f"{name}: torchmem_outside_allocator_bytes",
            page.value("torchmem_outside_allocator_bytes"),
            found["outside"],
            absolute=TOLERANCE,
        )
