"""The environment in which a command finds the phantom GPU; nobody else's environment is touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmem.phantom.build import LIBRARY, library_folder
from torchmem.phantom.cards import Card


def phantom_environment(card: Card, devices: int, state: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what puts a command on `devices` cards of this kind; builds the library at first use.

    state: folder through which processes share the cards.

    Raises:
        UsageError: the library cannot be built here.
    """
    folder = library_folder()
    return {
        **base,
        "PHANTOM_MEMORY": str(card.memory_bytes),
        "PHANTOM_DEVICES": str(devices),
        "PHANTOM_STATE_DIR": str(state),
        "LD_PRELOAD": _prepended(base, "LD_PRELOAD", str(folder / LIBRARY)),
        "LD_LIBRARY_PATH": _prepended(base, "LD_LIBRARY_PATH", str(folder)),
    }


def _prepended(base: Mapping[str, str], name: str, value: str) -> str:
    return f"{value}:{base[name]}" if base.get(name) else value
