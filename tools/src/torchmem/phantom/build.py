"""Reads which symbols a shared library takes from others: 64-bit ELF, little endian.

Layout: System V ABI, "Object files" (Elf64_Ehdr, Elf64_Shdr, Elf64_Sym).

Writes the C source of the calls that a PyTorch build makes and the phantom GPU may lack.

Every call gets a weak definition that says its name; where the phantom GPU has the call, its own definition wins.
Without it NVIDIA's library would answer, on a driver that is none.

Builds the stub libraries at first use, with the system's C compiler, into the user's cache.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import re
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmem.phantom.torch_build import TorchBuild
from torchmem.sample.errors import UsageError

_IDENT = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<40xQ10xHH2x")  # e_shoff, e_shentsize, e_shnum
_SECTION = struct.Struct("<4xI16xQQI20x")  # sh_type, sh_offset, sh_size, sh_link
_SYMBOL = struct.Struct("<IBxH16x")  # st_name, st_info, st_shndx
_DYNSYM = 11


class ElfError(ValueError):
    """The file is no 64-bit little-endian ELF file, or it is cut off."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One dynamic symbol. defined: the library has it; otherwise another one must. weak: another definition wins."""

    name: str
    defined: bool
    weak: bool


def dynamic_symbols(path: Path) -> tuple[Symbol, ...]:
    """The dynamic symbols of a shared library, without versions.

    Raises:
        ElfError: the file is none of this kind.
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
                raise ElfError(f"{path} is cut off or damaged: {error}") from error


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
_TEXT = re.compile(
    r"(?:cudnn|cublas|cusparse|cusolver|nccl)\w*(?:String|ErrorName|StatusName|LastError)"
)


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
    return {
        name
        for name in found | _looked_up(libraries)
        if _CALL.fullmatch(name) and not _REAL.match(name)
    }


def _looked_up(libraries: list[Path]) -> set[str]:
    """What c10's table of driver calls looks up at run time (c10/cuda/driver_api.cpp): the names are text in it."""
    images = [path.read_bytes() for path in libraries if path.name == "libc10_cuda.so"]
    return {
        name.decode() for image in images for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", image)
    }


def source(names: set[str]) -> str:
    """The C source with one weak definition for each name."""
    rows = [
        f"TEXT({name})" if _TEXT.fullmatch(name) else f"LACKING({name}, {_code(name)})"
        for name in sorted(names)
    ]
    return '#include "lacking.h"\n' + "\n".join(rows) + "\n"


def _code(name: str) -> int:
    return CODES[max((prefix for prefix in CODES if name.startswith(prefix)), key=len)]


HERE = Path(__file__).resolve().parent
SOURCES = HERE / "c"
LIBRARY = "libphantom.so"
STANDS_IN_FOR = ("libcuda.so.1", "libnvidia-ml.so.1")
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra")


def library_folder(
    torch: TorchBuild | None = None, environment: Mapping[str, str] = os.environ
) -> Path:
    """The folder with the library for a build of PyTorch; builds it at first use, in a few seconds.

    Without `torch`, calls that the phantom GPU lacks are simply not there. environment: XDG_CACHE_HOME and CC count.

    Raises:
        UsageError: not this machine, no compiler, it cannot build the library, or nowhere to put it.
    """
    _check_machine()
    libraries = called_libraries(torch.folder) if torch else []
    name = _digest(libraries)
    places = (_cache(environment), _fallback(environment))
    found = next((place / name for place in places if _own(place / name)), None)
    return found or _build(libraries, _writable(*places) / name, _compiler(environment))


def _check_machine() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise UsageError(
            f"the phantom GPU runs on 64-bit Linux, not on {sys.platform} {machine}: use a Linux machine"
        )


def _digest(libraries: list[Path]) -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*_sources(), Path(__file__)]:
        digest.update(path.read_bytes())
    for path in libraries:
        info = path.stat()
        digest.update(f"{path} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h", ".map"})


def _cache(environment: Mapping[str, str]) -> Path:
    return (
        Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchmem" / "phantom"
    )


def _fallback(environment: Mapping[str, str]) -> Path:
    return Path(
        environment.get("TMPDIR") or tempfile.gettempdir(), f"torchmem-phantom-{os.getuid()}"
    )


def _own(folder: Path) -> bool:
    """Whether the folder is there and nobody else can have put something into it: what is in it gets preloaded."""
    try:
        info = folder.stat()
    except OSError:
        return False
    return info.st_uid in (os.getuid(), 0) and not info.st_mode & stat.S_IWOTH


def _build(libraries: list[Path], folder: Path, compiler: list[str]) -> Path:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch, folder.name)
        fresh.mkdir(mode=0o755)
        _compile(libraries, fresh, compiler)
        try:
            fresh.rename(folder)
        except OSError:  # another process was faster
            if not _own(folder):
                raise
    return folder


def _writable(*folders: Path) -> Path:
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if _own(folder) and os.access(folder, os.W_OK):
            return folder
    raise UsageError(
        f"the phantom GPU's library needs a folder, and {folders[0]} cannot be written: set XDG_CACHE_HOME"
    )


def _compile(libraries: list[Path], folder: Path, compiler: list[str]) -> None:
    lacking = folder / "lacking.c"
    try:
        lacking.write_text(source(calls(libraries)))
    except (ElfError, OSError) as error:
        raise UsageError(f"cannot read the installed PyTorch: {error}; install it again") from error
    command = [*compiler, *FLAGS, f"-I{SOURCES}", *map(str, SOURCES.glob("*.c")), str(lacking)]
    command += [
        f"-Wl,--version-script={SOURCES / 'exports.map'}",
        "-o",
        str(folder / LIBRARY),
        "-ldl",
        "-lpthread",
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        reason = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            f"exit code {done.returncode}",
        )
        raise UsageError(
            f"{command[0]} cannot build the phantom GPU ({reason.strip()}): apt install gcc libc6-dev, or name another "
            "compiler in CC"
        )
    for name in STANDS_IN_FOR:
        (folder / name).symlink_to(LIBRARY)


def _compiler(environment: Mapping[str, str]) -> list[str]:
    named = shlex.split(environment.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0], path=environment.get("PATH")):
            return words
    missing = f"CC={named[0]} is no program" if named else "there is no C compiler"
    raise UsageError(
        f"{missing}: apt install gcc libc6-dev (or your system's package), or name one in CC"
    )
