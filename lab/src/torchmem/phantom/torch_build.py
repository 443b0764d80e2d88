"""The PyTorch that a command uses, found without importing it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmem.sample.errors import UsageError, program_advice

BUILT_FOR = "PHANTOM_TORCH"
"""The variable with the folder of the PyTorch that the library in use was built for."""
MIN_VERSION = (2, 4)
INSTALL = "-m pip install 'torch===2.13.0'"  # with ==, pip may choose the CPU build
_PYTHON = re.compile(r"python[\d.]*t?")
# torch/version.py contains only assignments (2.4 to 2.15), so running it loads nothing else.
_PROBE = """
import importlib.util, json, os, runpy
spec = importlib.util.find_spec("torch")
folder = spec and (spec.submodule_search_locations or [None])[0]
path = os.path.join(folder, "version.py") if folder else ""
version = runpy.run_path(path) if os.path.exists(path) else {}
print(json.dumps([version.get("__version__"), version.get("cuda"), folder]))
"""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed PyTorch.

    version: such as "2.13.0+cu130". cuda: such as "13.0", or None. folder: of the package.
    """

    version: str
    cuda: str | None
    folder: Path


def cuda_build(command: Sequence[str], environment: Mapping[str, str]) -> TorchBuild | None:
    """Return the PyTorch that a command uses.

    For programs that are not Python, or Python scripts without PyTorch, such as `conda run`, it is
    `likely_build`.

    Raises:
        UsageError: there is no such program, or its PyTorch cannot run on a phantom GPU.
    """
    if not command or not shutil.which(command[0], path=environment.get("PATH")):
        raise missing_program(command)
    python = script_interpreter(command, environment)
    build = find_torch(python, environment) if python else None
    if python is None or (build is None and not _is_python(command[0])):
        return likely_build(environment)
    return checked_build(build, python)


def likely_build(environment: Mapping[str, str]) -> TorchBuild | None:
    """Return the PyTorch of the `python` on PATH, which a shell or another wrapper may start.

    None if it cannot run on a phantom GPU. A wrapper's Python with another PyTorch restarts itself.
    """
    python = _python_on_path(environment)
    if python is None:
        return None
    try:
        return checked_build(find_torch(python, environment), python)
    except UsageError:
        return None


def script_interpreter(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the Python that runs a command: itself, or the one in its first line (torchrun)."""
    path = shutil.which(command[0], path=environment.get("PATH")) if command else None
    if path is None or _is_python(path):
        return path
    with Path(path).open("rb") as file:
        first, second = (file.readline(4096).decode("utf-8", "replace") for _ in range(2))
    return _shebang_interpreter(first, second, environment)


def find_torch(python: str, environment: Mapping[str, str]) -> TorchBuild | None:
    """Return the PyTorch of an interpreter, or None if it has none.

    Raises:
        UsageError: the interpreter does not answer within a minute.
    """
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE],
            # Without it, that Python does not restart itself (startup/sitecustomize.py).
            env={name: value for name, value in environment.items() if name != BUILT_FOR},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        version, cuda, folder = json.loads(probe.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        stderr = str(getattr(error, "stderr", None) or "").strip().splitlines()
        reason = stderr[-1] if stderr else type(error).__name__
        raise UsageError(
            f"cannot find out which PyTorch {python} has ({reason}): check that it runs."
        ) from error
    return TorchBuild(str(version), cuda, Path(folder)) if version and folder else None


def checked_build(build: TorchBuild | None, python: str) -> TorchBuild:
    """Return the build if it can run on a phantom GPU: CUDA 12 or 13, PyTorch 2.4 or newer.

    Raises:
        UsageError: it cannot; the message has the command that installs one.
    """
    problem = _problem(build)
    if build is None or problem:
        raise UsageError(
            f"{python} has {problem}: install the CUDA build with {shlex.quote(python)} {INSTALL}"
        )
    return build


def missing_program(command: Sequence[str]) -> UsageError:
    """Return the error for a command that is empty or whose program does not exist."""
    if command:
        return UsageError(f"cannot run {command[0]!r}: {program_advice(command[0])}")
    return UsageError("no command: add one after --.")


def _shebang_interpreter(first: str, second: str, environment: Mapping[str, str]) -> str | None:
    """Return the Python of a script's first two lines, or None.

    The forms are `#!/path/python`, `#!/usr/bin/env python3`, and pip's form for long paths, a shell
    script whose second line runs the interpreter with exec.
    """
    line, mark = (second, "'''exec' ") if first.strip() == "#!/bin/sh" else (first, "#!")
    if not line.startswith(mark):
        return None
    try:
        words = shlex.split(line[len(mark) :])
    except ValueError:
        return None
    words = [word for word in words if Path(word).name not in ("env", "-S")]
    python = shutil.which(words[0], path=environment.get("PATH")) if words else None
    return python if python and _is_python(python) else None


def _problem(build: TorchBuild | None) -> str:
    """Return why the build cannot run on a phantom GPU, or an empty string."""
    if build is None:
        return "no PyTorch"
    if build.cuda is None:
        return f"PyTorch {build.version}, a build without CUDA"
    if build.cuda.split(".")[0] not in ("12", "13"):
        return (
            f"PyTorch {build.version} for CUDA {build.cuda}, but the phantom GPU supports CUDA 12 "
            "and 13"
        )
    number = re.match(r"(\d+)\.(\d+)", build.version)
    is_old = number and (int(number[1]), int(number[2])) < MIN_VERSION
    return f"PyTorch {build.version}, but the phantom GPU needs 2.4 or newer" if is_old else ""


def _is_python(program: str) -> bool:
    return bool(_PYTHON.fullmatch(Path(program).name))


def _python_on_path(environment: Mapping[str, str]) -> str | None:
    path = environment.get("PATH")
    return shutil.which("python", path=path) or shutil.which("python3", path=path)
