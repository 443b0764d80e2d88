"""Train with a pool of RAPIDS' memory manager as PyTorch's allocator."""

import ctypes

import rmm.mr
import torch
from rmm.allocators.torch import rmm_torch_allocator

# RMM's own CUDA runtime refuses the phantom GPU's driver, so the pool grows by calls from here.
runtime = ctypes.CDLL(None)


def take(size, _stream):
    start = ctypes.c_void_p()
    if runtime.cudaMalloc(ctypes.byref(start), ctypes.c_size_t(size)):
        raise MemoryError(size)
    return start.value


def give(start, _size, _stream):
    runtime.cudaFree(ctypes.c_void_p(start))


driver = rmm.mr.CallbackMemoryResource(take, give)
pool = rmm.mr.PoolMemoryResource(driver, initial_pool_size=64 << 20)
rmm.mr.set_per_device_resource(0, rmm.mr.StatisticsResourceAdaptor(pool))
torch.cuda.memory.change_current_allocator(rmm_torch_allocator)

model = torch.nn.Linear(64, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 10)
