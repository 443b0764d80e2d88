"""PyTorch's own process groups on the phantom GPU's NCCL: what they hold, and suspending them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

MIB = 1 << 20
SCRIPT = """
import json, torch, torch.distributed as dist
from torchmem import sdk
from torchmem.allocator.outside_memory import outside_bytes
from torchmem.preflight.child.distributed import lone_rank
from torchmem.preflight.plan import Placement

lone_rank(Placement(1, 8, 4))
torch.cuda.set_device(0)
session = sdk.instrument(interval=0.001)
dist.init_process_group("nccl")
tp = dist.new_group(list(range(4)), group_desc="tp")
unused = dist.new_group(list(range(8)), group_desc="unused")
cpu = dist.new_group(backend="gloo", group_desc="cpu")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step():
    model(torch.ones(1, 64, device="cuda")).sum().backward()
    for group in (None, tp):
        dist.all_reduce(model.weight.grad, group=group)
    optimizer.step()
    session.lifetime.monitor.reader.next_read = 0.0

def shown():
    (device,) = session.lifetime.monitor.sample().devices
    return {
        "held": {name: each.held_bytes for name, each in device.communicators.items()},
        "suspended": sum(each.suspended_bytes for each in device.communicators.values()),
        "is_counted": all(each.is_counted for each in device.communicators.values()),
        "is_used": all(each.idle_since for each in device.communicators.values()),
        "outside": outside_bytes(device, torch.cuda.mem_get_info()[0]),
        "errors": dict(session.errors.counts),
    }

for _ in range(3):
    step()
before = shown()
freed = session.suspend_communicators()
suspended = shown()
taken = session.resume_communicators()
step()
print(json.dumps([before, freed, suspended, taken, shown()]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What is published before, while and after all communicators are suspended."""
    folder = tmp_path_factory.mktemp("communicators")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = run_on_phantom(
        script, memory="16GB", environment={"TORCHMEM_RUN_DIR": str(folder)}, folder=folder
    )
    assert done.returncode == 0, done.stderr
    assert "Guessing device ID" not in done.stderr
    if not json.loads(done.stdout)[0]["is_counted"]:
        pytest.skip("this PyTorch does not hand on what NCCL counts")
    found: list[Any] = json.loads(done.stdout)
    return found


def test_groups_of_nccl_are_counted(answers: list[Any]) -> None:
    """Each group that has made a collective has its bytes, which are outside the allocator."""
    before = answers[0]

    assert before["held"] == {"default_pg": (196 + 336) * MIB, "tp": (196 + 336) * MIB}
    assert sum(before["held"].values()) < before["outside"]
    assert before["is_used"]
    assert before["errors"] == {}


def test_suspending_gives_the_buffers_back(answers: list[Any]) -> None:
    """What is suspended is neither on the device nor outside the allocator."""
    before, freed, suspended, taken, after = answers

    assert freed == taken == suspended["suspended"] == 2 * 336 * MIB
    assert suspended["outside"] == before["outside"] - freed
    assert suspended["held"] == {"default_pg": 196 * MIB, "tp": 196 * MIB}
    assert after == before
