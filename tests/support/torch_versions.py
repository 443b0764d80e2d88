"""Fakes of the `torch` module by version: the parts that the SDK looks up.

Source of the versions: torch/cuda/memory.py and torch/csrc/cuda/Module.cpp of the releases.
`allocator_settings` in the snapshot since 2.3, `uuid` of a device 2.5,
`get_per_process_memory_fraction` 2.6, `mempool_id` 2.8, `include_traces` 2.11. For private
functions see torchmem.sdk.pytorch.private_calls. ROCm builds use the same names.
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
    nvml: bool = True,
    gpus: Sequence[str] = UUIDS,
    nvml_index: Callable[[int], int] = lambda index: index,
) -> SimpleNamespace:
    """Return the module of one version.

    `snapshots` lists the arguments of each snapshot, except for a pool that does not exist, and
    `traces` is the history in them.
    """
    snapshots: list[tuple[object, ...]] = []
    traces: list[list[dict[str, Any]]] = []
    raw: dict[str, Any] = {"segments": list(segments), "device_traces": traces}
    if version >= (2, 3):
        raw["allocator_settings"] = settings or {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "expandable_segments": False,
        }

    def snapshot(*arguments: Any) -> dict[str, Any]:
        allowed = 0 if version < (2, 8) else 1
        if len(arguments) != allowed or (version < (2, 11) and any(arguments)):
            raise TypeError(arguments)
        if arguments[:1] in ((), (None,)) or arguments[0][0] == 0:
            snapshots.append(arguments)
        return raw

    memory = SimpleNamespace(memory_snapshot=_memory_snapshot(version))
    if version >= (2, 6):
        memory.get_per_process_memory_fraction = lambda device: 0.5
    nvml_functions = {
        "_raw_device_uuid_nvml": lambda: list(gpus),
        "_get_nvml_device_index": nvml_index,
    }
    cuda = SimpleNamespace(
        memory=memory,
        get_allocator_backend=lambda: backend,
        **(nvml_functions if nvml else {}),
    )
    return SimpleNamespace(
        snapshots=snapshots,
        traces=traces,
        version=SimpleNamespace(hip=hip),
        cuda=cuda,
        _C=_c_module(version, snapshot, recording=recording, caching=caching),
    )


def _c_module(
    version: Version, snapshot: Callable[..., object], *, recording: bool, caching: bool
) -> SimpleNamespace:
    functions: dict[str, Callable[..., object]] = {
        "_cuda_memorySnapshot": snapshot,
        "_cuda_isHistoryEnabled": lambda: recording,
    }
    if version >= (2, 12):
        functions["_cuda_cudaCachingAllocator_is_enabled"] = lambda: caching
    return SimpleNamespace(**functions)


def _memory_snapshot(version: Version) -> Callable[..., object]:
    if version >= (2, 11):
        return lambda mempool_id=None, include_traces=True: None
    return (lambda mempool_id=None: None) if version >= (2, 8) else (lambda: None)
