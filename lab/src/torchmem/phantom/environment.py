"""The environment variables that run a command on phantom GPUs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from torchmem.phantom.build import LIBRARY, library_folder
from torchmem.phantom.gpus import GpuModel
from torchmem.phantom.torch_build import BUILT_FOR, TorchBuild

STARTUP = Path(__file__).resolve().parent / "startup"


def phantom_environment(
    gpu: GpuModel,
    devices: int,
    state: Path,
    base: Mapping[str, str],
    torch: TorchBuild | None = None,
) -> dict[str, str]:
    """Return a copy of `base` with the variables for `devices` GPUs; builds the library if needed.

    state: folder through which processes share the GPUs. torch: the PyTorch that the command
    uses, see `torch_build.cuda_build`; the phantom GPU reports its CUDA version. A Python that has
    another PyTorch restarts itself with a library for it, see `startup/sitecustomize.py`.

    Raises:
        UsageError: the library cannot be built here.
    """
    folder = library_folder(torch, base)
    return {
        **base,
        **_gpu_variables(gpu),
        **_compiler_caches(base, folder.parent),
        "PHANTOM_DEVICES": str(devices),
        "PHANTOM_STATE_DIR": str(state),
        # At exit, PyTorch waits 10 s for an autograd thread that is stopped (c/finalizing.c).
        "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": base.get("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "1"),
        "PHANTOM_CUDA": torch.cuda if torch and torch.cuda else base.get("PHANTOM_CUDA", "13.0"),
        BUILT_FOR: str(torch.folder) if torch else "",
        "PHANTOM_PYTHON": sys.executable,
        "LD_PRELOAD": _prepended(base, "LD_PRELOAD", folder / LIBRARY),
        "LD_LIBRARY_PATH": _prepended(base, "LD_LIBRARY_PATH", folder),
        "PYTHONPATH": _prepended(base, "PYTHONPATH", STARTUP),
    }


def _gpu_variables(gpu: GpuModel) -> dict[str, str]:
    """Return the variables that `c/model.c` reads."""
    product = gpu.product.removeprefix("GPU of ")  # the name is often shown after "GPU"
    return {
        "PHANTOM_GPU_MODEL": gpu.name,
        "PHANTOM_NAME": f"{product} (phantom)",
        "PHANTOM_MEMORY": str(gpu.memory_bytes),
        "PHANTOM_CONTEXT": str(gpu.context_bytes),
        "PHANTOM_MULTIPROCESSORS": str(gpu.multiprocessors),
        "PHANTOM_CAPABILITY": f"{gpu.capability[0]}{gpu.capability[1]}",
        "PHANTOM_L2": str(gpu.l2_bytes),
    }


def _compiler_caches(base: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Return separate cache folders for torch.compile and Triton.

    They cache which kernel was fastest, and their keys need not name the GPU. A real GPU would
    reuse the result of a phantom one, where timings are meaningless.
    """
    folders = {"TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "TRITON_CACHE_DIR": cache / "triton"}
    return {name: str(_subfolder(base.get(name)) or folder) for name, folder in folders.items()}


def _subfolder(folder: str | None) -> Path | None:
    if not folder:
        return None
    return Path(folder) if Path(folder).name == "phantom" else Path(folder, "phantom")


def _prepended(base: Mapping[str, str], name: str, path: Path) -> str:
    """Return a list of paths that starts with `path`, without the library of an enclosing run."""
    others = (other for other in base.get(name, "").split(":") if other)
    kept = [other for other in others if other != str(path) and not _is_library(Path(other))]
    return ":".join([str(path), *kept])


def _is_library(path: Path) -> bool:
    return path.name == LIBRARY or (path / LIBRARY).exists()
