"""Ready-made callbacks for `Session.on_pressure`: move tensors to pinned host memory and back.

    session = sdk.instrument(release="hooks,emergency")
    session.on_pressure(OptimizerOffload(optimizer), priority=1)
    session.on_pressure(ModuleOffload(reference_model))

Tensors keep their identity: only their data moves. A round trip costs one copy to the host and one
back over PCIe. Left on the device are tensors that are not plain (DTensor, quantized), and tensors
that share their storage with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Moved:
    """A tensor that is, or was, on the host.

    `copy` is its data in pinned memory. `device` is where the tensor belongs; None while it is
    there.
    """

    tensor: Any
    copy: Any
    device: Any = None


class _Offload:
    """Moves the tensors that a function finds. Not thread-safe."""

    def __init__(self, find: Callable[[], Iterable[Any]]) -> None:
        self._find = find
        self._moved: dict[int, _Moved] = {}

    def __call__(self, wanted: int) -> int:
        """Move tensors to the host until `wanted` bytes are free; return the bytes moved."""
        freed = 0
        found = list(self._find())
        # What the script has replaced, as `load_state_dict` does, must not be kept alive.
        self._moved = {id(t): self._moved[id(t)] for t in found if id(t) in self._moved}
        tensors = [tensor for tensor in found if _is_movable(tensor)]
        for tensor in sorted(tensors, key=_size, reverse=True):
            if freed >= wanted:
                break
            freed += self._to_host(tensor)
        return freed

    def _to_host(self, tensor: Any) -> int:
        moved = self._moved.get(id(tensor))
        if moved is None or moved.tensor is not tensor or moved.copy.shape != tensor.shape:
            moved = _Moved(tensor, _pinned_like(tensor))
            self._moved[id(tensor)] = moved
        # Each time: PyTorch's version counter misses changes through `tensor.data`.
        moved.copy.copy_(tensor.detach())
        moved.device = tensor.device
        tensor.data = moved.copy
        return _size(tensor)

    def restore(self) -> None:
        """Move everything back to its device. Raises OutOfMemoryError if it does not fit."""
        for moved in self._moved.values():
            if moved.device is not None:
                moved.tensor.data = moved.copy.to(moved.device)
                moved.device = None


class OptimizerOffload(_Offload):
    """Moves the state of an optimizer to the host; it comes back before the optimizer's next step.

    `optimizer` is a `torch.optim.Optimizer`. Each round trip copies the state both ways.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(lambda: _state_tensors(optimizer))
        optimizer.register_step_pre_hook(lambda *_: self.restore())
        optimizer.register_state_dict_pre_hook(lambda *_: self.restore())


class ModuleOffload(_Offload):
    """Moves an idle module to the host; it comes back before its next forward pass.

    For a module that is not trained, such as a reference or a reward model: an `nn.Module`.
    Parameters and buffers move.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(lambda: [*module.parameters(), *module.buffers()])
        module.register_forward_pre_hook(lambda *_: self.restore())
        module.register_state_dict_pre_hook(lambda *_: self.restore())


def _state_tensors(optimizer: Any) -> Iterator[Any]:
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from state.values()


def _is_movable(value: Any) -> bool:
    """Return whether a value is a plain tensor on a GPU that is alone in its storage."""
    if type(value).__module__ not in {"torch", "torch.nn.parameter"} or not value.is_cuda:
        return False
    return value.layout is not None and value.untyped_storage().nbytes() == _size(value) > 0


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _pinned_like(tensor: Any) -> Any:
    return tensor.new_empty_strided(
        tensor.size(), tensor.stride(), device="cpu", pin_memory=True, requires_grad=False
    )
