"""vLLM's GPU worker, for `vllm serve MODEL --worker-cls torchmem.integrations.vllm.Worker`.

vLLM imports this module in the processes that hold the GPU memory, which are not those that serve
HTTP. Written for the worker of vLLM's engine V1 with both model runners
(vllm/v1/worker/gpu_worker.py, vLLM 0.33). With TORCHMEM=1, `vllm_plugin.py` chooses this class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from torchmem import sdk
from torchmem.integrations.vllm_terms import VLLM

LORA_BUFFERS = ("lora_a_stacked", "lora_b_stacked")
"""Attributes of vllm.lora.layers.BaseLayerWithLoRA that hold the weights of the adapters."""
COLOCATED = "external_launcher"
"""The executor of a trainer that has the engine in its own process, as TRL and verl use it."""


class VllmEngine:
    """What a worker's engine holds, as `ServedEngine.serve` takes it."""

    name = "vllm"
    terms = VLLM

    def __init__(self, worker: GpuWorker, *, is_alone: bool) -> None:
        self._worker = worker
        self.is_alone = is_alone

    @property
    def device(self) -> int:
        """Torch's index of the device."""
        return self._worker.device.index or 0

    def allocations(self) -> Iterable[sdk.EngineAllocation]:
        """Return the allocations of the allocator that sleeps, by vLLM's tags.

        Releases before 0.33 do not say which of them are asleep (`AllocationData.is_asleep`).
        """
        module = sys.modules.get("vllm.device_allocator.cumem")
        allocator = getattr(getattr(module, "CuMemAllocator", None), "instance", None)
        data = list(allocator.pointer_to_data.items()) if allocator is not None else []
        return [
            sdk.EngineAllocation(address, each.handle[1], each.tag, each.is_asleep)
            for address, each in data
            if each.handle[0] == self.device and hasattr(each, "is_asleep")
        ]

    def parts(self) -> Mapping[str, int]:
        """Return the bytes of the model, the KV cache, LoRA adapters, and CUDA graphs."""
        runner = self._worker.model_runner
        lora = bytes_of(lora_buffers(model_of(runner)))
        weights = int(getattr(runner, "model_memory_usage", 0)) - lora
        caches = bytes_of(kv_caches(runner))
        graphs = getattr(self._worker, "torchmem_graph_bytes", 0)
        return {
            "weights": max(0, weights),
            "kv_cache": caches,
            "lora": lora,
            "cudagraph": graphs,
        }

    def plan(self) -> sdk.EnginePlan:
        """Return what the profile run planned.

        With --kv-cache-memory vLLM plans nothing but that.
        """
        worker = self._worker
        weights = int(getattr(worker.model_runner, "model_memory_usage", 0))
        kv_cache = getattr(worker, "available_kv_cache_memory_bytes", None)
        parts = {
            "weights": weights,
            "kv_cache": worker.cache_config.kv_cache_memory_bytes or kv_cache,
            "cudagraph": getattr(worker, "cudagraph_memory_estimate", None),
        }
        consumed, activations = consumption(worker), planned_activations(worker)
        if consumed is not None:
            parts["other"] = max(0, consumed - weights)
        parts["activations"] = activations
        known = {name: int(size) for name, size in parts.items() if size}
        return sdk.EnginePlan(known, int(worker.requested_memory), consumed)


def consumption(worker: GpuWorker) -> int | None:
    """Return what was used beside the KV cache, graphs and activations, by the profile run."""
    consumed = getattr(worker, "total_consumed", None)
    return None if consumed is None else int(consumed)


def planned_activations(worker: GpuWorker) -> int | None:
    """Return the peak of the activations in the profile run.

    vLLM adds its estimate of the CUDA graphs to it, unless that is switched off.
    """
    planned = getattr(worker, "peak_activation_memory", None)
    if planned is None:
        return None
    from vllm import envs

    added = getattr(envs, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", False)
    graphs = getattr(worker, "cudagraph_memory_estimate", 0) if added else 0
    return max(0, int(planned - graphs))


def model_of(runner: Any) -> Any:
    """Return the model of a runner of either version; None before it is loaded."""
    return getattr(runner, "model", None)


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of tensors, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kv_caches(runner: Any) -> Iterator[Any]:
    """Yield the tensors of the KV cache; a layer may have one, or a list of them."""
    for cache in getattr(runner, "kv_caches", ()):
        layer = cache if isinstance(cache, list | tuple) else (cache,)
        yield from (tensor for tensor in layer if hasattr(tensor, "untyped_storage"))


def lora_buffers(model: Any) -> list[Any]:
    """Return the tensors into which adapters are loaded; none without LoRA."""
    if model is None or not hasattr(model, "modules"):
        return []
    stacks = (getattr(module, name, ()) for module in model.modules() for name in LORA_BUFFERS)
    return [tensor for stack in stacks for tensor in stack if hasattr(tensor, "untyped_storage")]


class Worker(GpuWorker):
    """Publishes the engine's memory awake and asleep, engine steps, and finished requests.

    A step of the engine, which runs a batch and samples its tokens, counts as a step, and the
    requests that have finished as samples; those of the warm-up do not count. Inside a trainer, the
    trainer's steps count instead. Settings are `TORCHMEM_*` variables; the run is named after the
    model, except inside a trainer.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.torchmem_serves = False
        self.torchmem_graph_bytes = 0
        self.torchmem_step: sdk.Iteration | None = None
        colocated = self.parallel_config.distributed_executor_backend == COLOCATED
        self.torchmem_session = sdk.instrument() if colocated else sdk.instrument(rank=self.rank)
        self.torchmem_engine = sdk.ServedEngine(self.torchmem_session)
        with self.torchmem_session.errors.suppress("setup"):
            self.torchmem_is_alone = not colocated
            if not colocated:
                self.torchmem_session.rename(_model_name(self.model_config))

    def load_model(self, *arguments: Any, **keywords: Any) -> Any:
        """Load the model, and track it."""
        result = super().load_model(*arguments, **keywords)
        with self.torchmem_session.errors.suppress("engine"):
            model = model_of(self.model_runner)
            lora = lora_buffers(model)
            if lora:
                self.torchmem_session.track("lora", lora)
            self.torchmem_session.track("weights", model)
            self.torchmem_engine.serve(VllmEngine(self, is_alone=self.torchmem_is_alone))
        return result

    def initialize_from_config(self, *arguments: Any, **keywords: Any) -> Any:
        """Allocate the KV cache, and track it."""
        result = super().initialize_from_config(*arguments, **keywords)
        with self.torchmem_session.errors.suppress("engine"):
            self.torchmem_session.track("kv_cache", self.model_runner.kv_caches)
            self.torchmem_engine.changed()
        return result

    def compile_or_warm_up_model(self, *arguments: Any, **keywords: Any) -> Any:
        """Warm up, which captures graphs and calls `execute_model` with requests of its own."""
        with self._torchmem_graphs_measured():
            result = super().compile_or_warm_up_model(*arguments, **keywords)
        with self.torchmem_session.errors.suppress("engine"):
            self.torchmem_engine.changed()
            self.torchmem_engine.ready()
            self.torchmem_serves = True
        return result

    @contextmanager
    def _torchmem_graphs_measured(self) -> Iterator[None]:
        """Keep what `capture_model` returns: the bytes that the driver has less after it."""
        runner = self.model_runner
        capture: Any = getattr(runner, "capture_model", None)

        def capture_model(*arguments: Any, **keywords: Any) -> Any:
            size = capture(*arguments, **keywords)
            if isinstance(size, int | float):
                self.torchmem_graph_bytes = max(0, int(size))
            return size

        if capture is None:
            yield
            return
        runner.capture_model = capture_model
        try:
            yield
        finally:
            # This removes the attribute of the instance, behind which is the method of its class.
            del runner.capture_model

    def execute_model(self, scheduler_output: Any, *arguments: Any, **keywords: Any) -> Any:
        """Run the batch once. Without a result, `sample_tokens` ends the step."""
        with self._torchmem_step_fails_with_call():
            self._torchmem_begin(scheduler_output)
            result = super().execute_model(scheduler_output, *arguments, **keywords)
        if result is not None:
            self._torchmem_end()
        return result

    def sample_tokens(self, *arguments: Any, **keywords: Any) -> Any:
        """Sample the tokens of the batch that has run."""
        with self._torchmem_step_fails_with_call():
            result = super().sample_tokens(*arguments, **keywords)
        self._torchmem_end()
        return result

    @contextmanager
    def _torchmem_step_fails_with_call(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._torchmem_end(0)
            raise

    def _torchmem_begin(self, scheduler_output: Any) -> None:
        if not self.torchmem_serves:
            return
        self._torchmem_end()
        with self.torchmem_session.errors.suppress("step"):
            finished = len(scheduler_output.finished_req_ids)
            runs = scheduler_output.total_num_scheduled_tokens > 0
            self.torchmem_step = self._torchmem_iteration(finished, runs=runs).begin()

    def _torchmem_iteration(self, finished: int, *, runs: bool) -> sdk.Iteration:
        session = self.torchmem_session
        if not self.torchmem_is_alone:
            return session.iteration("generate")
        if runs:
            return session.request(finished)
        return session.iteration("generate", finished, waits=True)

    def _torchmem_end(self, samples: int | None = None) -> None:
        step, self.torchmem_step = self.torchmem_step, None
        if step is not None:
            step.end(samples)

    def sleep(self, *arguments: Any, **keywords: Any) -> Any:
        """Give memory back to the driver."""
        with self.torchmem_engine.moves(sleeps=True):
            return super().sleep(*arguments, **keywords)

    def wake_up(self, tags: list[str] | None = None, **keywords: Any) -> Any:
        """Take memory from the driver again, and make room for it before."""
        self.torchmem_engine.wakes(tags)
        with self.torchmem_engine.moves():
            return super().wake_up(tags, **keywords)

    def discard(self, *arguments: Any, **keywords: Any) -> Any:
        """Give memory back to the driver without a copy of it."""
        with self.torchmem_engine.moves():
            return super().discard(*arguments, **keywords)


def _model_name(config: Any) -> str:
    """Return the name under which the model is served, else the last part of its path."""
    served = config.served_model_name
    name = served[0] if isinstance(served, list) else served
    return str(name or config.model).rstrip("/").rpartition("/")[2]
