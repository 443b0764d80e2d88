"""Writes the C source of the calls that a PyTorch build makes and the phantom GPU may lack.

Every call gets a weak definition that says its name; where the phantom GPU has the call, its own definition wins.
Without it NVIDIA's library would answer, on a driver that is none.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchmem.phantom.elf import dynamic_symbols

# The longest prefix that fits decides. The numbers are each library's "not supported" (cuda.h, cublas_api.h,
# cudnn_graph.h of cuDNN 9, cusparse.h, cusolver_common.h, cufft.h, cufile.h); cuRAND and NCCL have none, so theirs are
# CURAND_STATUS_ARCH_MISMATCH and ncclInvalidUsage.
CODES = {
    "cuda": 801, "__cuda": 801, "cu": 801, "cublas": 15, "cudnn": 3000, "cusparse": 10, "cusparseLt": 10,
    "cusolver": 9, "cufft": 16, "curand": 204, "cuFile": 5003, "nccl": 5,
}  # fmt: skip
# What works on the host and stays real: CUPTI (the profiler), NVRTC, nvJitLink, NVSHMEM, and cuDNN's descriptors.
_REAL = re.compile(
    r"cupti|cudnn(?:Create|Destroy|Set|Get)\w*Descriptor|cudnnSetConvolution|cudnnGet\w*(?:Version|Property|String)\b"
)
_CALL = re.compile("(?:" + "|".join(sorted(CODES, key=len, reverse=True)) + r")[A-Z]\w*")
_TEXT = re.compile(r"(?:cudnn|cublas|cusparse|cusolver|nccl)\w*(?:String|ErrorName|StatusName|LastError)")


def called_libraries(torch_folder: Path) -> list[Path]:
    """The libraries of a PyTorch build that call CUDA, in `torch/lib`."""
    names = ("libtorch*.so", "libc10*.so", "libcaffe2*.so")
    found = {path for name in names for path in (torch_folder / "lib").glob(name)}
    return sorted(path for path in found if "nvshmem" not in path.name)


def calls(libraries: list[Path]) -> set[str]:
    """CUDA calls that the libraries take from elsewhere, linked or looked up in the driver by name.

    Raises:
        ElfError, OSError: a library cannot be read.
    """
    symbols = [symbol for path in libraries for symbol in dynamic_symbols(path)]
    missing = {symbol.name for symbol in symbols if not symbol.defined}
    found = missing - {symbol.name for symbol in symbols if symbol.defined}
    return {name for name in found | _looked_up(libraries) if _CALL.fullmatch(name) and not _REAL.match(name)}


def _looked_up(libraries: list[Path]) -> set[str]:
    """What c10's table of driver calls looks up at run time (c10/cuda/driver_api.cpp): the names are text in it."""
    images = [path.read_bytes() for path in libraries if path.name == "libc10_cuda.so"]
    return {name.decode() for image in images for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", image)}


def source(names: set[str]) -> str:
    """The C source with one weak definition for each name."""
    rows = [f"TEXT({name})" if _TEXT.fullmatch(name) else f"LACKING({name}, {_code(name)})" for name in sorted(names)]
    return '#include "lacking.h"\n' + "\n".join(rows) + "\n"


def _code(name: str) -> int:
    return CODES[max((prefix for prefix in CODES if name.startswith(prefix)), key=len)]
