"""A worker with the interface of vLLM's: model and KV cache in a pool that can sleep, and a graph.

The interface is that of vllm/v1/worker/gpu_worker.py; everything else is small and of our own.
"""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import torch

LIBRARY = os.environ["SLEEP_ALLOCATOR"]
WIDTH, BATCH = 4096, 4


class Worker:
    """One process of the engine, with one GPU."""

    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        self.model_config = vllm_config.model_config
        self.parallel_config = vllm_config.parallel_config
        self.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
        self.requested_memory = 0
        self.rank, self.local_rank = rank, local_rank

    def init_device(self) -> None:
        """Start CUDA, with a pool for what can sleep."""
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.init()
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(LIBRARY, "take", "give")
        self.pool = torch.cuda.MemPool(self.allocator._allocator)
        self.model_runner = SimpleNamespace(model=None, kv_caches=[])

    def load_model(self) -> None:
        """Create a layer of 64 MiB."""
        with torch.cuda.use_mem_pool(self.pool):
            model = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=self.device)
        self.model_runner.model = model

    def initialize_from_config(self, kv_cache_config: int) -> None:
        """Allocate two tensors of this size in bytes."""
        with torch.cuda.use_mem_pool(self.pool):
            new = [torch.zeros(kv_cache_config, dtype=torch.uint8, device=self.device)]
            new += [torch.zeros(kv_cache_config, dtype=torch.uint8, device=self.device)]
        self.model_runner.kv_caches.extend(new)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compile_or_warm_up_model(self) -> None:
        """Capture the batch as a CUDA graph."""
        self.inputs = torch.ones(BATCH, WIDTH, device=self.device)
        self.model_runner.model(self.inputs)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.model_runner.model(self.inputs)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the batch once."""
        self.graph.replay()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Return what the batch has computed."""
        return self.outputs

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the pool back to the driver, behind PyTorch's allocator."""
        ctypes.CDLL(LIBRARY).go_to_sleep()
        torch.cuda.empty_cache()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take as much memory again at the same addresses."""
        assert ctypes.CDLL(LIBRARY).wake_up() == 0
