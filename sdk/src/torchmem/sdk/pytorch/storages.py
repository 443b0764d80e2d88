"""The GPU storages of tensors: their addresses and bytes, each storage once.

Only addresses and sizes are read, and no tensor is kept alive. The script may pass anything:
wrapper subclasses such as DTensor, fake and meta tensors, and objects that raise. What cannot be
read is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torchmem.allocator.backend import Storages, WeakStorage
from torchmem.sdk.safety.interruptions import is_interruption

# Of one value, such as the state of one parameter.
MAX_DEPTH = 6
MAX_OBJECTS = 10_000

_LEAVES = (str, bytes, int, float, complex, type(None))
_SPARSE = ("_indices", "_values")


class TensorReader:
    """Counts storages through the torch module that it is given, for PyTorch 2.1 and newer.

    Everything runs under `torch._C.DisableTorchFunction`, so that no `__torch_function__` of the
    script is called.
    """

    def __init__(self, torch: Any) -> None:
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._tensor = torch.Tensor
        self._storage = torch.UntypedStorage
        self._without_overrides = torch._C.DisableTorchFunction  # noqa: SLF001

    def count(self, values: Iterable[object], found: Storages) -> None:
        """Add the storages of tensors, and of tensors inside containers and objects."""
        with self._without_overrides():
            for value in values:
                self._add(value, found)

    def tensors(self, value: object) -> list[Any]:
        """Return the tensors in a tensor, container, or object; at most MAX_OBJECTS of them."""
        with self._without_overrides():
            found = islice(self._outer(value, MAX_DEPTH), MAX_OBJECTS)
            return [tensor for tensor in found if tensor is not None]

    def count_gradients(self, parameters: Iterable[Any], found: Storages) -> None:
        """Add the storages of the gradients that exist; call it in the thread that trains."""
        with self._without_overrides():
            for parameter in parameters:
                gradient = parameter.grad if parameter.is_leaf else None
                if gradient is not None:
                    self._add(gradient, found)

    def have_gradients(self, parameters: Sequence[Any]) -> tuple[bool, ...]:
        """Return which parameters have a gradient; call it in the thread that trains."""
        with self._without_overrides():
            return tuple(
                parameter.is_leaf and parameter.grad is not None for parameter in parameters
            )

    def viewed_storages(self, parameters: Iterable[Any]) -> list[WeakStorage]:
        """Return the storages that gradients are views of, each once, without keeping them.

        Call it in the thread that trains.
        """
        found: dict[int, WeakStorage] = {}
        with self._without_overrides():
            for parameter in parameters:
                gradient: Any = parameter.grad if parameter.is_leaf else None
                if type(gradient) in self._plain and gradient._is_view() and gradient.is_cuda:  # noqa: SLF001
                    storage = gradient.untyped_storage()
                    if storage.data_ptr() not in found:
                        viewed = _Viewed(self._storage, storage, gradient.get_device())
                        found[storage.data_ptr()] = viewed
        return list(found.values())

    def _add(self, value: Any, found: Storages) -> None:
        try:
            if type(value) in self._plain:
                _add_dense(value, found)
            else:
                self._add_inner(value, found)
        except Exception as error:
            if is_interruption(error):
                raise

    def _add_inner(self, value: object, found: Storages) -> None:
        for tensor in islice(self._outer(value, MAX_DEPTH), MAX_OBJECTS):
            if tensor is not None:
                self._add_tensor(tensor, MAX_DEPTH, found)

    def _outer(self, value: Any, depth: int) -> Iterator[Any]:
        """Yield the tensors in a value, and None for each other object in it."""
        if isinstance(value, self._tensor):
            yield value
            return
        yield None
        if depth:
            for member in _members(value):
                yield from self._outer(member, depth - 1)

    def _add_tensor(self, tensor: Any, depth: int, found: Storages) -> None:
        """Add a tensor's storage or, if it consists of other tensors, theirs."""
        try:
            inner = [] if type(tensor) in self._plain or not depth else _inner(tensor)
            for part in inner:
                self._add_tensor(part, depth - 1, found)
            if not inner:
                _add_storage(tensor, found)
        except Exception as error:
            if is_interruption(error):
                raise


class _Viewed:
    """A weak reference to a storage, as `torch.multiprocessing.reductions` has them (2.1 to 2.13).

    What a storage holds is freed with its last strong reference.
    """

    def __init__(self, kind: Any, storage: Any, device: int) -> None:
        self._kind = kind
        self._device = device
        self._pointer = storage._weak_ref()  # noqa: SLF001

    def add(self, found: Storages) -> None:
        """Add the storage if it still exists."""
        storage = self._kind._new_with_weak_ptr(self._pointer)  # noqa: SLF001
        if storage is not None:
            _keep(found, self._device, storage.data_ptr(), storage.nbytes())

    def __del__(self) -> None:
        self._kind._free_weak_ref(self._pointer)  # noqa: SLF001


def _inner(tensor: Any) -> list[Any]:
    """Return the tensors that a wrapper subclass consists of."""
    if hasattr(tensor, "_local_tensor"):
        return [tensor._local_tensor]  # noqa: SLF001 - DTensor, also before it could be flattened
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    return []


def _members(value: object) -> Iterable[object]:
    if isinstance(value, _LEAVES):
        return ()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set)):
        return value
    return getattr(value, "__dict__", {}).values() if not callable(value) else ()


def _add_dense(tensor: Any, found: Storages) -> None:
    """Add a tensor that most likely fills its storage.

    Does not call `untyped_storage`, which leaves a Python object for as long as the storage lives.
    """
    if not tensor.is_cuda:
        return
    if tensor.is_sparse:
        for name in _SPARSE:
            _add_storage(getattr(tensor, name)(), found)
        return
    if tensor.storage_offset() or not tensor.is_contiguous():
        _add_storage(tensor, found)
    else:
        _keep(found, tensor.get_device(), tensor.data_ptr(), tensor.nbytes)


def _add_storage(tensor: Any, found: Storages) -> None:
    if tensor.is_cuda:
        storage = tensor.untyped_storage()
        _keep(found, tensor.get_device(), storage.data_ptr(), storage.nbytes())


def _keep(found: Storages, device: int, address: int, size: int) -> None:
    if address:
        sizes = found.setdefault(device, {})
        if sizes.get(address, 0) < size:
            sizes[address] = size
