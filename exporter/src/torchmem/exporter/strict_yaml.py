"""YAML configuration read strictly: what is wrong is told by key, file and line, with what was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from torchmem.sample.errors import UsageError, did_you_mean

MAX_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value and where it stands. `value` is a scalar, a list of entries or a mapping of text to entries."""

    value: Any
    line: int


class Section:
    """The keys of one mapping of a file; asked by key and type, it raises UsageError for what does not fit.

    `name` is the dotted path to it, empty at the top; `known` the keys that it may have, None for any.
    """

    def __init__(
        self,
        file: Path,
        entries: Mapping[str, Entry],
        known: Collection[str] | None,
        name: str = "",
    ) -> None:
        self._file, self._entries, self._name = file, entries, name
        for key in entries:
            if known is not None and key not in known:
                hint = did_you_mean(key, known, f"known keys are {', '.join(known)}.")
                raise UsageError(
                    f"Unknown key {self._path(key)!r} in {file}, line {entries[key].line}: {hint}"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._entries and self._entries[key].value is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def refuse(self, key: str, sentence: str) -> NoReturn:
        """Raise UsageError about `key`: `sentence` follows its name and place."""
        line = f", line {self._entries[key].line}," if key in self._entries else ""
        raise UsageError(f"{self._path(key)} in {self._file}{line} {sentence}")

    def text(self, key: str, default: str = "") -> str:
        """Text."""
        return self._get(
            key,
            default,
            lambda value: isinstance(value, str),
            "give text, in quotes if YAML reads it so.",
        )

    def scalar(self, key: str, default: str) -> str:
        """Text, or a number as text."""
        return str(
            self._get(
                key, default, lambda value: isinstance(value, (str, int, float)), "give text."
            )
        )

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._get(key, default, lambda value: isinstance(value, bool), "give true or false.")

    def number(self, key: str, default: float, unit: str = "seconds") -> float:
        """A positive number."""
        return self._get(key, default, _is_positive, f"give a positive number of {unit}.")

    def count(self, key: str, default: int, unit: str) -> int:
        """A whole number of 0 or more."""
        return self._get(key, default, _is_count, f"give a whole number of {unit}, 0 or more.")

    def one_of(self, key: str, choices: Iterable[str], default: str) -> str:
        """One of these words."""
        value = self.text(key, default)
        if value not in (words := list(choices)) and value != default:
            self.refuse(key, f"is {value!r}: {_meant(value, words)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of text; nothing when the key is absent."""
        entries: list[Entry] = self._get(
            key, [], lambda value: isinstance(value, list), "give a list of text."
        )
        for entry in entries:
            if not isinstance(entry.value, str):
                raise UsageError(
                    f"{self._path(key)} in {self._file}, line {entry.line}, is no list of text: correct it."
                )
        return tuple(entry.value for entry in entries)

    def each_of(self, key: str, choices: Mapping[str, T]) -> tuple[T, ...]:
        """A list of these words, as what each of them stands for."""
        for word in (words := self.texts(key)):
            if word not in choices:
                self.refuse(key, f"has {word!r}: {_meant(word, choices)}")
        return tuple(choices[word] for word in words)

    def section(self, key: str, known: Collection[str] | None) -> Section:
        """The mapping below `key`; an empty one when the key is absent."""
        nothing: dict[str, Entry] = {}
        entries = self._get(
            key, nothing, lambda value: isinstance(value, dict), "give `key: value` lines below it."
        )
        return Section(self._file, entries, known, self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _get(self, key: str, default: T, fits: Callable[[Any], bool], wanted: str) -> T:
        if key not in self:
            return default
        value: Any = self._entries[key].value
        if not fits(value):
            self.refuse(key, f"is {shown(value)}: {wanted}")
        return value  # type: ignore[no-any-return]


def read(file: Path, known: Collection[str] | None) -> Section:
    """The top of a YAML file that holds `key: value` lines; raises UsageError."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"Cannot read the configuration file {file}: {error.strerror}; check the path."
        ) from error
    if len(content) > MAX_BYTES:
        raise UsageError(
            f"The configuration file {file} is larger than {MAX_BYTES >> 20} MiB: give the right file."
        )
    entry = _parse(content, file)
    if not isinstance(entry.value, dict | None):
        raise UsageError(f"The configuration file {file} must hold `key: value` lines: correct it.")
    return Section(file, entry.value or {}, known)


def shown(value: Any) -> str:
    """A value as an error names it."""
    return (
        "a list"
        if isinstance(value, list)
        else "a mapping"
        if isinstance(value, dict)
        else repr(value)[:80]
    )


def _parse(content: bytes, file: Path) -> Entry:
    """YAML's own messages name the line; Python's ValueError comes from a scalar such as 2001-99-99."""
    try:
        loader = yaml.SafeLoader(content)
        try:
            node = loader.get_single_node()
            return Entry(None, 1) if node is None else _Entries(loader, file).of(node)
        finally:
            loader.dispose()
    except (
        yaml.YAMLError,
        UnicodeError,
        ValueError,
        ArithmeticError,
        LookupError,
        RecursionError,
    ) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise UsageError(
            f"The configuration file {file} is not valid YAML{line}: correct it."
        ) from error


class _Entries:
    """Turns nodes into entries, each once, so that aliases of aliases do not multiply."""

    def __init__(self, loader: yaml.SafeLoader, file: Path) -> None:
        self._loader, self._file = loader, file
        self._known: dict[int, Entry] = {}

    def of(self, node: yaml.Node) -> Entry:
        """The entry of a node and all below it."""
        if id(node) not in self._known:
            self._known[id(node)] = Entry(self._value(node), node.start_mark.line + 1)
        return self._known[id(node)]

    def _value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item) for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            return self._loader.construct_object(node)
        found: dict[str, Entry] = {}
        for key, value in node.value:
            name, line = str(key.value)[:80], key.start_mark.line + 1
            if name in found:
                raise UsageError(
                    f"The key {name!r} is in {self._file}, line {line}, once more: keep one."
                )
            found[name] = replace(self.of(value), line=line)
        return found


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < 1e9


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _meant(word: str, choices: Collection[str]) -> str:
    return did_you_mean(word, choices, f"give one of {', '.join(choices)}.")
