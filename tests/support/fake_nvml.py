"""The fake libnvidia-ml.so.1 of tests/fake_nvml, compiled when needed, and the node it plays."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

import pynvml
from support.needs import compiler

from torchmem.exporter.driver import PyNvml
from torchmem.exporter.nvml import NvmlLibrary

SOURCES = Path(__file__).resolve().parents[1] / "fake_nvml"
NODES = SOURCES / "nodes"
LIBRARY = "libnvidia-ml.so.1"
NO_PID = 1 << 22  # PID_MAX_LIMIT of Linux: no process has this number or a greater one


def library(missing: Collection[str] = ()) -> Path:
    """Return the folder of the library without the functions `missing`; compile it if necessary."""
    inputs = sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])
    digest = hashlib.sha256(
        b"".join(file.read_bytes() for file in inputs) + repr(sorted(missing)).encode()
    )
    folder = SOURCES / "build" / digest.hexdigest()[:12]
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fresh = Path(scratch, "fresh")
            fresh.mkdir()
            _compile(fresh, missing)
            try:
                fresh.rename(folder)
            except OSError:  # another test process was faster
                if not folder.exists():
                    raise
    return folder


def _compile(folder: Path, missing: Collection[str]) -> None:
    exports = folder / "exports.map"
    hidden = "".join(f"{name};" for name in sorted(missing))
    exports.write_text(f"{{ global: nvml*; local: {hidden} *; }};")
    command = [
        compiler(),
        "-std=gnu11",
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-Wl,-soname,{LIBRARY}",
    ]
    command += [str(source) for source in sorted(SOURCES.glob("*.c"))]
    command += [f"-Wl,--version-script={exports}", "-o", str(folder / LIBRARY), "-lpthread"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command[0]} could not build the fake NVML:\n{ended.stderr}"


def binding(folder: Path) -> ModuleType:
    """Return a copy of the module pynvml that uses the library of that folder."""
    name = f"pynvml_{folder.name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, pynvml.__file__)
        assert spec
        assert spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.nvmlLib = ctypes.CDLL(str(folder / LIBRARY))  # type: ignore[attr-defined]
    return sys.modules[name]


class FakeNode:
    """A node whose state can change under a running exporter. `pid` replaces $PID in the file.

    Text that is not UTF-8 is given with Python's surrogate escapes.
    """

    def __init__(self, folder: Path, name: str, pid: int = NO_PID) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log = folder / "nvml.txt", folder / "nvml.log"
        self.log.touch()
        self._pid = pid
        self.become(name)

    def become(self, name: str) -> None:
        """Become another node; the functions that the library lacks stay the same."""
        self.write(Template((NODES / f"{name}.txt").read_text()).substitute(PID=self._pid))

    def change(self, section: str, **values: object) -> None:
        """Set keys of a section, "node" for the node as a whole."""
        self.write(
            f"{self.text}\n[{section}]\n"
            + "".join(f"{key} = {value}\n" for key, value in values.items())
        )

    def remove(self, section: str) -> None:
        """Remove a section."""
        self.write(
            re.sub(
                rf"^\[{re.escape(section)}\]\n(?:(?!\[).*\n?)*", "", self.text, flags=re.MULTILINE
            )
        )

    @property
    def text(self) -> str:
        """The current state."""
        return self.file.read_text(errors="surrogateescape")

    def write(self, text: str) -> None:
        """Replace the whole state at once; the library notices that the file is a new one."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text, errors="surrogateescape")
        fresh.replace(self.file)

    def library(self) -> Path:
        """Return the folder of this node's library."""
        missing = re.search(r"^missing = (.*)$", self.text, re.MULTILINE)
        return library(missing[1].split() if missing else ())

    def environment(self) -> dict[str, str]:
        """Return the environment in which nvidia-ml-py finds this node and calls are logged."""
        paths = ":".join(filter(None, [str(self.library()), os.environ.get("LD_LIBRARY_PATH")]))
        names = {
            "LD_LIBRARY_PATH": paths,
            "FAKE_NVML_STATE": str(self.file),
            "FAKE_NVML_LOG": str(self.log),
        }
        return {**os.environ, **names}

    def nvml(self, **settings: Any) -> PyNvml:
        """Return the exporter's NVML on this node, in this process; `settings` for NvmlLibrary."""
        state = {"FAKE_NVML_STATE": str(self.file), "FAKE_NVML_LOG": str(self.log)}
        os.environ.update(state)
        return PyNvml(NvmlLibrary(binding(self.library()), **settings))

    def calls(self, function: str) -> int:
        """Return how often the function was called."""
        return self.log.read_text().count(f"{function}\n")
