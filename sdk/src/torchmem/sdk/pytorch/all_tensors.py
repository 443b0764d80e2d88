"""All tensors of this process that are Python objects, by a walk of what the collector tracks.

For an OutOfMemoryError, where they show what the bytes are. No code of the script runs: only
tensors of exactly PyTorch's own types are read, and only the values that PyTorch itself keeps. The
walk does not find tensors that only autograd's graphs hold, which are not Python objects, nor
objects that `gc.freeze` hides.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchmem.allocator.tensor_groups import MAX_DIMENSIONS, Kind, Role, TensorGroup, grouped
from torchmem.sdk.safety.interruptions import is_interruption

SECONDS = 0.2
"""CPU time that a walk may take; one that takes longer has no result."""
OBJECTS_PER_CHECK = 10_000
# The list of all objects is made at once, at about 10 ns each.
MAX_BLOCKS = 10_000_000


class TensorWalk:
    """Finds tensors through the torch module that it is given."""

    def __init__(self, torch: Any, clock: Callable[[], float] = time.thread_time) -> None:
        self._plain = torch.Tensor, torch.nn.Parameter
        self._without_overrides = torch._C.DisableTorchFunction  # noqa: SLF001
        self._clock = clock

    def groups(self, device: int) -> tuple[TensorGroup, ...] | None:
        """Return the tensors on a device in groups; None if there is not enough time."""
        if sys.getallocatedblocks() > MAX_BLOCKS:
            return None
        storages: dict[int, tuple[int, Kind, int]] = {}
        with self._without_overrides():
            for tensor in self._tensors(self._clock() + SECONDS):
                if tensor is None:
                    return None
                _add(tensor, device, storages, self._plain[1])
        return grouped((kind, size) for _, kind, size in storages.values())

    def storage(self, value: object, device: int) -> tuple[int, int] | None:
        """Return the identity and the bytes of a tensor's storage on a device.

        None for all other objects.
        """
        kind = type(value)
        if kind is not self._plain[0] and kind is not self._plain[1]:
            return None
        storages: dict[int, tuple[int, Kind, int]] = {}
        with self._without_overrides():
            _add(value, device, storages, self._plain[1])
        return next(((identity, size) for identity, (_, _, size) in storages.items()), None)

    def _tensors(self, deadline: float) -> Iterator[Any]:
        """Yield all tensors, or None once the time is over."""
        known = gc.get_objects()
        # By identity: a metaclass of the script may define equality.
        tensor, parameter = self._plain
        for start in range(0, len(known), OBJECTS_PER_CHECK):
            for value in known[start : start + OBJECTS_PER_CHECK]:
                if type(value) is tensor or type(value) is parameter:
                    yield value
            if self._clock() > deadline:
                yield None


def _add(
    tensor: Any, device: int, storages: dict[int, tuple[int, Kind, int]], parameter: type
) -> None:
    """Add a tensor's storage, unless a larger tensor or a parameter of that storage is known."""
    try:
        if not tensor.is_cuda or tensor.get_device() != device:
            return
        storage = tensor.untyped_storage()
        # Its address in memory of the host: `data_ptr` would copy a storage that is copied lazily.
        key, size, used = storage._cdata, storage.nbytes(), tensor.nbytes  # noqa: SLF001
        if not size:
            return
        role: Role | None = "parameter" if type(tensor) is parameter else _role(tensor)
        known = storages.get(key)
        if known is None or (role == "parameter", used) >= (known[1][2] == "parameter", known[0]):
            storages[key] = used, _kind(tensor, role), size
    except Exception as error:  # tensors without a storage, such as sparse ones
        if is_interruption(error):
            raise


def _role(tensor: Any) -> Role | None:
    return None if tensor.is_leaf else "output"


def _kind(tensor: Any, role: Role | None) -> Kind:
    shape = tuple(int(size) for size in tensor.shape[:MAX_DIMENSIONS])
    return shape, str(tensor.dtype).removeprefix("torch."), role
