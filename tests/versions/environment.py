"""A virtual environment with one PyTorch and torchmem, without NVIDIA's libraries."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from versions.stand_ins import write_stand_ins

ROOT = Path(__file__).resolve().parents[2]
# What the stand-ins replace, and Triton, which is only for torch.compile.
_LEFT_OUT = re.compile("nvidia|cuda|triton")
_REQUIREMENTS = """
import importlib.metadata as metadata
print(*(line for line in metadata.requires("torch") if "extra ==" not in line), sep="\\n")
"""
_FOLDER = "import sysconfig; print(sysconfig.get_path('purelib'))"


class InstallError(Exception):
    """A command that failed; the message is the last line that it printed."""


def built_wheel(python: str, folder: Path) -> Path:
    """Build torchmem's wheel in a folder and return its path."""
    output(python, *_PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("torchmem-*.whl")
    return wheel


def installed(python: str, torch: str, wheel: Path, folder: Path) -> str:
    """Install PyTorch and a wheel of torchmem in a new environment; return its interpreter.

    torch: version of the CUDA build, such as 2.13.0.

    Raises:
        InstallError: something could not be installed.
    """
    output(python, "-m", "venv", str(folder))
    new = str(folder / "bin" / "python")
    # With ==, pip may choose a CPU build that it finds locally.
    output(new, *_INSTALL, "--no-deps", f"torch==={torch}")
    lines = output(new, "-c", _REQUIREMENTS).splitlines()
    requirements = [line for line in lines if not _LEFT_OUT.match(line)]
    output(new, *_INSTALL, *requirements, f"{wheel}[exporter]")
    write_stand_ins(Path(output(new, "-c", _FOLDER).strip(), "torch", "lib"))
    return new


def pip_versions(python: str, package: str) -> list[str]:
    """Return the versions of a package that pip finds for this Python, newest first.

    Raises:
        InstallError: there is no pip, or it finds none.
    """
    text = output(python, *_PIP, "index", "versions", package)
    lines: list[str] = re.findall("^Available versions: (.+)$", text, re.MULTILINE)
    return lines[0].split(", ") if lines else []


_PIP: Sequence[str] = ("-m", "pip", "--no-cache-dir")
_INSTALL: Sequence[str] = (*_PIP, "install", "--no-compile")


def output(*command: str) -> str:
    """Return what a command prints on stdout.

    Raises:
        InstallError: it failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr or error.stdout).strip().splitlines()
        raise InstallError(lines[-1] if lines else f"exit code {error.returncode}") from error
    return done.stdout
