"""How texts name a GPU.

"GPU 3" is always NVML's index, which `nvidia-smi` and the label `gpu` show. A process may number
its GPUs differently, by CUDA_VISIBLE_DEVICES. Its own index is written as PyTorch does: "cuda:0".
"""

from __future__ import annotations


def gpu_name(device: int, uuid: str | None, index: int | None) -> str:
    """Return the name of a GPU.

    Args:
        device: torch's index in the process.
        uuid: UUID of the GPU, or name of the MIG device.
        index: NVML's index of the GPU; None if it is unknown.
    """
    if index is None:
        return f"cuda:{device}"
    is_mig = uuid is not None and uuid.startswith("MIG-")
    return f"the MIG device of GPU {index}" if is_mig else f"GPU {index}"
