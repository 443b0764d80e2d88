"""Hooks into torch: forward, backward and optimizer, and peaks that can be reset at any time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchmem.allocator.snapshot import NestedStats
from torchmem.sdk.pytorch.backend import TorchBackend


class WatchedBackend(TorchBackend):
    """PyTorch's allocator with peaks that preflight resets without effect on SDK and script."""

    def window_stats(self, device: int) -> NestedStats | None:
        """Return the nested statistics, with the peaks since `reset_peaks`."""
        return super().memory_stats(device)

    def memory_stats(self, device: int) -> NestedStats | None:
        """Return the nested statistics as the script itself would read them."""
        return self.script_stats(device)


def on_forward(first: Callable[[], None], ended: Callable[[], bool]) -> None:
    """Run `first` when a module is called for the first time, and `ended` after each of its calls.

    `ended` returns whether it wants to hear of further calls. Calls of a compiled module are not
    reported, because a hook would be compiled with it.
    """

    def before(module: Any, *_: object) -> None:
        handles.pop().remove()
        first()
        if not _is_compiled(module):
            handles.append(module.register_forward_hook(after))

    def after(*_: object) -> None:
        if handles and not ended():
            handles.pop().remove()

    handles: list[Any] = [register_module_forward_pre_hook(before)]


def _is_compiled(module: Any) -> bool:
    is_wrapped = type(module).__name__ == "OptimizedModule"
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None


def on_optimizer(callback: Callable[[bool], None]) -> None:
    """Run `callback` before each step of a torch.optim optimizer, with whether it has a closure."""

    def before(_: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # PyTorch passes the optimizer, too, as the first argument (`profile_hook_step`).
        callback(any(callable(given) for given in (*arguments[1:2], keywords.get("closure"))))

    register_optimizer_step_pre_hook(before)


def around_backward(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Run the callbacks around every backward pass, including inner ones.

    Wraps `torch.autograd._engine_run_backward`, through which both `Tensor.backward` and
    `torch.autograd.grad` call the engine (torch/autograd/__init__.py, PyTorch 2.4 to 2.15).
    Backward passes are not seen if it is missing.
    """
    run: Any = getattr(torch.autograd, "_engine_run_backward", None)
    if run is None:
        return

    @functools.wraps(run)
    def run_with_callbacks(*arguments: Any, **keywords: Any) -> Any:
        begin()
        try:
            return run(*arguments, **keywords)
        finally:
            end()

    torch.autograd._engine_run_backward = run_with_callbacks  # noqa: SLF001


def pass_distribution_checks() -> None:
    """Let torch.distributions accept its parameters, which are zeros, after checking them.

    The check still runs, so that it takes its memory. Wraps `torch._is_all_true`, which nothing
    else in PyTorch calls (torch/distributions/distribution.py, PyTorch 2.13).
    """
    check: Any = getattr(torch, "_is_all_true", None)
    if check is None:
        return

    @functools.wraps(check)
    def run_and_pass(*arguments: Any) -> bool:
        check(*arguments)
        return True

    torch._is_all_true = run_and_pass  # noqa: SLF001


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, its cause or its context is PyTorch's OutOfMemoryError."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def gpus_without_kernels() -> list[str]:
    """Return the names of the visible GPUs that this build of PyTorch has no kernels for.

    Kernels run on GPUs of the same major compute capability and the same or a higher minor one.
    `torch.cuda._check_cubins` applies the same rule but only warns (torch/cuda/__init__.py, PyTorch
    2.13). CUDA must be initialized.
    """
    built = [
        divmod(int(name[3:].rstrip("af")), 10)
        for name in torch.cuda.get_arch_list()
        if name.startswith("sm_")
    ]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}"
        for gpu in gpus
        if built and not any(major == gpu.major and minor <= gpu.minor for major, minor in built)
    ]


def clear_cublas_workspaces() -> None:
    """Free the workspaces that PyTorch keeps for cuBLAS once it was used (PyTorch 2.1 to 2.15)."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001
    if clear is not None:
        clear()


def gpu_name(device: int) -> str:
    """Return the product name of a GPU. CUDA must be initialized."""
    return str(torch.cuda.get_device_name(device))
