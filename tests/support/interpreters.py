"""Interpreters that start only under conditions, as those of clusters and copied builds do."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

import torchmem

PYTHON = Path(sys.executable).resolve()
ROOTS = os.pathsep.join(str(Path(folder).parent) for folder in torchmem.__path__)
"""PYTHONPATH with which they find torchmem."""


def interpreter(folder: Path, check: str) -> Path:
    """Return an interpreter that is a shell script, with `check` before Python starts."""
    path = folder / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f'#!/bin/bash\n{check}\nexec -a "$0" {PYTHON} "$@"\n')
    path.chmod(0o755)
    # Python finds its standard library from its own path, which is that of the script.
    (folder / "pyvenv.cfg").write_text(f"home = {PYTHON.parent}\n")
    return path


def copied_build(folder: Path) -> tuple[Path, dict[str, str]]:
    """Copy Python's program and library; return the copy and the variables that it needs.

    The paths in them lead nowhere, and the library has another name than the one of this system.
    """
    name = str(sysconfig.get_config_var("INSTSONAME"))
    library = Path(sysconfig.get_config_var("LIBDIR"), name)
    if not name.startswith("libpython") or not library.is_file():
        pytest.skip(f"{PYTHON} has no shared library; Python's configure --enable-shared makes one")
    copies = {PYTHON: folder / "bin/python3", library: folder / f"lib/{name[:-1]}_"}
    for original, copy in copies.items():
        copy.parent.mkdir()
        content = original.read_bytes().replace(f"{name}\0".encode(), f"{name[:-1]}_\0".encode())
        nowhere = "/" + "_" * (len(sys.base_prefix) - 1)
        copy.write_bytes(content.replace(sys.base_prefix.encode(), nowhere.encode()))
        shutil.copymode(original, copy)
    variables = {"PYTHONHOME": sys.base_prefix, "LD_LIBRARY_PATH": str(folder / "lib")}
    return folder / "bin/python3", variables
