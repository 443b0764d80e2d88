"""Compare the phantom GPU with a real one: the same scripts and operations on both.

    python -m experiments.phantom_truth run > real.json                      # on a GPU
    python -m torchmem.phantom --gpu-model h100-80gb -- \\
        python -m experiments.phantom_truth run > phantom.json     # anywhere, with the same PyTorch
    python -m experiments.phantom_truth compare real.json phantom.json

`experiments/phantom_truth/h200.json` was recorded on an H200 with PyTorch 2.11 and CUDA 13.0.
Scripts are those of `examples`, each in a process of its own, with their peaks in PyTorch's
allocator and what NVML counts for the process at its end. Operations are those of `operations.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.phantom_truth.operations import GROUPS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RESNET = ("resnet50.py", "--steps", "3", "--batch")
SCRIPTS = {
    "gpt": ("gpt.py", "--steps", "50"),
    "resnet50, batch 64": (*RESNET, "64"),
    "resnet50, batch 64, --amp": (*RESNET, "64", "--amp"),
    "resnet50, batch 64, --amp --checkpoint": (*RESNET, "64", "--amp", "--checkpoint"),
    "resnet50, batch 128": (*RESNET, "128"),
    "resnet50, batch 128, --amp": (*RESNET, "128", "--amp"),
    "resnet50, batch 128, --amp --checkpoint": (*RESNET, "128", "--amp", "--checkpoint"),
    "custom_function": ("custom_function.py",),
    "custom_function --fused": ("custom_function.py", "--fused"),
    "huggingface": ("huggingface.py", "--steps", "20"),
    "huggingface --gradient-checkpointing": (
        "huggingface.py",
        "--steps",
        "20",
        "--gradient-checkpointing",
    ),
    "lightning_loop": ("lightning_loop.py", "--steps", "20"),
    "ddp": ("ddp.py",),
    "fsdp2": ("fsdp2.py",),
    "tensor_parallel": ("tensor_parallel.py",),
}
# What `torchrun --nproc-per-node 1` would set.
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
CHILD = """
import json, runpy, sys
from experiments.phantom_truth.operations import process_bytes
import torch
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
error = None
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except (RuntimeError, ValueError) as raised:
    error = f"{type(raised).__name__}: {str(raised)[:300]}"
stats = torch.cuda.memory_stats()
print(json.dumps({
    "allocated": stats["allocated_bytes.all.peak"],
    "reserved": stats["reserved_bytes.all.peak"],
    "reserved_now": stats["reserved_bytes.all.current"],
    "process": process_bytes(),
    "retries": stats["num_alloc_retries"],
    "error": error,
}))
"""
MIB, MIN_BYTES = 1 << 20, 4 << 10
PEAKS = ("allocated", "reserved")
ALLOCATORS = {"": "", ", expandable segments": "expandable_segments:True"}


def child(command: list[str], environment: dict[str, str]) -> Any:
    """Run a command; return the JSON of its last line, or its last lines if it failed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    if done.returncode:
        return {"failed": done.stderr[-600:]}
    return json.loads(done.stdout.splitlines()[-1])


def script(name: str, allocator: str, number: int) -> Any:
    """Run one script; `number` gives it a port of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = ONE_RANK | {
            "TORCHMEM_RUN_DIR": f"{folder}/run",
            "MASTER_PORT": str(29600 + number),
            "PYTORCH_ALLOC_CONF": allocator,
        }
        path, *arguments = SCRIPTS[name]
        return child(["-c", CHILD, str(EXAMPLES / path), *arguments], environment)


def run(jobs: int) -> None:
    """Run everything, and print one JSON object."""
    cases = [(name, label) for name in SCRIPTS for label in ALLOCATORS]
    with ThreadPoolExecutor(jobs) as pool:
        groups = {
            group: pool.submit(child, ["-m", "experiments.phantom_truth.operations", group], {})
            for group in GROUPS
        }
        scripts = {
            name + label: pool.submit(script, name, ALLOCATORS[label], number)
            for number, (name, label) in enumerate(cases)
        }
        results = {
            "operations": {name: future.result() for name, future in groups.items()},
            "scripts": {name: future.result() for name, future in scripts.items()},
        }
    print(json.dumps(results, indent=1))


def compare(real: Any, phantom: Any) -> None:
    """Print a row for each script, and one for each operation that differs by more than 1%."""
    print("| script | peak allocated | phantom | peak reserved | phantom | outside |")
    print("|---|---|---|---|---|---|")
    for name, there in real["scripts"].items():
        here = phantom["scripts"][name]
        if there["process"] is not None:
            cells = [
                f"{there[key] / MIB:,.0f} MiB | {here[key] / there[key] - 1:+.1%}" for key in PEAKS
            ]
            outside = (there["process"] - there["reserved_now"]) / MIB
            print(f"| {name} | {' | '.join(cells)} | {outside:,.0f} MiB |")
    print("\n| operation | peak | phantom |\n|---|---|---|")
    for group, there in real["operations"].items():
        ours, theirs = phantom["operations"][group]["peaks"][group], there["peaks"][group]
        same = {name for name in theirs if is_same(theirs[name], ours[name])}
        print(f"| {group}: {len(same)} of {len(theirs)} are the same | | |")
        for name in sorted(theirs.keys() - same):
            print(
                f"| {name} | {theirs[name] / MIB:,.2f} MiB | {ours[name] / theirs[name] - 1:+.0%} |"
            )


def is_same(there: Any, here: Any) -> bool:
    """Return whether two peaks differ by at most 1%, or both operations failed."""
    if isinstance(there, str) or isinstance(here, str):
        return isinstance(there, str) and isinstance(here, str)
    return bool(abs(there - here) <= 0.01 * there + MIN_BYTES)


def main() -> None:
    """Run here, or compare two runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("run", help="run on this GPU")
    here.add_argument("--jobs", type=int, default=4, help="processes at a time (default 4)")
    both = commands.add_parser("compare", help="compare two runs")
    both.add_argument("real", type=Path)
    both.add_argument("phantom", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.jobs)
    else:
        compare(*(json.loads(path.read_bytes()) for path in (arguments.real, arguments.phantom)))


if __name__ == "__main__":
    main()
