"""What kustomize builds from a folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = next(
    (c for c in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(c[0])), None
)


def built(folder: Path) -> str:
    """Return the output of kustomize for a folder."""
    if PROGRAM is None:
        pytest.skip("needs kustomize or kubectl on PATH")
    return subprocess.run(
        [*PROGRAM, str(folder)], capture_output=True, text=True, check=True
    ).stdout
