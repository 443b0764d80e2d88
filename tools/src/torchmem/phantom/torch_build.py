"""Which build of PyTorch a command will run, found without importing it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmem.sample.errors import UsageError

NEEDED = (2, 4)
INSTALL = "-m pip install 'torch===2.13.0'"  # three = signs, or pip may pick the CPU build
_PYTHON = re.compile(r"python[\d.]*t?")
# torch/version.py is plain assignments (2.4 to 2.15); reading it loads nothing else.
_PROBE = """
import importlib.util, json, os, runpy
spec = importlib.util.find_spec("torch")
folder = spec and (spec.submodule_search_locations or [None])[0]
path = os.path.join(folder, "version.py") if folder else ""
found = runpy.run_path(path) if os.path.exists(path) else {}
print(json.dumps([found.get("__version__"), found.get("cuda"), folder]))
"""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed PyTorch. version: such as "2.13.0+cu130". cuda: "13.0", None without. folder: of the package."""

    version: str
    cuda: str | None
    folder: Path


def interpreter(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The Python that a command runs: itself, or the one named in its first line (torchrun); None for others."""
    path = shutil.which(command[0], path=environment.get("PATH")) if command else None
    if path is None or _PYTHON.fullmatch(Path(path).name):
        return path
    with Path(path).open("rb") as file:
        first, second = (file.readline(4096).decode("utf-8", "replace") for _ in range(2))
    return _named(first, second, environment)


def _named(first: str, second: str, environment: Mapping[str, str]) -> str | None:
    """From `#!/path/python`, `#!/usr/bin/env python3`, or pip's form for long paths, whose second line execs it."""
    line, mark = (second, "'''exec' ") if first.strip() == "#!/bin/sh" else (first, "#!")
    if not line.startswith(mark):
        return None
    line = line[len(mark) :]
    try:
        words = [word for word in shlex.split(line) if Path(word).name not in ("env", "-S")]
    except ValueError:
        return None
    python = shutil.which(words[0], path=environment.get("PATH")) if words else None
    return python if python and _PYTHON.fullmatch(Path(python).name) else None


def torch_of(python: str, environment: Mapping[str, str]) -> TorchBuild | None:
    """The PyTorch of an interpreter; None where it has none.

    Raises:
        UsageError: the interpreter does not answer within a minute.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        version, cuda, folder = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = [
            type(error).__name__,
            *str(getattr(error, "stderr", None) or "").strip().splitlines(),
        ][-1]
        raise UsageError(
            f"cannot ask {python} for its PyTorch ({said}): check that it runs"
        ) from error
    return TorchBuild(str(version), cuda, Path(folder)) if version and folder else None


def usable(build: TorchBuild | None, python: str) -> TorchBuild:
    """The build, when it is one that runs on the phantom GPU: CUDA 12 or 13, PyTorch 2.4 or newer.

    Raises:
        UsageError: it is none; the text says which command installs one.
    """
    lacking = _lacking(build)
    if build is None or lacking:
        raise UsageError(
            f"{python} has {lacking}: install the CUDA build with {shlex.quote(python)} {INSTALL}"
        )
    return build


def _lacking(build: TorchBuild | None) -> str:
    """What stands against the build; empty for nothing."""
    if build is None:
        return "no PyTorch"
    if build.cuda is None:
        return f"PyTorch {build.version}, a build without CUDA"
    if build.cuda.split(".")[0] not in ("12", "13"):
        return f"PyTorch {build.version} for CUDA {build.cuda}, and the phantom GPU speaks CUDA 12 and 13"
    number = re.match(r"(\d+)\.(\d+)", build.version)
    old = number and (int(number[1]), int(number[2])) < NEEDED
    return f"PyTorch {build.version}, and the phantom GPU needs 2.4 or newer" if old else ""


def cuda_build(command: Sequence[str], environment: Mapping[str, str]) -> TorchBuild:
    """The PyTorch that a command will use; for a command that is no Python, the one of the `python` on PATH.

    Raises:
        UsageError: there is no Python, or its PyTorch cannot run on the phantom GPU; the text says what to install.
    """
    if not command or not shutil.which(command[0], path=environment.get("PATH")):
        raise UsageError(
            f"cannot run {command[0]!r}: name a program"
            if command
            else "no command: name one after --"
        )
    python = interpreter(command, environment) or _on_path(environment)
    if python is None:
        raise UsageError(
            "no python on PATH: name the interpreter, as in -- /path/to/python train.py"
        )
    return usable(torch_of(python, environment), python)


def _on_path(environment: Mapping[str, str]) -> str | None:
    path = environment.get("PATH")
    return shutil.which("python", path=path) or shutil.which("python3", path=path)
