"""The GPUs that a phantom GPU can stand in for. All sizes are bytes.

To add a GPU, add a line to `_ROWS` and its name to docs/phantom.md, which a test compares.

Memory is `cudaDeviceProp.totalGlobalMem`, which OutOfMemoryError calls the total capacity. It
depends on the driver, by up to 0.3 GiB; where public outputs differ, this is the smallest one of a
recent driver. Sources are public outputs of `torch.cuda.get_device_properties` (MiB), and public
OutOfMemoryError messages (GiB with two digits) for a10, a100, b300, h100-nvl, l4, l40s, v100-32gb
and the GeForce GPUs. Multiprocessors and L2 cache are from the same outputs, otherwise from
NVIDIA's data sheets; the L2 cache of b300 is assumed to equal that of b200.
"""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import dataclass

from torchmem.allocator.sizes import MIB, format_size, parse_size
from torchmem.sample.errors import UsageError

MAX_GPUS = 16


@dataclass(frozen=True, slots=True)
class GpuModel:
    """Properties of a GPU, and what a process uses on it besides PyTorch's allocator.

    name: as in `--gpu-model`. product: as nvidia-smi shows it. memory_bytes:
    `cudaDeviceProp.totalGlobalMem`. multiprocessors: number of SMs. capability: compute capability,
    major and minor. context_bytes: CUDA context and kernels, an estimate. l2_bytes: L2 cache.
    """

    name: str
    product: str
    memory_bytes: int
    multiprocessors: int = 132
    capability: tuple[int, int] = (9, 0)
    context_bytes: int = 512 * MIB
    l2_bytes: int = 50 * MIB


def context_bytes(multiprocessors: int, capability: tuple[int, int]) -> int:
    """Return an estimate of what a training process holds outside PyTorch's allocator.

    2 KiB per resident thread: public figures for bare contexts are 256 MiB (RTX 3090), 418 (A100),
    426 (RTX 6000 Ada, PR 1053 of unslothai/unsloth-zoo), 618 (B300). Plus 64 MiB for kernels that
    are loaded later, which brings the estimate within 5% of the memory "including non-PyTorch" in
    messages of A4000, L4, L40 and A100. On Hopper, cuBLAS loads more: an H200 with CUDA 13.0 has
    610 MiB after the first tensor and 742 to 768 in training, so 232 MiB are added there.
    """
    threads = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(capability, 2048)
    kernels = 232 if capability == (9, 0) else 64
    return multiprocessors * threads * 2048 + kernels * MIB


# Name, product, memory in MiB, multiprocessors, compute capability, L2 cache in MiB.
_ROWS = (
    ("v100-16gb", "Tesla V100-SXM2-16GB", 16130, 80, (7, 0), 6),
    ("v100-32gb", "Tesla V100-SXM2-32GB", 32491, 80, (7, 0), 6),
    ("t4-16gb", "Tesla T4", 15095, 40, (7, 5), 4),
    ("a10-24gb", "NVIDIA A10", 22518, 72, (8, 6), 6),
    ("a10g-24gb", "NVIDIA A10G", 22587, 80, (8, 6), 6),
    ("a40-48gb", "NVIDIA A40", 45416, 84, (8, 6), 6),
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", 40336, 108, (8, 0), 40),
    ("a100-80gb", "NVIDIA A100-SXM4-80GB", 81050, 108, (8, 0), 40),
    ("l4-24gb", "NVIDIA L4", 22559, 58, (8, 9), 48),
    ("l40s-48gb", "NVIDIA L40S", 45456, 142, (8, 9), 96),
    ("h20-96gb", "NVIDIA H20", 97285, 78, (9, 0), 60),
    ("h100-80gb", "NVIDIA H100 80GB HBM3", 81082, 132, (9, 0), 50),
    ("h100-nvl-94gb", "NVIDIA H100 NVL", 95325, 132, (9, 0), 50),
    ("h200-141gb", "NVIDIA H200", 143156, 132, (9, 0), 60),
    ("b200-180gb", "NVIDIA B200", 182631, 148, (10, 0), 126),
    ("b300-288gb", "NVIDIA B300 SXM6 AC", 274115, 148, (10, 3), 126),
    ("rtx-3090", "NVIDIA GeForce RTX 3090", 24126, 82, (8, 6), 6),
    ("rtx-4090", "NVIDIA GeForce RTX 4090", 24085, 128, (8, 9), 72),
    ("rtx-5090", "NVIDIA GeForce RTX 5090", 32111, 170, (12, 0), 96),
    ("rtx-a6000", "NVIDIA RTX A6000", 48676, 84, (8, 6), 6),
    ("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 48509, 142, (8, 9), 96),
    ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97250, 188, (12, 0), 128),
)
CATALOG = tuple(
    GpuModel(
        name,
        product,
        memory * MIB,
        processors,
        capability,
        context_bytes(processors, capability),
        l2 * MIB,
    )
    for name, product, memory, processors, capability, l2 in _ROWS
)
_BY_NAME = {gpu.name: gpu for gpu in CATALOG}


def parse_gpu_model(text: str) -> GpuModel:
    """Return the GPU for a name, a unique prefix (`h200`), or a size such as 24GB.

    A size gives an H100 with that much memory.

    Raises:
        UsageError: `text` does not name a GPU.
    """
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    matches = [gpu for gpu in CATALOG if name and gpu.name.startswith(f"{name}-")]
    if name in _BY_NAME or len(matches) == 1:
        return _BY_NAME.get(name) or matches[0]
    with contextlib.suppress(ValueError):
        return GpuModel(text.strip(), f"GPU of {text.strip()}", parse_size(text))
    close = [gpu.name for gpu in matches] or difflib.get_close_matches(name, _BY_NAME, 3, 0.3)
    hint = (
        f"the closest are {', '.join(close)}"
        if close
        else f"the known GPUs are {', '.join(_BY_NAME)}"
    )
    raise UsageError(f"{text!r} is not a known GPU: {hint}; or give a memory size such as 24GB.")


def parse_usable_gpu_model(text: str) -> GpuModel:
    """Return the GPU as `parse_gpu_model`, which must have memory besides its CUDA context.

    Raises:
        UsageError: `text` does not name such a GPU.
    """
    gpu = parse_gpu_model(text)
    if gpu.memory_bytes <= gpu.context_bytes:
        raise UsageError(
            f"a GPU of {text} has no memory left besides a CUDA context of "
            f"{format_size(gpu.context_bytes)}: choose a larger one."
        )
    return gpu


def parse_memory(text: str) -> int:
    """Return the bytes of a memory size such as 80GB (10^9) or 80GiB (2^30).

    Raises:
        UsageError: `text` is not a size of at least one byte.
    """
    try:
        return parse_size(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is not a memory size; write for example 80GB or 24GiB."
        ) from None
