"""The phantom's own declarations of CUDA against NVIDIA's headers, where the installed PyTorch brings them (Triton)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchmem.phantom.build import SOURCES

pytestmark = pytest.mark.allocator
DECLARATIONS = (SOURCES / "cuda_abi.h").read_text()


@pytest.fixture(scope="module")
def headers() -> Path:
    """The folder with cuda.h and cuda_runtime_api.h."""
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/include" if spec and spec.origin else None
    if folder is None or not (folder / "cuda_runtime_api.h").exists():
        pytest.skip("this PyTorch brings no CUDA headers; install a CUDA build with Triton")
    return folder


def printed(tmp_path: Path, include: str, folder: Path, expressions: list[str]) -> list[int]:
    """What a C program with this header says the expressions are."""
    rows = "".join(f'    printf("%lld\\n", (long long)({text}));\n' for text in expressions)
    source = tmp_path / "ask.c"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n{include}\nint main(void)\n{{\n{rows}}}\n"
    )
    subprocess.run(["cc", f"-I{folder}", "-o", tmp_path / "ask", source], check=True)
    shown = subprocess.run([tmp_path / "ask"], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in shown.splitlines()]


def ours_and_theirs(
    tmp_path: Path, headers: Path, ours: list[str], theirs: list[str]
) -> Iterator[tuple[str, int, int]]:
    """Each of our expressions with its value and with that of NVIDIA's expression beside it."""
    mine = printed(tmp_path, '#include "cuda_abi.h"', SOURCES, ours)
    real = printed(tmp_path, "#include <cuda.h>\n#include <cuda_runtime_api.h>", headers, theirs)
    return zip(ours, mine, real, strict=True)


def test_every_constant_has_nvidias_value(tmp_path: Path, headers: Path) -> None:
    """All numbers declared under NVIDIA's own names, but for those younger than the headers."""
    known = "".join((headers / name).read_text() for name in ("cuda.h", "driver_types.h"))
    names = re.findall(r"\b((?:cuda[A-Z]\w+|CUDA_\w+|CU_\w+)) = -?\d+", DECLARATIONS)
    names = [name for name in names if name in known]
    theirs = ["cudaInvalidDeviceId" if name == "cudaInvalidDevice" else name for name in names]

    assert [] == [
        row for row in ours_and_theirs(tmp_path, headers, names, theirs) if row[1] != row[2]
    ]
    assert len(names) > 80


def fields(struct: str) -> list[str]:
    """The names of a struct's fields, or of the fields of the macro that stands for it."""
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
    """Offset of each field that is filled, and the size of what is copied; the layout is that of the headers' CUDA."""
    (version,) = printed(tmp_path, "#include <cuda_runtime_api.h>", headers, ["CUDART_VERSION"])
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
    mine = [f"sizeof(struct {one})" for one, _ in whole] + [
        f"offsetof({one}, {field})" for one, _, field in parts
    ]
    real = [f"sizeof(struct {two})" for _, two in whole] + [
        f"offsetof({two}, {field})" for _, two, field in parts
    ]

    assert [] == [row for row in ours_and_theirs(tmp_path, headers, mine, real) if row[1] != row[2]]
    assert len(parts) > 70


OURS = {"textureAndSurfaceSizes", "newerAndReserved", "cluster", "x", "y", "z"}
"""Names of our own, for runs of fields that nobody looks at."""
