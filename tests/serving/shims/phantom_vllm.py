"""What vLLM needs on a phantom GPU, in each of its processes: a plugin of `vllm.general_plugins`.

Two places of vLLM bypass the phantom: it opens the CUDA runtime by path, and it lets values that
the GPU has computed decide how many tokens a request has.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch


def install() -> None:
    """Give vLLM the phantom's runtime, and one sampled token for each request."""
    from vllm.distributed.device_communicators import cuda_wrapper
    from vllm.v1.worker.gpu import async_utils

    cuda_wrapper.CudaRTLibrary.__init__ = _with_loaded_symbols
    get_output = async_utils.AsyncOutput.get_output

    def with_tokens(self: Any) -> Any:
        np.maximum(self.num_sampled_tokens_np, 1, out=self.num_sampled_tokens_np)
        return get_output(self)

    async_utils.AsyncOutput.get_output = with_tokens


class Leaking:
    """An extension of vLLM's worker that keeps buffers, as a faulty weight update does."""

    def leak(self, mebibytes: int) -> None:
        """Keep one buffer more."""
        self.__dict__.setdefault("kept", []).append(
            torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")
        )


def _with_loaded_symbols(self: Any, so_file: str | None = None) -> None:
    """Use the functions of the libraries that are preloaded, not those of a file."""
    self.lib = ctypes.CDLL(None)
    self.funcs = {}
    for function in type(self).exported_functions:
        found = getattr(self.lib, function.name, None)
        if found is not None:
            found.restype, found.argtypes = function.restype, function.argtypes
            self.funcs[function.name] = found
