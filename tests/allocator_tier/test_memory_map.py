"""The memory map of PyTorch's real allocator."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.allocator

Run = Callable[[str], subprocess.CompletedProcess[str]]

BODY = """
import gzip
session = sdk.instrument(snapshot_interval=0.05, snapshot_budget=1.0, idle_after=0.05)
sizes = [700, 3000, 1 << 18, 3 << 20, 700_000, 9 << 20, 30 << 20, 1 << 14] * 6
held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
other = torch.cuda.Stream()
with torch.cuda.stream(other):
    held += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes[:20]]
    waiting = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
if hasattr(torch.cuda, "MemPool"):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        private = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes[:9]]
    del private[::2]
del held[::2]

def files(form):
    return glob.glob(os.environ["TORCHMEM_RUN_DIR"] + form)

while not files("/*/*.sample.json"):
    time.sleep(0.01)
name = os.path.basename(files("/*/*.sample.json")[0]).removesuffix(".sample.json")
requests = os.environ["TORCHMEM_RUN_DIR"] + f"/map-requests-{os.geteuid()}"
os.mkdir(requests, 0o755)
open(f"{requests}/{name}", "w").close()
while not files("/*/*.map.json.gz"):
    time.sleep(0.01)
before = time.time()
while True:
    with gzip.open(files("/*/*.map.json.gz")[0]) as file:
        found = json.load(file)
    if found["timestamp"] > before:
        break
    time.sleep(0.01)
stats = torch.cuda.memory_stats()
print(json.dumps({
    "map": found["devices"], "snapshot": torch.cuda.memory_snapshot(),
    "reserved": stats["reserved_bytes.all.current"],
    "allocated": stats["allocated_bytes.all.current"],
    "layout": published()[0]["devices"][0]["layout"],
}))
"""


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_map_is_pytorchs_snapshot(run: Run, environment: dict[str, str], settings: str) -> None:
    """Every segment and block of torch.cuda.memory_snapshot(), and the sums of memory_stats()."""
    environment["PYTORCH_CUDA_ALLOC_CONF"] = settings
    done = run(BODY)
    assert (done.returncode, done.stderr) == (0, "")
    truth = json.loads(done.stdout)
    (device,) = truth["map"]

    letters = {"active_allocated": "a", "active_pending_free": "p", "inactive": "f"}
    assert [
        {
            "address": segment["address"],
            "pool": segment["segment_type"],
            "stream": segment["stream"],
            "pool_id": segment["segment_pool_id"],
            "expandable": segment["is_expandable"],
            "sizes": [block["size"] for block in segment["blocks"]],
            "states": "".join(letters[block["state"]] for block in segment["blocks"]),
        }
        for segment in sorted(truth["snapshot"], key=lambda segment: segment["address"])
    ] == device["segments"]

    blocks = [
        (size, state)
        for segment in device["segments"]
        for size, state in zip(segment["sizes"], segment["states"], strict=True)
    ]
    assert truth["reserved"] == sum(size for size, _ in blocks)
    assert truth["allocated"] == sum(size for size, state in blocks if state == "a")
    assert truth["layout"] | {"timestamp": 0} == device["layout"] | {"timestamp": 0}
    assert (settings != "") == any(segment["expandable"] for segment in device["segments"])
