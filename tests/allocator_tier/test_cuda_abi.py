"""The phantom's declarations equal NVIDIA's headers, if the installed PyTorch has them (Triton)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from torchmem.phantom.build import SOURCES

pytestmark = pytest.mark.allocator
DECLARATIONS = (SOURCES / "cuda_abi.h").read_text()


@pytest.fixture(scope="module")
def headers() -> Path:
    """Return the folder with cuda.h and cuda_runtime_api.h."""
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/include" if spec and spec.origin else None
    if folder is None or not (folder / "cuda_runtime_api.h").exists():
        pytest.skip("this PyTorch has no CUDA headers; install a CUDA build with Triton")
    return folder


def evaluated(tmp_path: Path, include: str, folder: Path, expressions: list[str]) -> list[int]:
    """Return the values of C expressions, with this header."""
    rows = "".join(f'    printf("%lld\\n", (long long)({text}));\n' for text in expressions)
    source = tmp_path / "ask.c"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n{include}\nint main(void)\n{{\n{rows}}}\n"
    )
    subprocess.run(["cc", f"-I{folder}", "-o", tmp_path / "ask", source], check=True)
    output = subprocess.run([tmp_path / "ask"], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in output.splitlines()]


def differences(
    tmp_path: Path, headers: Path, ours: list[str], theirs: list[str]
) -> list[tuple[str, int, int]]:
    """Return the phantom's expressions whose values differ from NVIDIA's, with both values."""
    values = evaluated(tmp_path, '#include "cuda_abi.h"', SOURCES, ours)
    expected = evaluated(
        tmp_path, "#include <cuda.h>\n#include <cuda_runtime_api.h>", headers, theirs
    )
    rows = zip(ours, values, expected, strict=True)
    return [row for row in rows if row[1] != row[2]]


def test_every_constant_has_nvidias_value(tmp_path: Path, headers: Path) -> None:
    """All constants with NVIDIA's names are equal, except those newer than the headers."""
    known = "".join((headers / name).read_text() for name in ("cuda.h", "driver_types.h"))
    names = re.findall(r"\b((?:cuda[A-Z]\w+|CUDA_\w+|CU_\w+)) = -?\d+", DECLARATIONS)
    names = [name for name in names if name in known]
    theirs = ["cudaInvalidDeviceId" if name == "cudaInvalidDevice" else name for name in names]

    assert [] == differences(tmp_path, headers, names, theirs)
    assert len(names) > 80


def fields(struct: str) -> list[str]:
    """Return the names of the fields of a struct, or of the macro with its fields."""
    body = re.search(
        rf"(?:struct|#define) {struct}\b[^\n]*\n(.*?)(?:^\}};|^#define)",
        DECLARATIONS,
        re.DOTALL | re.MULTILINE,
    )
    assert body
    lines = re.sub(r"/\*.*?\*/|\\|ONLY_12\([^)]*\)", "", body[1], flags=re.DOTALL)
    return [
        name
        for line in lines.split(";")
        for name in re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", line.strip())
    ]


def test_structures_have_nvidias_layout(tmp_path: Path, headers: Path) -> None:
    """The offsets of all fields that are written and the sizes of all copied structs are equal."""
    (version,) = evaluated(tmp_path, "#include <cuda_runtime_api.h>", headers, ["CUDART_VERSION"])
    ours = f"struct cudaDeviceProp{12 if version < 13000 else 13}"
    whole = [
        ("cudaFuncAttributes", "cudaFuncAttributes"),
        (ours.removeprefix("struct "), "cudaDeviceProp"),
    ]
    parts = [
        (ours, "struct cudaDeviceProp", name)
        for name in fields("DEVICE_PROPERTIES")
        if name not in OURS
    ]
    for struct in ("cudaPointerAttributes", "cudaFuncAttributes"):
        parts += [
            (f"struct {struct}", f"struct {struct}", name)
            for name in fields(struct)
            if name not in OURS
        ]
    parts += [
        ("CUmemAllocationProp", "CUmemAllocationProp", name)
        for name in ("requestedHandleTypes", "location")
    ]
    mine = [f"sizeof(struct {name})" for name, _ in whole] + [
        f"offsetof({name}, {field})" for name, _, field in parts
    ]
    real = [f"sizeof(struct {name})" for _, name in whole] + [
        f"offsetof({name}, {field})" for _, name, field in parts
    ]

    assert [] == differences(tmp_path, headers, mine, real)
    assert len(parts) > 70


OURS = {"textureAndSurfaceSizes", "newerAndReserved", "cluster", "x", "y", "z"}
"""The phantom's own names, for groups of fields that are never read."""
