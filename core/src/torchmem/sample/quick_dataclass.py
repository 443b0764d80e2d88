"""`dataclass(slots=True)` of Python's library, frozen or not, whose classes are quicker to define.

The library compiles up to eight methods for each class while its module is imported, which training
waits for. Here, `__init__` is compiled once a few objects have been created, and nothing else is.
`fields`, `replace`, `asdict` and type checkers see an ordinary dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - exports it
else:

    def dataclass(*, slots: Literal[True], frozen: bool = False) -> Callable[[type], type]:
        """Return a decorator for classes without `__post_init__`, `ClassVar`, `InitVar`, `KW_ONLY`.

        Of the options of a field, only its default has an effect.
        """
        return partial(_defined, slots=slots, frozen=frozen)


Values = Callable[[Any], tuple[Any, ...]]
_UNCOMPILED = 8
"""Objects of a class that are created before its `__init__` is compiled, which takes longer."""
_NOT_FIELDS = ("ClassVar", "InitVar", "KW_ONLY")


def _defined(kind: type[Any], *, slots: Literal[True], frozen: bool) -> type[Any]:
    made = _with_fields(kind, slots=slots)
    made.__dataclass_params__.frozen = frozen  # which a class that inherits from it must have, too
    names = [field.name for field in fields(made)]
    values = _values_getter(names)
    made.__hash__ = None  # type: ignore[assignment]
    methods = _methods(made, names, values)
    for method in (*methods, *_frozen_methods(values)) if frozen else methods:
        method.__qualname__ = f"{made.__qualname__}.{method.__name__}"
        setattr(made, method.__name__, method)
    return made


def _with_fields(kind: type[Any], *, slots: Literal[True]) -> type[Any]:
    """Let the library find the fields, and create the class again with slots."""
    annotations = kind.__annotations__
    _check(kind, f"{annotations}")
    kind.__doc__ = kind.__doc__ or kind.__name__  # or else the library parses a signature
    # The library would search the text of each annotation with regular expressions.
    kind.__annotations__ = dict.fromkeys(annotations, object)
    made: type[Any] = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(kind)
    made.__annotations__ = annotations
    for field in fields(made):
        field.type = annotations.get(field.name, field.type)
    return made


def _check(kind: type[Any], annotations: str) -> None:
    refused = [word for word in _NOT_FIELDS if word in annotations]
    if hasattr(kind, "__post_init__"):
        refused.append("__post_init__")
    if refused:
        raise TypeError(f"{kind.__name__} has {refused[0]}: use dataclasses.dataclass")


def _methods(kind: type[Any], names: Sequence[str], values: Values) -> Sequence[Callable[..., Any]]:
    coming = iter(range(_UNCOMPILED))

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        if next(coming, None) is None or not _fill(self, fields(kind), arguments, named):
            kind.__init__ = _compiled_init(kind)
            kind.__init__(self, *arguments, **named)

    def __eq__(self: Any, other: object) -> bool:  # noqa: N807
        if other.__class__ is self.__class__:
            return values(self) == values(other)
        return NotImplemented

    def __repr__(self: Any) -> str:  # noqa: N807
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({shown})"

    return __init__, __eq__, __repr__


def _frozen_methods(values: Values) -> Sequence[Callable[..., Any]]:
    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(values(self))

    def __reduce__(self: Any) -> tuple[type, tuple[Any, ...]]:  # noqa: N807 - for pickle and copy
        return type(self), values(self)

    def __setattr__(_: object, name: str, _value: object) -> NoReturn:  # noqa: N807
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(_: object, name: str) -> NoReturn:  # noqa: N807
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    return __hash__, __reduce__, __setattr__, __delattr__


def _values_getter(names: Sequence[str]) -> Values:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


def _fill(
    made: Any,
    known: Sequence[Field[Any]],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
) -> bool:
    """Set the fields; return False if the arguments are wrong, which a compiled method reports."""
    given = {**named, **dict(zip([field.name for field in known], arguments, strict=False))}
    if len(given) < len(arguments) + len(named):
        return False
    for field in known:
        if field.name in given:
            value = given.pop(field.name)
        elif field.default is not MISSING:
            value = field.default
        elif field.default_factory is not MISSING:
            value = field.default_factory()
        else:
            return False
        object.__setattr__(made, field.name, value)
    return not given


def _compiled_init(kind: type[Any]) -> Callable[..., None]:
    """Return a method that sets all fields. A field's default is called `__FIELD` in it."""
    names: dict[str, Any] = {"__set": object.__setattr__}
    parameters, body = ["self"], []
    for field in fields(kind):
        name, value = field.name, field.name
        default = field.default if field.default_factory is MISSING else field.default_factory
        if default is not MISSING:
            names[f"__{name}"] = default
        if field.default_factory is not MISSING:
            value = f"__{name}() if {name} is __{name} else {name}"
        parameters.append(name if default is MISSING else f"{name}=__{name}")
        body.append(f" __set(self, {name!r}, {value})")
    source = "\n".join([f"def __init__({', '.join(parameters)}):", *body])
    # `exec` of a text, at exit, would make CPython forget an unhandled KeyboardInterrupt.
    exec(compile(source, "<string>", "exec"), names)  # noqa: S102
    compiled: Callable[..., None] = names["__init__"]
    compiled.__qualname__ = f"{kind.__qualname__}.__init__"
    return compiled
