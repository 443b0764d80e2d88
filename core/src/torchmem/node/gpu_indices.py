"""NVML's indices of this machine's GPUs, for output of the base install, which has no NVML."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import cache

COMMAND = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
MAX_SECONDS = 5.0
"""How long a driver that does not respond may delay the output."""


@cache
def gpu_indices() -> Mapping[str, int]:
    """Return NVML's index of each GPU by its UUID, from nvidia-smi; empty where it is unknown.

    It is asked once: it takes up to a second.
    """
    try:
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return {}
    try:
        output, _ = process.communicate(timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # without a wait: it ends when its call to the driver returns
        return {}
    return parse(output.decode(errors="replace"))


def parse(output: str) -> Mapping[str, int]:
    """Return the indices in lines such as "3, GPU-0a7c…"; other lines are ignored."""
    rows = (line.split(", ") for line in output.splitlines())
    return {row[1].strip(): int(row[0]) for row in rows if len(row) > 1 and row[0].isdecimal()}
