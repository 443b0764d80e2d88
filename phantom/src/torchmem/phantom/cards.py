"""The cards that can be stood in for. All sizes are bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchmem.core.errors import UsageError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MAX_CARDS = 16


@dataclass(frozen=True, slots=True)
class Card:
    """What a card says about itself, and what a CUDA context takes of it.

    name: as in `--card`. product: as nvidia-smi shows it. memory_bytes: `cudaDeviceProp.totalGlobalMem`.
    multiprocessors: number of SMs. capability: compute capability, major and minor. context_bytes: what the first CUDA
    call occupies.
    """

    name: str
    product: str
    memory_bytes: int
    multiprocessors: int = 132
    capability: tuple[int, int] = (9, 0)
    context_bytes: int = 512 << 20


def card(text: str) -> Card:
    """The card of a size such as 80GB (10^9) or 80GiB (2^30).

    Raises:
        UsageError: the text names no card.
    """
    size = memory_size(text)
    return Card(text, "Phantom GPU", size)


def memory_size(text: str) -> int:
    """Bytes of a size such as 80GB (10^9) or 80GiB (2^30).

    Raises:
        UsageError: the text is no such size, or smaller than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
    if size < 1:
        raise UsageError(f"{text!r} is not a memory size; write for example 80GB or 24GiB")
    return size
