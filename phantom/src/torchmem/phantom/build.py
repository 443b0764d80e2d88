"""Builds the stub libraries at first use, with the system's C compiler, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torchmem.core.errors import UsageError
from torchmem.phantom.elf import ElfError
from torchmem.phantom.lacking import called_libraries, calls, source
from torchmem.phantom.torch_build import TorchBuild

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "c"
LIBRARY = "libphantom.so"
STANDS_IN_FOR = ("libcuda.so.1", "libnvidia-ml.so.1")
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra")


def library_folder(torch: TorchBuild | None = None, environment: Mapping[str, str] = os.environ) -> Path:
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
        raise UsageError(f"the phantom GPU runs on 64-bit Linux, not on {sys.platform} {machine}: use a Linux machine")


def _digest(libraries: list[Path]) -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*_sources(), HERE / "lacking.py", HERE / "elf.py"]:
        digest.update(path.read_bytes())
    for path in libraries:
        info = path.stat()
        digest.update(f"{path} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h", ".map"})


def _cache(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchmem" / "phantom"


def _fallback(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("TMPDIR") or tempfile.gettempdir(), f"torchmem-phantom-{os.getuid()}")


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
    command += [f"-Wl,--version-script={SOURCES / 'exports.map'}", "-o", str(folder / LIBRARY), "-ldl", "-lpthread"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
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
    raise UsageError(f"{missing}: apt install gcc libc6-dev (or your system's package), or name one in CC")
