"""RAPIDS' memory manager as PyTorch's allocator: what is published is what it holds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.allocator

MIB = 1 << 20
Run = Callable[[str], subprocess.CompletedProcess[str]]
Series = Callable[[str], list[tuple[dict[str, str], float]]]

# RMM has NVIDIA's CUDA runtime in it, which does not work with a driver that is not NVIDIA's. Its
# CallbackMemoryResource takes memory from the phantom GPU's runtime instead.
POOL = f"""
import ctypes, rmm.mr
from rmm.allocators.torch import rmm_torch_allocator
runtime, taken = ctypes.CDLL(None), {{}}
def take(size, stream):
    start = ctypes.c_void_p()
    if runtime.cudaMalloc(ctypes.byref(start), ctypes.c_size_t(size)):
        raise MemoryError(size)
    taken[start.value] = size
    return start.value
def give(start, size, stream):
    del taken[start]
    runtime.cudaFree(ctypes.c_void_p(start))
driver = rmm.mr.CallbackMemoryResource(take, give)
pool = rmm.mr.PoolMemoryResource(driver, initial_pool_size={64 * MIB})
rmm.mr.set_per_device_resource(0, rmm.mr.StatisticsResourceAdaptor(pool))
torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
"""
TRAINING = f"""
import gc
def live():
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [each for each in gc.get_objects() if type(each) in kinds]
    own = [each.untyped_storage() for each in tensors if each.is_cuda]
    return sum({{storage.data_ptr(): storage.nbytes() for storage in own}}.values())
session = sdk.instrument(interval=1e-6)
model = torch.nn.Sequential(torch.nn.Embedding(1000, 4096), torch.nn.LayerNorm(4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.arange(64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
gc.collect()
used = live()
torch.empty({256 * MIB}, dtype=torch.uint8, device="cuda")
session.step()
errors = sum(session.errors.counts.values())
print(json.dumps([sum(taken.values()), used, used + {256 * MIB}, errors]))
"""


def test_a_pool_of_rmm_serves_a_training(run: Run, series: Series) -> None:
    """The pool has what it took from the driver; in use are the tensors, also at their peak."""
    pytest.importorskip("rmm", reason="needs pip install rmm-cu13")

    done = run(POOL + TRAINING)

    assert done.returncode == 0, done.stderr
    *true, errors = json.loads(done.stdout)
    assert errors == 0
    names = ("pool", "used", "peak")
    assert [series(f"torchmem_rmm_{name}_bytes")[0][1] for name in names] == true
    assert series("torchmem_steps_total")[0][1] == 6
    assert series("torchmem_reserved_bytes") == []
    assert series("torchmem_allocator_info")[0][0]["backend"] == "pluggable"
