"""Builds the stub library at first use, with the system's C compiler, in the user's cache."""

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

from torchmem.phantom import cuda_calls
from torchmem.phantom.cuda_calls import ElfError, called_functions, stub_source, torch_libraries
from torchmem.phantom.torch_build import TorchBuild
from torchmem.sample.errors import UsageError

SOURCES = Path(__file__).resolve().parent / "c"
LIBRARY = "libphantom.so"
ALIASES = ("libcuda.so.1", "libnvidia-ml.so.1")
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra")


def library_folder(
    torch: TorchBuild | None = None, environment: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder of the library for a PyTorch build; builds it at first use, in seconds.

    torch: without it, the library has no stubs for calls that the phantom GPU lacks. environment:
    XDG_CACHE_HOME, TMPDIR, PATH and CC are used.

    Raises:
        UsageError: the machine is not supported, there is no compiler, the build fails, or no
            folder can be written.
    """
    _check_machine()
    libraries = torch_libraries(torch.folder) if torch else []
    name = _digest(libraries)
    places = [place for place in _places(environment) if _is_trusted(place)]
    built = next((place / name for place in places if _is_trusted(place / name)), None)
    if built is not None:
        return built
    compiler = _compiler(environment)
    return _build(libraries, compiler, _writable(environment) / name)


def _check_machine() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise UsageError(
            f"the phantom GPU runs on 64-bit Linux, not on {sys.platform} {machine}: use a Linux "
            "machine."
        )


def _digest(libraries: list[Path]) -> str:
    """Return a hash of everything that the library is built from."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*_sources(), Path(__file__), Path(cuda_calls.__file__)]:
        digest.update(path.read_bytes())
    for path in libraries:
        info = path.stat()
        digest.update(f"{path} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h", ".map"})


def _places(environment: Mapping[str, str]) -> tuple[Path, Path]:
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    temporary = environment.get("TMPDIR") or tempfile.gettempdir()
    return cache / "torchmem" / "phantom", Path(temporary, f"torchmem-phantom-{os.getuid()}")


def _is_trusted(folder: Path) -> bool:
    """Return whether only this user or root can change the folder, whose library is preloaded.

    It must not be a link, and its parent must not let other users replace it.
    """
    try:
        info, parent = folder.lstat(), folder.parent.stat()
    except OSError:
        return False
    is_private = not info.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    is_replaceable = parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX
    is_own = info.st_uid in (os.getuid(), 0)
    return stat.S_ISDIR(info.st_mode) and is_own and is_private and not is_replaceable


def _writable(environment: Mapping[str, str]) -> Path:
    places = _places(environment)
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if _is_trusted(place) and os.access(place, os.W_OK):
            return place
    raise UsageError(
        f"cannot use {places[0]} or {places[1]} for the phantom GPU's library: set XDG_CACHE_HOME "
        "to a folder that only you can write to."
    )


def _build(libraries: list[Path], compiler: list[str], folder: Path) -> Path:
    """Build under another name first, so that no other process sees half of it."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch, folder.name)
        fresh.mkdir(mode=0o755)
        _compile(libraries, compiler, fresh)
        try:
            fresh.rename(folder)
        except OSError:  # another process was faster
            if not _is_trusted(folder):
                raise
    return folder


def _compile(libraries: list[Path], compiler: list[str], folder: Path) -> None:
    stubs = folder / "lacking.c"
    try:
        stubs.write_text(stub_source(called_functions(libraries)))
    except (ElfError, OSError) as error:
        raise UsageError(f"cannot read the installed PyTorch: {error}; reinstall it.") from error
    sources = [*map(str, SOURCES.glob("*.c")), str(stubs)]
    exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
    output = ["-o", str(folder / LIBRARY), "-ldl", "-lm", "-lpthread"]
    command = [*compiler, *FLAGS, f"-I{SOURCES}", *sources, exports, *output]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        errors = (line for line in done.stderr.splitlines() if "error" in line)
        reason = next(errors, f"exit code {done.returncode}")
        raise UsageError(
            f"{command[0]} cannot build the phantom GPU ({reason.strip()}): apt install gcc "
            "libc6-dev, or set CC to another compiler."
        )
    for name in ALIASES:
        (folder / name).symlink_to(LIBRARY)


def _compiler(environment: Mapping[str, str]) -> list[str]:
    named = shlex.split(environment.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0], path=environment.get("PATH")):
            return words
    problem = f"CC={named[0]} is not a program" if named else "there is no C compiler"
    raise UsageError(
        f"{problem}: apt install gcc libc6-dev (or your system's package), or set CC to a compiler."
    )
