"""Ready callbacks for `Session.on_pressure`: move tensors to pinned host memory and back.

    session = sdk.instrument(release="hooks,emergency")
    session.on_pressure(OptimizerOffload(optimizer), priority=1)
    session.on_pressure(ModuleOffload(reference_model))

Tensors keep their identity: only their data moves. A round trip costs one copy to the host and one
back over PCIe. Of a DTensor the local tensor moves. Left on the device are tensors that share their
storage with others, quantized and sparse tensors, and other subclasses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class HostStore(Protocol):
    """Where tensors move to, and which of them can."""

    def can_take(self, tensor: Any) -> bool:
        """Return whether this is a plain tensor on a device that is alone in its storage."""

    def empty_like(self, tensor: Any) -> Any:
        """Return a tensor of the same shape, strides, and type on the host."""

    def to_device(self, copy: Any, device: Any) -> Any:
        """Return what is in a tensor on the host as a new one on the device."""


class PinnedStore:
    """Pinned host memory for tensors on a GPU."""

    def __init__(self, torch: Any) -> None:
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._strided = torch.strided
        self._uses = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
        # The count includes the tensor, and the Python object that is asked (2.1 to 2.13).
        tensor = torch.empty(1, device="cpu")
        self._uses_of_one = self._use_count(tensor.untyped_storage())

    def can_take(self, tensor: Any) -> bool:
        """Return whether it is a plain tensor on a GPU, alone in a storage that it fills."""
        return bool(tensor.is_cuda) and self.is_alone(tensor)

    def is_alone(self, tensor: Any) -> bool:
        """Return whether a tensor is plain, and no other one would keep or change its storage."""
        if type(tensor) not in self._plain or tensor.layout != self._strided:
            return False
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        if not storage.nbytes() == _size(tensor) > 0:
            return False
        return self._use_count(storage) <= self._uses_of_one

    def _use_count(self, storage: Any) -> int:
        return 0 if self._uses is None else int(self._uses(storage._cdata))  # noqa: SLF001

    def empty_like(self, tensor: Any) -> Any:
        """Return pinned memory."""
        return tensor.new_empty_strided(
            tensor.size(), tensor.stride(), device="cpu", pin_memory=True, requires_grad=False
        )

    def to_device(self, copy: Any, device: Any) -> Any:
        """Return `copy.to(device)`."""
        return copy.to(device)


@dataclass(slots=True)
class _Moved:
    """A tensor that is, or was, on the host.

    `copy` is its data in host memory. `device` is where the tensor belongs; None while it is there.
    """

    tensor: Any
    copy: Any
    device: Any = None

    def fits(self, tensor: Any) -> bool:
        """Return whether the copy can take this tensor again."""
        copy = self.copy
        return (
            self.tensor is tensor
            and copy.shape == tensor.shape
            and copy.dtype == tensor.dtype
            and copy.stride() == tensor.stride()
        )

    @property
    def is_away(self) -> bool:
        """Whether the tensor is on the host, and the script has not given it other data since."""
        return self.device is not None and self.tensor.data_ptr() == self.copy.data_ptr()


class _Offload:
    """Moves tensors that a function finds. Not for use by several threads at once."""

    def __init__(self, find: Callable[[], Iterable[Any]], memory: HostStore | None) -> None:
        self._find = find
        self._memory = memory or PinnedStore(sys.modules["torch"])
        self._moved: dict[int, _Moved] = {}
        self._are_away = False

    def __call__(self, wanted: int) -> int:
        """Move tensors to the host until `wanted` bytes are free; return the bytes moved."""
        freed = 0
        found = self._forget_replaced()
        for tensor in sorted(filter(self._memory.can_take, found), key=_size, reverse=True):
            if freed >= wanted:
                break
            freed += self._to_host(tensor)
        return freed

    def _forget_replaced(self) -> list[Any]:
        """Do not keep alive what the script has replaced, as `load_state_dict` does."""
        found = [_local(value) for value in self._find() if hasattr(value, "untyped_storage")]
        self._moved = {id(t): self._moved[id(t)] for t in found if id(t) in self._moved}
        return found

    def _to_host(self, tensor: Any) -> int:
        moved = self._moved.get(id(tensor))
        if moved is None or not moved.fits(tensor):
            moved = self._moved[id(tensor)] = _Moved(tensor, self._memory.empty_like(tensor))
        # Each time: PyTorch's version counter misses changes through `tensor.data`.
        moved.copy.copy_(tensor.detach())
        moved.device = tensor.device
        self._are_away = True
        tensor.data = moved.copy
        return _size(tensor)

    def restore(self) -> None:
        """Move everything back to its device. Raises OutOfMemoryError if it does not fit."""
        if not self._are_away:
            return
        self._forget_replaced()
        for moved in self._moved.values():
            if moved.is_away:
                moved.tensor.data = self._memory.to_device(moved.copy, moved.device)
            moved.device = None
        self._are_away = False


class OptimizerOffload(_Offload):
    """Moves the state of an optimizer to the host; it comes back before the optimizer's next step.

    `optimizer` is a `torch.optim.Optimizer`. Each round trip copies the state both ways.
    """

    def __init__(self, optimizer: Any, memory: HostStore | None = None) -> None:
        super().__init__(lambda: _state_tensors(optimizer), memory)
        optimizer.register_step_pre_hook(lambda *_: self.restore())
        optimizer.register_state_dict_pre_hook(lambda *_: self.restore())


class ModuleOffload(_Offload):
    """Moves an idle module to the host; it comes back before its next forward pass.

    For a module that is not trained, such as a reference or a reward model: an `nn.Module`.
    Parameters and buffers move. A forward pass of any of its submodules brings all of it back.
    """

    def __init__(self, module: Any, memory: HostStore | None = None) -> None:
        super().__init__(lambda: [*module.parameters(), *module.buffers()], memory)
        for each in module.modules():
            each.register_forward_pre_hook(lambda *_: self.restore())
        module.register_state_dict_pre_hook(lambda *_: self.restore())


def _state_tensors(optimizer: Any) -> Iterator[Any]:
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from state.values()


def _local(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and any other tensor itself.

    By PyTorch's protocol for wrapper subclasses: `to_local()` may return a view.
    """
    if hasattr(tensor, "to_local") and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return getattr(tensor, names[0])
    return tensor


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
