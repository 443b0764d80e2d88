"""The environment in which a command finds the phantom GPU; nobody else's environment is touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmem.phantom.build import LIBRARY, library_folder
from torchmem.phantom.cards import Card
from torchmem.phantom.torch_build import TorchBuild


def phantom_environment(
    card: Card, devices: int, state: Path, base: Mapping[str, str], torch: TorchBuild | None = None
) -> dict[str, str]:
    """`base` with what puts a command on `devices` cards of this kind; builds the library at first use.

    state: folder through which processes share the cards. torch: the PyTorch that the command runs, see
    `torch_build.cuda_build`; its CUDA version is the one that the phantom shows.

    Raises:
        UsageError: the library cannot be built here.
    """
    folder = library_folder(torch, base)
    return {
        **base,
        **_model(card),
        **_compiler_caches(base, folder.parent),
        "PHANTOM_DEVICES": str(devices),
        "PHANTOM_STATE_DIR": str(state),
        # PyTorch waits 10 s at its end for an autograd thread that stands still (c/finalizing.c).
        "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": base.get("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "1"),
        "PHANTOM_CUDA": torch.cuda if torch and torch.cuda else base.get("PHANTOM_CUDA", "13.0"),
        "LD_PRELOAD": _prepended(base, "LD_PRELOAD", str(folder / LIBRARY)),
        "LD_LIBRARY_PATH": _prepended(base, "LD_LIBRARY_PATH", str(folder)),
    }


def _model(card: Card) -> dict[str, str]:
    """What `c/model.c` reads."""
    return {
        "PHANTOM_CARD": card.name,
        "PHANTOM_NAME": f"{card.product} (phantom)",
        "PHANTOM_MEMORY": str(card.memory_bytes),
        "PHANTOM_CONTEXT": str(card.context_bytes),
        "PHANTOM_MULTIPROCESSORS": str(card.multiprocessors),
        "PHANTOM_CAPABILITY": f"{card.capability[0]}{card.capability[1]}",
        "PHANTOM_L2": str(card.l2_bytes),
    }


def _compiler_caches(base: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Folders of its own for what torch.compile and Triton keep: which variant was fastest is no fact on a phantom.

    A key of these caches need not name the card, so a real GPU would take such a result for its own.
    """
    folders = {"TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "TRITON_CACHE_DIR": cache / "triton"}
    return {name: str(_phantoms(base.get(name)) or folder) for name, folder in folders.items()}


def _phantoms(folder: str | None) -> Path | None:
    if not folder or Path(folder).name == "phantom":
        return Path(folder) if folder else None
    return Path(folder, "phantom")


def _prepended(base: Mapping[str, str], name: str, value: str) -> str:
    others = [path for path in base.get(name, "").split(":") if path and path != value]
    return ":".join([value, *others])
