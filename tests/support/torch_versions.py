"""`torch` modules in the shape of several versions: what `sdk/_torch_memory.py` and `_torch_devices.py` look up.

Which attribute exists since when was read in torch/cuda/memory.py and torch/csrc/cuda/Module.cpp of the releases:
`allocator_settings` in the snapshot 2.3; `uuid` of a device 2.5; `get_per_process_memory_fraction` 2.6; `mempool_id`
2.8; `include_traces` 2.11; in ROCm builds the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

Version = tuple[int, int]
UUIDS = tuple(f"GPU-0000000{index}-aaaa-bbbb-cccc-00000000000{index}" for index in range(4))


def fake_torch(
    version: Version = (2, 13),
    *,
    backend: str = "native",
    segments: Sequence[dict[str, Any]] = (),
    settings: dict[str, Any] | None = None,
    recording: bool = False,
    caching: bool = True,
    hip: str | None = None,
    cards: Sequence[str] = UUIDS,
    nvml_index: Callable[[int], int] = lambda index: index,
) -> SimpleNamespace:
    """The module of one version. `snapshots` on it lists the arguments with which a snapshot was taken."""
    module = SimpleNamespace(snapshots=[], version=SimpleNamespace(hip=hip))
    raw: dict[str, Any] = {"segments": list(segments), "device_traces": []}
    if version >= (2, 3):
        raw["allocator_settings"] = settings or {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "expandable_segments": False,
        }

    def snapshot(*arguments: object) -> dict[str, Any]:
        allowed = 0 if version < (2, 8) else 1
        if len(arguments) != allowed or (version < (2, 11) and any(arguments)):
            raise TypeError(arguments)
        module.snapshots.append(arguments)
        return raw

    core = SimpleNamespace(_cuda_memorySnapshot=snapshot, _cuda_isHistoryEnabled=lambda: recording)
    if version >= (2, 5):
        core._cuda_cudaCachingAllocator_is_enabled = lambda: caching
    memory = SimpleNamespace(memory_snapshot=_memory_snapshot(version))
    if version >= (2, 6):
        memory.get_per_process_memory_fraction = lambda device: 0.5
    module._C = core
    module.cuda = SimpleNamespace(
        memory=memory, get_allocator_backend=lambda: backend,
        _raw_device_uuid_nvml=lambda: list(cards), _get_nvml_device_index=nvml_index,
    )  # fmt: skip
    return module


def _memory_snapshot(version: Version) -> Callable[..., object]:
    if version >= (2, 11):
        return lambda mempool_id=None, include_traces=True: None
    return (lambda mempool_id=None: None) if version >= (2, 8) else (lambda: None)
