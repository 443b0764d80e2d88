"""The CUDA calls that a PyTorch build makes, and a C stub for each one that the phantom GPU lacks.

Each stub is a weak definition that reports its name; the phantom GPU's own definition of a call
overrides it. Without the stub, NVIDIA's library would answer, on top of a driver that is not real.

ELF layout: System V ABI, "Object files" (Elf64_Ehdr, Elf64_Shdr, Elf64_Sym).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The longest matching prefix decides. The numbers are each library's "not supported" (cuda.h,
# cublas_api.h, cudnn_graph.h of cuDNN 9, cusparse.h, cusolver_common.h, cufft.h, cufile.h). cuRAND
# and NCCL have none; theirs are CURAND_STATUS_ARCH_MISMATCH and ncclInvalidUsage.
CODES = {
    "cuda": 801,
    "__cuda": 801,
    "cu": 801,
    "cublas": 15,
    "cudnn": 3000,
    "cusparse": 10,
    "cusparseLt": 10,
    "cusolver": 9,
    "cufft": 16,
    "curand": 204,
    "cuFile": 5003,
    "nccl": 5,
}
# These work without a GPU and stay real: CUPTI (the profiler), NVRTC, nvJitLink, NVSHMEM, and
# cuDNN's descriptors.
_REAL = re.compile(
    r"cupti|cudnn(?:Create|Destroy|Set|Get)\w*Descriptor|cudnnSetConvolution"
    r"|cudnnGet\w*(?:Version|Property|String)\b"
)
_CALL = re.compile("(?:" + "|".join(sorted(CODES, key=len, reverse=True)) + r")[A-Z]\w*")
_TEXT = re.compile(
    r"(?:cudnn|cublas|cusparse|cusolver|nccl)\w*(?:String|ErrorName|StatusName|LastError)"
)
_IDENT = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<40xQ10xHH2x")  # e_shoff, e_shentsize, e_shnum
_SECTION = struct.Struct("<4xI16xQQI20x")  # sh_type, sh_offset, sh_size, sh_link
_SYMBOL = struct.Struct("<IBxH16x")  # st_name, st_info, st_shndx
_DYNSYM = 11


class ElfError(ValueError):
    """A file that is not a 64-bit little-endian ELF file, or is truncated."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One dynamic symbol.

    defined: the library defines it itself. weak: another definition takes precedence.
    """

    name: str
    defined: bool
    weak: bool


def torch_libraries(torch_folder: Path) -> list[Path]:
    """Return the libraries in `torch/lib` that call CUDA."""
    names = ("libtorch*.so", "libc10*.so", "libcaffe2*.so")
    paths = {path for name in names for path in (torch_folder / "lib").glob(name)}
    return sorted(path for path in paths if "nvshmem" not in path.name)


def called_functions(libraries: list[Path]) -> set[str]:
    """Return the CUDA calls that the libraries link to, or look up in the driver by name.

    Raises:
        ElfError, OSError: a library cannot be read.
    """
    symbols = [symbol for path in libraries for symbol in dynamic_symbols(path)]
    undefined = {symbol.name for symbol in symbols if not symbol.defined}
    linked = undefined - {symbol.name for symbol in symbols if symbol.defined}
    names = linked | _looked_up(libraries)
    return {name for name in names if _CALL.fullmatch(name) and not _REAL.match(name)}


def stub_source(names: set[str]) -> str:
    """Return the C source with a weak definition for each name."""
    rows = [
        f"TEXT({name})" if _TEXT.fullmatch(name) else f"LACKING({name}, {_code(name)})"
        for name in sorted(names)
    ]
    return '#include "lacking.h"\n' + "\n".join(rows) + "\n"


def dynamic_symbols(path: Path) -> tuple[Symbol, ...]:
    """Return the dynamic symbols of a shared library, without their versions.

    Raises:
        ElfError: the file is not a 64-bit little-endian shared library.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size < _HEADER.size:
            raise ElfError(f"{path} is not a shared library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            if image[:6] != _IDENT:
                raise ElfError(f"{path} is not a shared library for a 64-bit little-endian machine")
            try:
                return tuple(_symbols(image))
            except (struct.error, IndexError, ValueError, OverflowError) as error:
                raise ElfError(f"{path} is truncated or damaged: {error}") from error


def _symbols(image: mmap.mmap) -> Iterator[Symbol]:
    start, width, count = _HEADER.unpack_from(image)
    sections = [_SECTION.unpack_from(image, start + index * width) for index in range(count)]
    for kind, offset, size, link in sections:
        if kind == _DYNSYM:
            names = image[sections[link][1] : sections[link][1] + sections[link][2]]
            table = image[offset : offset + size]
            for name, info, section in _SYMBOL.iter_unpack(table):
                text = names[name : names.index(b"\0", name)].decode("ascii", "replace")
                yield Symbol(text, section != 0, info >> 4 == 2)


def _looked_up(libraries: list[Path]) -> set[str]:
    """Return the driver calls that c10 looks up at run time (c10/cuda/driver_api.cpp).

    Their names are strings in the library.
    """
    images = [path.read_bytes() for path in libraries if path.name == "libc10_cuda.so"]
    names = [name for image in images for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", image)]
    return {name.decode() for name in names}


def _code(name: str) -> int:
    return CODES[max((prefix for prefix in CODES if name.startswith(prefix)), key=len)]
