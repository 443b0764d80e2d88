"""vLLM's GPU worker, for `vllm serve MODEL --worker-cls torchmem.integrations.vllm.Worker`.

vLLM imports this module in the processes that hold the GPU memory, which are not those that serve
HTTP. Written against the source of the worker of vLLM's engine V1 (vllm/v1/worker/gpu_worker.py).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from torchmem import sdk


class Worker(GpuWorker):
    """Publishes the model and the KV cache as components, engine steps, and finished requests.

    A step of the engine, which runs the batch once, counts as a step, and the requests that have
    finished as samples. Settings are `TORCHMEM_*` variables; the run is named after the model.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.torchmem_session = sdk.instrument(rank=self.rank)
        with self.torchmem_session.errors.suppress("setup"):
            self.torchmem_session.rename(_model_name(self.model_config))

    def load_model(self, *arguments: Any, **keywords: Any) -> Any:
        """Load the model, and track it."""
        result = super().load_model(*arguments, **keywords)
        with self.torchmem_session.errors.suppress("components"):
            self.torchmem_session.track("model", self.model_runner.model)
        return result

    def initialize_from_config(self, *arguments: Any, **keywords: Any) -> Any:
        """Allocate the KV cache, and track it."""
        result = super().initialize_from_config(*arguments, **keywords)
        with self.torchmem_session.errors.suppress("components"):
            self.torchmem_session.track("kv_cache", self.model_runner.kv_caches)
        return result

    def execute_model(self, scheduler_output: Any, *arguments: Any, **keywords: Any) -> Any:
        """Run the batch once."""
        finished = 0
        with self.torchmem_session.errors.suppress("step"):
            finished = len(scheduler_output.finished_req_ids)
        with self.torchmem_session.request(finished):
            return super().execute_model(scheduler_output, *arguments, **keywords)


def _model_name(config: Any) -> str:
    """Return the name under which the model is served, else the last part of its path."""
    served = config.served_model_name
    name = served[0] if isinstance(served, list) else served
    return str(name or config.model).rstrip("/").rpartition("/")[2]
