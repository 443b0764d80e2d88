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
    tmp_path: Path, headers: Path, own: list[str], nvidia: list[str]
) -> list[tuple[str, int, int]]:
    """Return the phantom's expressions whose values differ from NVIDIA's, with both values."""
    values = evaluated(tmp_path, '#include "cuda_abi.h"', SOURCES, own)
    expected = evaluated(
        tmp_path, "#include <cuda.h>\n#include <cuda_runtime_api.h>", headers, nvidia
    )
    rows = zip(own, values, expected, strict=True)
    return [row for row in rows if row[1] != row[2]]


def test_every_constant_has_nvidias_value(tmp_path: Path, headers: Path) -> None:
    """All constants with NVIDIA's names are equal, except those newer than the headers."""
    known = "".join((headers / name).read_text() for name in ("cuda.h", "driver_types.h"))
    names = re.findall(r"\b((?:cuda[A-Z]\w+|CUDA_\w+|CU_\w+)) = -?\d+", DECLARATIONS)
    names = [name for name in names if name in known]
    nvidia = ["cudaInvalidDeviceId" if name == "cudaInvalidDevice" else name for name in names]

    assert differences(tmp_path, headers, names, nvidia) == []
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
    properties = f"cudaDeviceProp{12 if version < 13000 else 13}"
    structs = [("cudaFuncAttributes", "cudaFuncAttributes"), (properties, "cudaDeviceProp")]
    offsets = [
        *offset_pairs(f"struct {properties}", "struct cudaDeviceProp", fields("DEVICE_PROPERTIES")),
        *offset_pairs(ALLOCATION, ALLOCATION, ["requestedHandleTypes", "location"]),
    ]
    for struct in ("struct cudaPointerAttributes", "struct cudaFuncAttributes"):
        offsets += offset_pairs(struct, struct, fields(struct.removeprefix("struct ")))
    pairs = [(f"sizeof(struct {own})", f"sizeof(struct {real})") for own, real in structs] + offsets

    assert (
        differences(tmp_path, headers, [own for own, _ in pairs], [real for _, real in pairs]) == []
    )
    assert len(offsets) > 70


def offset_pairs(own: str, nvidia: str, names: list[str]) -> list[tuple[str, str]]:
    """Return the offsets of fields in the phantom's struct and in NVIDIA's, as C expressions."""
    return [
        (f"offsetof({own}, {name})", f"offsetof({nvidia}, {name})")
        for name in names
        if name not in OWN_NAMES
    ]


ALLOCATION = "CUmemAllocationProp"
OWN_NAMES = {"textureAndSurfaceSizes", "newerAndReserved", "cluster", "x", "y", "z"}
"""The phantom's own names, for groups of fields that are never read."""
