"""The fake libnvidia-ml.so.1 of tests/fake_nvml: built with the system's compiler, and a node that it plays."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from string import Template

SOURCES = Path(__file__).resolve().parents[1] / "fake_nvml"
NODES = SOURCES / "nodes"
LIBRARY = "libnvidia-ml.so.1"
NO_PID = 1 << 22  # PID_MAX_LIMIT of Linux: no process has this number or a greater one


def library(missing: Collection[str] = ()) -> Path:
    """The folder with the library without the functions `missing`; compiled when there is none of these sources yet."""
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
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler for the fake NVML: install gcc, or name another one in CC"
    exports = folder / "exports.map"
    hidden = "".join(f"{name};" for name in sorted(missing))
    exports.write_text(f"{{ global: nvml*; local: {hidden} *; }};")
    command = [
        compiler,
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
    assert ended.returncode == 0, f"{compiler} could not build the fake NVML:\n{ended.stderr}"


class FakeNode:
    """A node whose state can change under a running exporter. `pid` stands where the file says $PID."""

    def __init__(self, folder: Path, name: str, pid: int = NO_PID) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log = folder / "nvml.txt", folder / "nvml.log"
        self.log.touch()
        self._pid = pid
        self.become(name)

    def become(self, name: str) -> None:
        """Take over another of the nodes; functions that the library lacks stay as they were at the start."""
        self.write(Template((NODES / f"{name}.txt").read_text()).substitute(PID=self._pid))

    def change(self, section: str, **values: object) -> None:
        """Set keys of a section, "node" for the node as a whole; the last line of a key counts."""
        self.write(
            f"{self.text}\n[{section}]\n"
            + "".join(f"{key} = {value}\n" for key, value in values.items())
        )

    def remove(self, section: str) -> None:
        """Leave a section out."""
        self.write(
            re.sub(
                rf"^\[{re.escape(section)}\]\n(?:(?!\[).*\n?)*", "", self.text, flags=re.MULTILINE
            )
        )

    @property
    def text(self) -> str:
        """The state now."""
        return self.file.read_text()

    def write(self, text: str) -> None:
        """Replace the whole state at once: the library reads a file again that is another one."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.file)

    def library(self) -> Path:
        """The folder with the library of this node's driver."""
        missing = re.search(r"^missing = (.*)$", self.text, re.MULTILINE)
        return library(missing[1].split() if missing else ())

    def environment(self) -> dict[str, str]:
        """The environment in which nvidia-ml-py finds this node, and every call is logged."""
        paths = ":".join(filter(None, [str(self.library()), os.environ.get("LD_LIBRARY_PATH")]))
        names = {
            "LD_LIBRARY_PATH": paths,
            "FAKE_NVML_STATE": str(self.file),
            "FAKE_NVML_LOG": str(self.log),
        }
        return {**os.environ, **names}

    def calls(self, function: str) -> int:
        """How often the function was called until now."""
        return self.log.read_text().count(f"{function}\n")
