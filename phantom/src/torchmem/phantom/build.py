"""Builds the stub driver at first use, with the system's C compiler, into the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from torchmem.core.errors import UsageError

SOURCES = Path(__file__).resolve().parent / "c"
LIBRARY = "libphantom.so"
STANDS_IN_FOR = ("libcuda.so.1", "libnvidia-ml.so.1")


def library_folder() -> Path:
    """The folder with the library built from these sources; builds it at first use.

    Raises:
        UsageError: there is no compiler, or it cannot build the library.
    """
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h", ".map"})
    inputs = [*sources, _cuda_headers() / "cuda.h"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in inputs)).hexdigest()[:12]
    folder = _cache() / digest
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch, digest)
        fresh.mkdir()
        _compile(sources, fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchmem" / "phantom"


def _compile(sources: list[Path], folder: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler or not shutil.which(compiler):
        raise UsageError("no C compiler: install gcc, or name another one in CC")
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-isystem", str(_cuda_headers())]
    command += [str(source) for source in sources if source.suffix == ".c"]
    command += [f"-Wl,--version-script={SOURCES / 'exports.map'}", "-o", str(folder / LIBRARY), "-ldl", "-lpthread"]
    result = subprocess.run(command, check=False)
    if result.returncode:
        raise UsageError(f"{compiler} could not build the phantom GPU: its messages are above")
    for name in STANDS_IN_FOR:
        (folder / name).symlink_to(LIBRARY)


def _cuda_headers() -> Path:
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/include" if spec and spec.origin else None
    if folder is None or not (folder / "cuda_runtime_api.h").exists():
        raise UsageError(
            "no CUDA headers: run this with a Python that has the CUDA build of torch (pip install 'torch===2.13.0')"
        )
    return folder
