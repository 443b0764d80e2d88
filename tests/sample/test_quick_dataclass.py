"""The SDK's own `dataclass`: the same as that of Python's library, but quicker to define."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import Any

import pytest

from torchmem.sample.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """With all that a field can have."""

    x: float
    y: float = 2.0
    labels: dict[str, int] = field(default_factory=dict)
    unit: str | None = field(default=None, metadata={"statistic": "unit"})


@dataclass(frozen=True, slots=True)
class Single:
    """Of one field."""

    size: float


@dataclass(slots=True)
class Changing:
    """Not frozen."""

    x: int
    seen: list[int] = field(default_factory=list)


LIBRARY_POINT = dataclasses.make_dataclass(
    "Point", [(each.name, each.type, each) for each in fields(Point)], frozen=True, slots=True
)


def new_point() -> Any:
    """Return a class like Point of which no object has been created."""
    members = {each.name: each for each in fields(Point)}
    kind = type("Point", (), {**members, "__annotations__": Point.__annotations__})
    return dataclass(frozen=True, slots=True)(kind)


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, 3.0, {"a": 1}, "m"), {}),
    ((1,), {"unit": "m", "labels": {"b": 2}}),
    ((), {"x": float("inf")}),
]


@pytest.mark.parametrize(("arguments", "named"), ARGUMENTS)
def test_an_object_is_like_one_of_the_library(
    arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Values, defaults and text of the first objects and of later ones are those of Python's."""
    kind = new_point()
    objects = [kind(*arguments, **named) for _ in range(20)]
    other = LIBRARY_POINT(*arguments, **named)

    assert [asdict(own) for own in objects] == [asdict(other)] * 20
    assert {repr(own) for own in objects} == {repr(other)}
    assert len({id(own.labels) for own in (*objects, kind(1), kind(1))}) in {3, 22}


@pytest.mark.parametrize(
    ("arguments", "named"), [((), {}), ((1, 2, {}, "", 5), {}), ((1,), {"z": 1}), ((1,), {"x": 1})]
)
def test_wrong_arguments_raise_what_the_library_raises(
    arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """The first object and later ones raise the same TypeError as Python's."""
    kind = new_point()
    with pytest.raises(TypeError) as expected:
        LIBRARY_POINT(*arguments, **named)
    for _ in range(2):
        with pytest.raises(TypeError) as raised:
            kind(*arguments, **named)
        assert str(raised.value) == str(expected.value)


def test_a_class_with_a_second_initializer_is_refused() -> None:
    """A method that would not be called is an error when the class is defined."""
    with pytest.raises(TypeError, match="__post_init__"):

        @dataclass(frozen=True, slots=True)
        class Checked:
            x: int

            def __post_init__(self) -> None:
                """Never called."""


@pytest.mark.parametrize("annotation", ["ClassVar[int]", "dataclasses.InitVar[int]", "KW_ONLY"])
def test_a_class_with_a_special_annotation_is_refused(annotation: str) -> None:
    """What is not a field is an error when the class is defined, because it would become one."""
    kind = type("Counted", (), {"__annotations__": {"x": "int", "y": annotation}})

    with pytest.raises(TypeError, match=annotation.partition("[")[0].rpartition(".")[2]):
        dataclass(slots=True)(kind)


def test_fields_have_the_annotations_as_their_types() -> None:
    """Names, types, order and options of the fields are those of Python's `dataclass`."""
    expected = [(each.name, each.type, each.default) for each in fields(LIBRARY_POINT)]

    assert [(each.name, each.type, each.default) for each in fields(Point)] == expected
    assert [each.type for each in fields(Point)] == list(Point.__annotations__.values())
    assert Point.__annotations__["unit"] == "str | None"


def test_the_library_inherits_from_a_class() -> None:
    """A frozen class of Python's `dataclass` can add fields to one of these."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Named(Single):
        name: str

    assert repr(Named(1, "a")).endswith("Named(size=1, name='a')")
    assert Named(1, "a") == Named(1.0, "a")


def test_a_frozen_object_does_not_change() -> None:
    """Fields and other attributes can be neither set nor deleted."""
    point = Point(1)

    for name in ("x", "other"):
        with pytest.raises(FrozenInstanceError):
            setattr(point, name, 5)
        with pytest.raises(FrozenInstanceError):
            delattr(point, name)
    assert point == Point(1)


def test_equal_objects_have_equal_fields_and_one_class() -> None:
    """Objects compare and hash by their fields; an object equals itself, even with NaN."""
    nan = Single(float("nan"))
    other: object = Point(1)

    assert Point(1) == Point(1.0) != Point(2)
    assert Single(1) != other
    assert nan == nan == replace(nan)  # noqa: PLR0124
    assert {Single(3): 1}[Single(3)] == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(Changing(1))


def test_an_object_that_is_not_frozen_changes() -> None:
    """Without `frozen`, fields can be set, as with Python's."""
    changing = Changing(1)
    changing.x = 2
    changing.seen.append(3)

    assert changing == Changing(2, [3]) != Changing(2)


@pytest.mark.parametrize("value", [Point(1, labels={"a": 1}), Single(2), Changing(1, [2])])
def test_objects_are_copied_and_pickled(value: Any) -> None:
    """`replace`, `copy` and `pickle` return an equal object."""
    for copied in (
        replace(value),
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),  # noqa: S301 - its own
    ):
        assert copied == value
        assert copied is not value


def test_a_class_of_few_objects_compiles_nothing() -> None:
    """Neither the definition of a class nor its first object compiles code; later objects do."""
    script = """
import sys, dataclasses
from torchmem.sample.quick_dataclass import dataclass
compiled = []
sys.addaudithook(lambda event, _: compiled.append(event) if event == "compile" else None)
@dataclass(frozen=True, slots=True)
class Point:
    x: int
Point(1)
assert not compiled, compiled
[Point(x) for x in range(20)]
assert compiled == ["compile"], compiled
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_signature_is_that_of_the_library() -> None:
    """Once some objects were created, `inspect` shows the same parameters."""
    kind = new_point()
    _ = [kind(x) for x in range(20)]
    own, other = (inspect.signature(kind).parameters for kind in (kind, LIBRARY_POINT))

    assert list(own) == list(other)
    assert [each.kind for each in own.values()] == [each.kind for each in other.values()]
