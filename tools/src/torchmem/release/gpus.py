"""The GPU that `--gpu` names."""

from __future__ import annotations

from torchmem.sample.errors import UsageError


def gpu_uuid(name: str) -> str:
    """Return the UUID, or its start, of a GPU that is named by NVML's index or by its UUID.

    An index needs the exporter's packages. Raises UsageError.
    """
    if not name.isdecimal():
        return name
    try:
        from torchmem.exporter.driver import PyNvml
        from torchmem.exporter.gpus import GpuFault
        from torchmem.exporter.nvml import NvmlDownError
    except ModuleNotFoundError:
        raise UsageError(
            "--gpu: an index needs torchmem[exporter]; install it, or give the UUID that "
            "`nvidia-smi -L` shows."
        ) from None
    nvml = PyNvml()
    try:
        nvml.open()
        gpu = nvml.gpu(int(name)) if int(name) < nvml.count() else None
        nvml.close()
    except NvmlDownError as error:
        raise UsageError(
            f"--gpu: {error}; give the UUID of the GPU instead of its index."
        ) from None
    if gpu is None or isinstance(gpu, GpuFault):
        raise UsageError(f"--gpu: there is no working GPU {name}; `nvidia-smi -L` lists them.")
    return gpu.uuid
