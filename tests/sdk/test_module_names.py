"""The module of a recorded stack, by the calls of `forward` in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType

import pytest

from torchmem.allocator.snapshot import FrameInfo
from torchmem.sdk.oom.module_names import ModuleNames
from torchmem.sdk.pytorch.seen_modules import SeenModules


class Module:
    """What torch.nn.Module keeps in its dict; its members are found as those of PyTorch are."""

    def __init__(self, **members: Module) -> None:
        self.__dict__["_modules"] = members

    def __getattr__(self, name: str) -> Callable[[int], int]:
        member: Module = self.__dict__["_modules"][name]
        return member.forward

    def forward(self, x: int) -> int:
        """Never run."""
        raise NotImplementedError


class Linear(Module):
    """A module without members."""

    def forward(self, x: int) -> int:
        """Never run."""
        return x


class Loop(Module):
    """A module that calls its members in a loop, as Sequential does."""

    def forward(self, x: int) -> int:
        """Never run."""
        for member in self.__dict__["_modules"].values():
            x = member.forward(x)
        return x


class Block(Module):
    """A module that calls its members by name."""

    def forward(self, x: int) -> int:
        """Never run."""
        y = self.linear1(x)
        y = abs(y)
        y = y + self.linear2(x)
        return self.linear1(x) + self.linear2(x) + y


class Model(Module):
    """The outermost module."""

    def forward(self, x: int) -> int:
        """Never run."""
        x = self.encoder(x)
        x = self.decoder(x)
        return self.head(x)


def model(kind: type[Model] = Model) -> Model:
    """Return a model with two encoders of several blocks."""

    def encoder(depth: int) -> Module:
        blocks = {str(n): Block(linear1=Linear(), linear2=Linear()) for n in range(depth)}
        return Loop(layers=Loop(**blocks))

    return kind(encoder=encoder(3), decoder=encoder(2), head=Loop(**{"0": Linear()}))


class Raising(Model):
    def __getattr__(self, name: str) -> Callable[[int], int]:
        raise AssertionError(name)


def _frame(function: Callable[..., object], offset: int) -> FrameInfo:
    assert isinstance(function, FunctionType)
    code = inspect.unwrap(function).__code__
    return FrameInfo(
        filename=code.co_filename, line=code.co_firstlineno + offset, name=code.co_name
    )


LINEAR, BLOCK, LOOP, MODEL = (kind.forward for kind in (Linear, Block, Loop, Model))
LAYERS = (LOOP, 3), (LOOP, 3)
MODULES = {
    "encoder.layers.*.linear1": [(LINEAR, 2), (BLOCK, 2), *LAYERS, (MODEL, 2)],
    "decoder.layers.*.linear2": [(LINEAR, 2), (BLOCK, 4), *LAYERS, (MODEL, 3)],
    "decoder.layers.*": [(BLOCK, 3), *LAYERS, (MODEL, 3)],
    "encoder.layers.*.linear1|linear2": [(LINEAR, 2), (BLOCK, 5), *LAYERS, (MODEL, 2)],
    "head.0": [(LINEAR, 2), (LOOP, 3), (MODEL, 4)],
    "encoder": [(LOOP, 3), (MODEL, 2)],
}


def _names(outermost: Module) -> ModuleNames:
    return ModuleNames(SeenModules(Module, main=lambda: {"model": outermost}))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("kind", [Model, Raising])
def test_the_module(module: str, kind: type[Model]) -> None:
    """It is the innermost one, as far as the lines that call it tell, and no code of it runs."""
    frames = [_frame(*place) for place in MODULES[module]]

    assert module == _names(model(kind)).of(frames)


def test_frames_without_a_module() -> None:
    """Nothing is reported for the outermost module, of other functions, and of unknown modules."""
    names, own = _names(model()), _frame(test_frames_without_a_module, 0)

    assert [names.of([_frame(MODEL, 1)]), names.of([own]), names.of([])] == [None] * 3
    assert _names(Linear()).of([_frame(BLOCK, 1), _frame(MODEL, 1)]) is None


def test_the_time_is_bounded() -> None:
    """A search that has used up its time returns nothing."""
    now = iter(range(1_000_000))
    modules = SeenModules(Module, main=lambda: {"model": model()})
    names = ModuleNames(modules, clock=lambda: float(next(now)))

    assert names.of([_frame(*place) for place in MODULES["head.0"]]) is None


def test_modules_inside_each_other() -> None:
    """A module that contains itself does no harm."""
    outermost = model()
    outermost.__dict__["_modules"]["head"].__dict__["_modules"]["again"] = outermost
    frames = [_frame(*place) for place in MODULES["encoder.layers.*.linear1"]]

    assert _names(outermost).of(frames) == "encoder.layers.*.linear1"
