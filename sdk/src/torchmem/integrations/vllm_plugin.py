"""A plugin of vLLM: with TORCHMEM=1, engines have the worker of `torchmem.integrations.vllm`.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`), also
inside a trainer. A process with another worker than vLLM's own keeps it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

VARIABLE, ON = "TORCHMEM", "1"
VLLMS_WORKER = "vllm.v1.worker.gpu_worker.Worker"
WORKER = "torchmem.integrations.vllm.Worker"


def register() -> None:
    """Choose torchmem's worker, if this process is to be monitored."""
    if os.environ.get(VARIABLE) == ON or _has_session():
        from vllm.v1.worker import worker_base

        _choose_worker(worker_base.WorkerWrapperBase)


def _has_session() -> bool:
    """Return whether the script has called `instrument()`, without importing the SDK."""
    module = sys.modules.get("torchmem.sdk.session")
    session = module.current_session() if module else None
    return session is not None and not session.closed


def _choose_worker(wrapper: Any) -> None:
    """Change the configuration from which vLLM takes the class of its worker."""
    init_worker = wrapper.init_worker
    if getattr(init_worker, "is_torchmems", False):
        return

    @functools.wraps(init_worker)
    def init_monitored_worker(self: Any, all_kwargs: Any, *rest: Any, **keywords: Any) -> Any:
        try:
            _configure(all_kwargs[self.rpc_rank]["vllm_config"].parallel_config)
        except Exception:
            logging.getLogger("torchmem").exception("torchmem does not monitor this engine")
        return init_worker(self, all_kwargs, *rest, **keywords)

    init_monitored_worker.is_torchmems = True  # type: ignore[attr-defined]
    wrapper.init_worker = init_monitored_worker


def _configure(parallel_config: Any) -> None:
    if parallel_config.worker_cls == VLLMS_WORKER:
        parallel_config.worker_cls = WORKER
