"""The machine of a run: its GPU, and the environments in which a subject sees it or a phantom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core/src", "sdk/src", "exporter/src", "lab/src", "tools/src", "tests", ".")
WHEELS = ROOT / ".gpu-wheels"
SITE = WHEELS / "site"
PHANTOM_MODEL = "h100-80gb"
"""The phantom where there is no GPU."""
DESCRIBE = """
import json, sys
import torch
found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    import pynvml
    pynvml.nvmlInit()
    gpu = torch.cuda.get_device_properties(0)
    found |= {"gpu": gpu.name, "bytes": gpu.total_memory,
              "driver": str(pynvml.nvmlSystemGetDriverVersion())}
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures were measured with.

    gpu, bytes, driver: None on a machine without a GPU.
    """

    python: str
    torch: str
    cuda: str | None
    gpu: str | None = None
    bytes: int | None = None
    driver: str | None = None


class MachineError(Exception):
    """The machine lacks what every subject needs."""


def environment() -> dict[str, str]:
    """Return the environment of a subject: this checkout and the unpacked wheels."""
    path = [*(str(ROOT / source) for source in SOURCES), str(SITE)]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def unpack_wheels() -> None:
    """Install the wheels that `make gpu-wheels` has saved, without a network.

    Those of this Python come after them.

    Raises:
        MachineError: pip cannot install them.
    """
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not wheels or SITE.exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command = [*pip, "--no-compile", "--target", str(SITE), *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"the wheels cannot be installed: {_last_line(done.stderr)}")


def describe() -> Machine:
    """Return this machine.

    Raises:
        MachineError: this Python has no PyTorch, or a package is missing.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DESCRIBE],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MachineError(f"{sys.executable}: {_last_line(done.stderr)}")
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def on_phantom(machine: Machine, command: list[str], state: Path) -> list[str]:
    """Return the command that runs `command` on a phantom of the machine's GPU."""
    flags = ["--state", str(state), "--gpu-model", _model(machine.gpu)]
    if machine.bytes:
        flags += ["--memory", str(machine.bytes)]
    return [sys.executable, "-m", "torchmem.phantom", *flags, "--", *command]


def _model(gpu: str | None) -> str:
    """Return the name in the phantom's catalog; where it is not there, that of an H100."""
    sys.path.extend(str(ROOT / source) for source in SOURCES if source.endswith("src"))
    from torchmem.phantom.gpus import CATALOG

    names: Mapping[str, str] = {each.product: each.name for each in CATALOG}
    return names.get(gpu or "", PHANTOM_MODEL)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it says nothing"
