"""What preflight says of public models, beside the peaks of their training on this GPU."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch
from experiments.real_gpu.figures import Figures
from experiments.real_gpu.model import MODELS
from experiments.real_gpu.processes_on_gpu import PYTHON

from torchmem.phantom.gpus import GpuModel
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import GpuMemory
from torchmem.preflight.run import run

MODEL = Path(__file__).with_name("model.py")
NEEDS = {"resnet50": "torchvision", "vit_b_16": "torchvision"}
CONVOLUTIONS = {"resnet50": (0.08, 0.12)}
"""How far peaks allocated and reserved may be off where cuDNN chooses another plan on a GPU."""
OTHERS = (0.01, 0.01)
TRIED = "gpt2"
MARGIN = 0.05


def this_gpu() -> GpuModel:
    """Return a phantom with the properties of this GPU."""
    gpu = torch.cuda.get_device_properties(0)
    capability = (gpu.major, gpu.minor)
    return GpuModel("this", gpu.name, gpu.total_memory, gpu.multi_processor_count, capability)


def preflight(figures: Figures) -> None:
    """Compare the peaks; of one model, try that its memory is enough and that less is not."""
    gpu = this_gpu()
    names = [name for name in MODELS if find_spec(NEEDS.get(name, "transformers"))]
    for name in MODELS:
        if name not in names:
            figures.missing(name, f"{NEEDS.get(name, 'transformers')} is not installed")
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        planned = {name: pool.submit(_planned, name, gpu) for name in names}
        for name in names:
            _, allocated, reserved = _trained(name)
            found = planned[name].result()
            off_allocated, off_reserved = CONVOLUTIONS.get(name, OTHERS)
            for peak, here, there, off in (
                ("allocated", allocated, found.peak_allocated, off_allocated),
                ("reserved", reserved, found.peak_reserved, off_reserved),
            ):
                figures.close(f"{name}: peak {peak}, by preflight", there, here, relative=off)
        if TRIED in names:
            _tried(figures, planned[TRIED].result(), gpu)


def _planned(name: str, gpu: GpuModel) -> GpuMemory:
    with tempfile.TemporaryDirectory() as folder:
        plan = RunPlan((*PYTHON, str(MODEL), name), gpu, steps=1_000_000)
        with Path(os.devnull).open("wb") as nothing:
            null = nothing.fileno()
            (device,) = run(plan, Path(folder), lambda _: None, stdout=null, stderr=null).devices
    return device


def _trained(name: str, fraction: float = 1.0) -> tuple[bool, int, int]:
    command = [*PYTHON, str(MODEL), name, str(fraction)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    fits, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    return fits, allocated, reserved


def _tried(figures: Figures, found: GpuMemory, gpu: GpuModel) -> None:
    sizes = {
        "the reserved peak by preflight + 5 % is enough": found.peak_reserved * (1 + MARGIN),
        "the allocated peak by preflight − 5 % is enough": found.peak_allocated * (1 - MARGIN),
    }
    for (name, size), expected in zip(sizes.items(), ("yes", "no"), strict=True):
        fits, _, _ = _trained(TRIED, size / gpu.memory_bytes)
        answer = "yes" if fits else "no"
        figures.add(f"{TRIED}: {name}", answer, "text", expected, right=answer == expected)
