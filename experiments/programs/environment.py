"""An environment for each set of packages, made once by uv from PyPI."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-programs"


class InstallError(Exception):
    """The packages cannot be installed; the last line of uv says why."""


def environment(wanted: Sequence[str], wheel: Path) -> Path:
    """Return the folder of an environment with these packages, and torchmem from its wheel.

    Raises:
        InstallError: its packages cannot be installed.
    """
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    folder, done = FOLDER / digest, FOLDER / digest / ".installed"
    python = folder / "bin" / "python"
    if not done.exists():
        _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
        _uv("pip", "install", "--quiet", "--python", str(python), *wanted)
    _uv(
        *("pip", "install", "--quiet", "--python", str(python)),
        *("--reinstall-package", "torchmem", f"torchmem[exporter] @ {wheel.as_uri()}"),
    )
    done.touch()
    return folder


def built_wheel() -> Path:
    """Build torchmem's wheel and return its path."""
    folder = ROOT / "build" / "wheels"
    _uv("build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT))
    return max(folder.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def versions(folder: Path, packages: Sequence[str]) -> dict[str, str]:
    """Return the installed releases of packages."""
    names = [_name(each) for each in packages]
    code = "import sys, importlib.metadata as m\nfor n in sys.argv[1:]: print(m.version(n))"
    command = [str(folder / "bin" / "python"), "-c", code, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def _name(requirement: str) -> str:
    return re.split(r"[=<\[]", requirement, maxsplit=1)[0]


def _uv(*words: str) -> None:
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run(
        [str(uv), *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"UV_HTTP_TIMEOUT": "120"},
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise InstallError(" ".join(lines[-3:])[-400:])
