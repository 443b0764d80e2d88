"""The fake libnvidia-ml.so.1: nvidia-ml-py reads from it what the node's file contains."""

from __future__ import annotations

import ast
import ctypes
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from support.fake_nvml import LIBRARY, NODES, FakeNode, library

from torchmem import exporter

ASK = """
import json, sys
from pynvml import *

def answer(call):
    try:
        return eval(call)
    except NVMLError as error:
        return f"error {error.value}"

nvmlInit()
device = nvmlDeviceGetHandleByIndex(0)
print(json.dumps([answer(call) for call in json.loads(sys.argv[1])]))
"""


def ask(node: FakeNode, *calls: str) -> list[object]:
    """What the calls give, as nvidia-ml-py sees it; `error N` for a return code."""
    command = [sys.executable, "-c", ASK, json.dumps(calls)]
    answers: list[object] = json.loads(subprocess.check_output(command, env=node.environment()))
    return answers


def test_structures_are_as_large_as_the_binding_has_them() -> None:
    """Sizes agree with nvidia-ml-py, so that no field is read from the place of another."""
    fake = ctypes.CDLL(str(library() / LIBRARY))
    fake.nvmlFakeStructure.restype = ctypes.c_char_p
    sizes: dict[str, int] = {}
    size = ctypes.c_size_t()
    while name := fake.nvmlFakeStructure(len(sizes), ctypes.byref(size)):
        sizes[name.decode()] = size.value
    structures = {
        name: getattr(pynvml, f"c_{name}", None) or getattr(pynvml, name) for name in sizes
    }

    assert sizes
    assert {name: ctypes.sizeof(structure) for name, structure in structures.items()} == sizes


def test_binding_reads_what_the_file_says(tmp_path: Path) -> None:
    """Text, numbers, structures, lists, unions and return codes arrive unchanged."""
    expected = {
        "nvmlDeviceGetName(device)": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetPciInfo(device).bus": 0x18,
        "nvmlDeviceGetPowerUsage(device)": 690000,
        "nvmlDeviceGetTotalEnergyConsumption(device)": 9876543210,
        "nvmlDeviceGetPowerManagementLimitConstraints(device)": [200000, 700000],
        "nvmlDeviceGetMemoryInfo(device).used": 66955771904,
        "nvmlDeviceGetMemoryInfo(device, version=nvmlMemory_v2).used": 66378006528,
        "nvmlDeviceGetClockInfo(device, NVML_CLOCK_MEM)": 2619,
        "nvmlDeviceGetTemperatureV(device, NVML_TEMPERATURE_GPU)": 64,
        "nvmlDeviceGetRemappedRows(device)": [0, 0, 0, 0],
        "nvmlDeviceGetNvLinkState(device, 17)": 1,
        "nvmlDeviceGetNvLinkState(device, 18)": "error 2",
        "nvmlDeviceGetEncoderUtilization(device)": "error 3",
        "nvmlDeviceGetFieldValues(device, [(138, 0xFFFFFFFF)])[0].value.ullVal": 412000111222,
        "nvmlDeviceGetFieldValues(device, [(138, 0xFFFFFFFF)])[0].valueType": 3,
        "nvmlDeviceGetFieldValues(device, [1])[0].nvmlReturn": 3,
        "nvmlDeviceGetComputeRunningProcesses_v3(device)[1].usedGpuMemory": 629145600,
        "nvmlDeviceGetProcessUtilization(device, 0)[1].smUtil": 89,
        "nvmlDeviceGetProcessUtilization(device, 1 << 62)": "error 6",
        "nvmlDeviceGetMigDeviceHandleByIndex(device, 0)": "error 6",
    }

    assert (
        dict(zip(expected, ask(FakeNode(tmp_path, "h100_busy"), *expected), strict=True))
        == expected
    )


def functions_of_the_exporter() -> set[str]:
    """Return the names of NVML functions in the exporter's source."""
    (folder,) = exporter.__path__
    nodes = (
        node
        for file in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    )
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    names = {text for text in texts if re.fullmatch(r"nvml[A-Z]\w+", text)}
    return {name for name in names if not isinstance(getattr(pynvml, name, None), int)}


def symbols_of(function: str) -> set[str]:
    """Return the symbols of the library that nvidia-ml-py looks up for a function."""
    source = inspect.getsource(getattr(pynvml, function))
    called = re.findall(r"\b(nvml\w+)\(", source)
    others = {name for name in called if name != function and hasattr(pynvml, name)}
    own = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    return own.union(*(symbols_of(name) for name in others if name[4:5].isupper()))


def test_every_function_of_the_exporter_is_nvidias() -> None:
    """Every NVML function that the exporter names exists under that name in nvidia-ml-py."""
    functions = functions_of_the_exporter()

    assert {"nvmlInit", "nvmlDeviceGetPowerUsage", "nvmlGpmMetricsGet"} <= functions
    assert [name for name in functions if not hasattr(pynvml, name)] == []


def test_every_function_of_the_exporter_is_in_the_fake() -> None:
    """No function that the exporter calls is missing from the fake."""
    fake = ctypes.CDLL(str(library() / LIBRARY))
    symbols = set[str]().union(*map(symbols_of, functions_of_the_exporter()))

    assert {"nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo_v2"} <= symbols
    assert [symbol for symbol in symbols if not hasattr(fake, symbol)] == []


def test_missing_symbol_is_a_function_not_found(tmp_path: Path) -> None:
    """A library linked without a function looks to nvidia-ml-py like an old driver's."""
    node = FakeNode(tmp_path, "v100_old_driver")

    assert ask(node, "nvmlDeviceGetMemoryInfo(device, version=nvmlMemory_v2)") == ["error 13"]
    assert ask(node, "nvmlDeviceGetMemoryInfo(device).total") == [34089730048]


@pytest.mark.parametrize("name", sorted(file.stem for file in NODES.glob("*.txt")))
def test_memory_of_every_node_adds_up(name: str) -> None:
    """total = reserved + free + used on every device of every node, as with the driver."""
    lines = re.findall(
        r"^MemoryInfo = ([\d ]+)$", (NODES / f"{name}.txt").read_text(), re.MULTILINE
    )
    sums = [(int(total), sum(map(int, parts))) for total, *parts in map(str.split, lines)]

    assert [total for total, _ in sums] == [parts for _, parts in sums]
