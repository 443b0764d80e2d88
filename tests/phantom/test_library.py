"""The stub library, called through ctypes: memory, properties, and lacking calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from torchmem.phantom.build import SOURCES, library_folder
from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.gpus import CATALOG, GpuModel, parse_gpu_model
from torchmem.phantom.torch_build import TorchBuild
from torchmem.sample.errors import UsageError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_sources_compile_without_a_warning(cache: dict[str, str]) -> None:
    """Under -Wall -Wextra, with no headers but those of the C library."""
    strict = ["cc", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]

    done = subprocess.run(
        [*strict, *SOURCES.glob("*.c")],
        env=cache,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_an_allocation_succeeds_exactly_when_it_fits(on_gpu: Run) -> None:
    """All free memory can be allocated, not a byte more, and freeing returns it."""
    done = on_gpu("""
free, total, pointer = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
cuda.cudaMemGetInfo(byref(free), byref(total)); print(free.value, total.value)
print(cuda.cudaMalloc(byref(pointer), ctypes.c_size_t(free.value + 1)))
print(cuda.cudaMalloc(byref(pointer), free), pointer.value % 512)
print(cuda.cudaFree(pointer), cuda.cudaFree(pointer))
cuda.cudaMemGetInfo(byref(free), byref(total)); print(free.value)
""")

    gpu = parse_gpu_model("24GB")
    free = gpu.memory_bytes - gpu.context_bytes
    assert done.stdout == f"{free} {gpu.memory_bytes}\n2\n0 0\n0 1\n{free}\n", done.stderr


ADDRESSES = """
def allocate():
    pointer = ctypes.c_void_p()
    assert cuda.cudaMalloc(byref(pointer), ctypes.c_size_t(3 << 20)) == 0
    return pointer.value
first = [allocate() for _ in range(50)]
freed = first.pop(20)
cuda.cudaFree(ctypes.c_void_p(freed))
print(*first, freed, *(allocate() for _ in range(2)))
"""


@pytest.mark.parametrize("order", ["reuse", "ascending", "descending", "random:1", "random:2"])
def test_new_memory_lies_in_the_chosen_order(on_gpu: Run, order: str) -> None:
    """Ranges ascend, descend, fill the gap of a freed one, or repeat a seed's random order."""
    runs = [on_gpu(ADDRESSES, addresses=order) for _ in range(2)]
    addresses = [int(word) for word in runs[0].stdout.split()]
    *first, freed, second, third = addresses
    ranges = sorted([*first, second, third])

    assert len(addresses) == 52, runs[0].stderr
    assert all(right - left >= 3 << 20 for left, right in pairwise(ranges))
    assert {address % (2 << 20) for address in addresses} == {0}
    assert (freed in {second, third}) == (order == "reuse")
    assert ([*first, second, third] == ranges) == (order == "ascending")
    if order == "descending":
        assert [*first, second, third] == ranges[::-1]
    if order.startswith("random"):
        assert runs[0].stdout == runs[1].stdout
        assert runs[0].stdout != on_gpu(ADDRESSES, addresses="random:3").stdout
        assert [*first, second, third] != ranges[::-1]


def test_an_unknown_order_of_addresses_is_one_sentence(on_gpu: Run) -> None:
    """The library stops at the first allocation, and names the orders that it has."""
    done = on_gpu(ADDRESSES, addresses="up")

    assert done.returncode != 0
    assert "PHANTOM_ADDRESSES=up is not an order: set it to reuse, ascending" in done.stderr


def test_device_memory_costs_no_memory_of_the_host(on_gpu: Run) -> None:
    """20 GB of a GPU are addresses only, and copies from them are zero."""
    done = on_gpu("""
pointer, host = ctypes.c_void_p(), ctypes.create_string_buffer(b"x" * 64)
print(cuda.cudaMalloc(byref(pointer), ctypes.c_size_t(20 * 10**9)))
source = ctypes.c_void_p(pointer.value + 10**9)
print(cuda.cudaMemcpy(host, source, ctypes.c_size_t(64), 2), host.raw[:64] == bytes(64))
# getrusage would include the parent's peak before exec.
peak = open("/proc/self/status").read().partition("VmHWM:")[2]
print(int(peak.split()[0]) < 200 * 1024)
""")

    assert done.stdout == "0\n0 True\nTrue\n", done.stderr


@pytest.mark.parametrize("gpu", CATALOG, ids=lambda gpu: gpu.name)
def test_a_gpu_reports_the_properties_of_the_catalog(on_gpu: Run, gpu: GpuModel) -> None:
    """Driver, runtime and NVML agree on name, memory, multiprocessors and compute capability."""
    done = on_gpu(
        """
name, size, value = ctypes.create_string_buffer(96), ctypes.c_size_t(), ctypes.c_int()
cuda.cuDeviceGetName(name, 96, 0); cuda.cuDeviceTotalMem_v2(byref(size), 0)
def attribute(number): cuda.cudaDeviceGetAttribute(byref(value), number, 0); return value.value
print(name.value.decode(), size.value, attribute(16), attribute(75), attribute(76))
properties = ctypes.create_string_buffer(2048); cuda.cudaGetDeviceProperties(properties, 0)
print(properties.value.decode(), int.from_bytes(properties.raw[288:296], "little"))
properties = ctypes.create_string_buffer(2048); cuda.cudaGetDeviceProperties_v2(properties, 0)
print(properties.value.decode(), int.from_bytes(properties.raw[288:296], "little"))
handle = ctypes.c_void_p(); cuda.nvmlInit_v2(); cuda.nvmlDeviceGetHandleByIndex_v2(0, byref(handle))
cuda.nvmlDeviceGetName(handle, name, 96); print(name.value.decode())
""",
        gpu,
    )

    name, (major, minor) = f"{gpu.product} (phantom)", gpu.capability
    expected = [f"{name} {gpu.memory_bytes} {gpu.multiprocessors} {major} {minor}"]
    expected += [f"{name} {gpu.memory_bytes}"] * 2 + [name]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.fixture(scope="module")
def calling(
    cache: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], Path]:
    """Build a PyTorch of two calls, one of which is lacking, and its environment."""
    folder = tmp_path_factory.mktemp("calling")
    source, library = folder / "calls.c", folder / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    calls = {"lacking": "cudnnDreamOfElectricSheep", "present": "cudaDeviceSynchronize"}
    source.write_text(
        "".join(
            f"int {to}(void); int {name}(void) {{ return {to}(); }}\n" for name, to in calls.items()
        )
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    torch = TorchBuild("2.13.0+cu124", "12.4", library.parent.parent)
    return phantom_environment(parse_gpu_model("24GB"), 1, folder / "state", cache, torch), library


def call(calling: tuple[dict[str, str], Path], code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in which `calls` is that PyTorch."""
    command = [
        sys.executable,
        "-c",
        f"import ctypes; calls = ctypes.CDLL({str(calling[1])!r}); {code}",
    ]
    return subprocess.run(
        command, env=calling[0], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_lacking_call_is_reported_once(calling: tuple[dict[str, str], Path]) -> None:
    """It returns "not supported" and is named on stderr and in the file `lacking`."""
    done = call(calling, "print(calls.lacking(), calls.lacking())")

    assert done.stdout == "3000 3000\n"
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(
        "phantom: the phantom GPU does not support cudnnDreamOfElectricSheep: "
    )
    state = Path(calling[0]["PHANTOM_STATE_DIR"])
    assert (state / "lacking").read_text() == "cudnnDreamOfElectricSheep\n"


def test_a_supported_call_is_not_replaced(calling: tuple[dict[str, str], Path]) -> None:
    """It is the phantom's own, which reports the CUDA version of the calling PyTorch."""
    version = "v = ctypes.c_int(); ctypes.CDLL(None).cudaRuntimeGetVersion(ctypes.byref(v)); "
    done = call(calling, version + "print(calls.present(), v.value)")

    assert (done.stdout, done.stderr) == ("0 12040\n", "")


def test_other_environments_are_unchanged(cache: dict[str, str], tmp_path: Path) -> None:
    """Neither the environment of this process nor the given one is changed."""
    before, given = dict(os.environ), dict(cache)

    made = phantom_environment(
        parse_gpu_model("t4"), 2, tmp_path, {**cache, "LD_PRELOAD": "/lib/other.so"}
    )

    assert (before, given) == (dict(os.environ), cache)
    assert made["LD_PRELOAD"].endswith(":/lib/other.so")
    again = phantom_environment(parse_gpu_model("t4"), 2, tmp_path, made)
    assert made["LD_PRELOAD"] == again["LD_PRELOAD"]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/no/such/cc", "CC=/no/such/cc is not a program: apt install gcc"),
        ("false", "false cannot build the phantom GPU"),
    ],
)
def test_a_missing_or_failing_compiler_is_a_usage_error(
    tmp_path: Path, compiler: str, reason: str
) -> None:
    """The error says what is wrong, and no incomplete build is left."""
    with pytest.raises(UsageError, match=reason):
        library_folder(None, {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CC": compiler})

    assert list(tmp_path.glob("torchmem/phantom/*")) == []


def test_an_empty_path_has_no_compiler(tmp_path: Path) -> None:
    """The error names the package to install."""
    with pytest.raises(UsageError, match="there is no C compiler: apt install gcc libc6-dev"):
        library_folder(None, {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})


@pytest.fixture
def without_cache(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose cache cannot be used, with a compiler that writes empty files."""
    (tmp_path / "file").write_text("")
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\nfor word; do [ "$before" = -o ] && : > "$word"; before=$word; done\n'
    )
    compiler.chmod(0o755)
    settings = {
        "XDG_CACHE_HOME": str(tmp_path / "file"),
        "CC": str(compiler),
        "TMPDIR": str(tmp_path),
    }
    return {**os.environ, **settings}


def test_a_read_only_cache_is_replaced(without_cache: dict[str, str], tmp_path: Path) -> None:
    """The library is built in a folder of the user below the temporary one."""
    folder = library_folder(None, without_cache)

    assert tmp_path / f"torchmem-phantom-{os.getuid()}" == folder.parent
    assert folder.parent.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("premade", ["by another user", "for a group", "as a link", "replaceable"])
def test_a_folder_that_others_can_change_is_not_used(
    without_cache: dict[str, str], tmp_path: Path, premade: str
) -> None:
    """A library that is there already is not preloaded, although its own folder is private."""
    place = library_folder(None, without_cache).parent
    if premade == "by another user":
        if os.geteuid() != 0:
            pytest.skip("only root can make a folder of another user")
        os.chown(place, 65534, 65534)
    elif premade == "for a group":
        place.chmod(0o770)
    elif premade == "as a link":
        place.symlink_to(place.rename(tmp_path / "elsewhere"))
    else:
        tmp_path.chmod(0o777)

    with pytest.raises(UsageError, match="set XDG_CACHE_HOME to a folder that only you can write"):
        library_folder(None, without_cache)
