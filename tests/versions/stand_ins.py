"""Empty libraries in place of NVIDIA's, so that an environment takes 1 GB and not 5.

PyTorch's wheel for CUDA needs the libraries of a dozen packages to be loaded. On the phantom GPU
nothing of them runs, so a file of each name with the right symbols is enough.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NVIDIA = r"(?:__)?(?:cu|nccl|nv)[A-Za-z_]\w*"
_NEEDED = re.compile(r"NEEDED +(lib(?:cu|nccl|nv)\S+)")
_VERSION = re.compile(r"required from (\S+):\n +\S+ \S+ \S+ (\S+)")
# libcuda.so.1 is the driver's, which the phantom GPU has itself.
DRIVER = "libcuda.so.1"


def write_stand_ins(folder: Path) -> None:
    """Write a library for each one of NVIDIA's that the libraries in `folder` need.

    folder: `lib` of the installed torch, where its libraries look for others.
    """
    libraries = sorted(folder.glob("*.so"))
    headers = "".join(_printed("objdump", "-p", library) for library in libraries)
    versions = dict(_VERSION.findall(headers))
    source = folder / "stand_in.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in _calls(libraries)))
    code = source.with_suffix(".o")
    _printed("cc", "-c", "-fPIC", "-w", source, "-o", code)
    for name in sorted({*_NEEDED.findall(headers)} - {DRIVER}):
        _link(code, folder / name, versions.get(name))


def _calls(libraries: list[Path]) -> list[str]:
    """Return NVIDIA's functions that the libraries call, and do not define themselves."""
    symbols = [
        re.findall(rf" (\w) ({NVIDIA})(?:@\S+)?$", _printed("nm", "-D", library), re.MULTILINE)
        for library in libraries
    ]
    rows = {row for rows in symbols for row in rows}
    undefined = {name for kind, name in rows if kind in "Uw"}
    return sorted(undefined - {name for kind, name in rows if kind not in "Uw"})


def _link(code: Path, library: Path, version: str | None) -> None:
    """Link a library, whose symbols have a version if PyTorch expects one."""
    script = code.with_suffix(".map")
    script.write_text(f"{version or ''} {{ global: *; }};")
    flags = ["-shared", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}"]
    _printed("cc", *flags, code, "-o", library)


def _printed(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
