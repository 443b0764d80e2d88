"""Strict reading of YAML settings.

An error names the key, the file and the line, and suggests the key or word that was probably meant.
Duplicate keys are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.sample.file_kinds import HEAD_BYTES, check_kind
from torchmem.sample.untrusted import printable

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
MAX_NUMBER_LENGTH = 100
MAX_SHOWN = 80  # characters of a key or a value in an error
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """A value and its line. `value` is a scalar, a list of entries or a mapping of str to Entry."""

    value: Any
    line: int


class Section:
    """The keys of one mapping in a file. Raises UsageError for a value of the wrong type.

    `name` is the dotted path to the mapping, empty at the top level. `known` are the keys it may
    have, None for any; an unknown key raises UsageError at once.
    """

    def __init__(
        self,
        file: Path,
        entries: Mapping[str, YamlEntry],
        known: Collection[str] | None,
        name: str = "",
    ) -> None:
        self._file, self._entries, self._name = file, entries, name
        for key in entries:
            if known is not None and key not in known:
                hint = did_you_mean(key, known, f"known keys are {', '.join(known)}.")
                line = entries[key].line
                raise UsageError(f"unknown key {self._path(key)!r} in {file}, line {line}: {hint}")

    def __contains__(self, key: str) -> bool:
        return key in self._entries and self._entries[key].value is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def refuse(self, key: str, sentence: str) -> NoReturn:
        """Raise UsageError about `key`. The message is its name, file and line, then `sentence`."""
        line = f", line {self._entries[key].line}," if key in self._entries else ""
        raise UsageError(f"{self._path(key)} in {self._file}{line} {sentence}")

    def text(self, key: str, default: str = "") -> str:
        """Return a string."""
        expected = "give text, and quote it if YAML reads it as another type."
        return self._get(key, default, lambda value: isinstance(value, str), expected)

    def scalar(self, key: str, default: str) -> str:
        """Return a string or a number as a string."""
        return str(
            self._get(
                key, default, lambda value: isinstance(value, (str, int, float)), "give text."
            )
        )

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return self._get(key, default, lambda value: isinstance(value, bool), "give true or false.")

    def number(self, key: str, default: float, unit: str = "seconds") -> float:
        """Return a positive number below 1e9."""
        return self._get(key, default, _is_positive, f"give a positive number of {unit}.")

    def count(self, key: str, default: int, unit: str) -> int:
        """Return a whole number from 0 to 2^31 - 1."""
        return self._get(key, default, _is_count, f"give a whole number of {unit}, 0 or more.")

    def choice(self, key: str, choices: Iterable[str], default: str) -> str:
        """Return one of the strings `choices`."""
        value = self.text(key, default)
        if value not in (words := list(choices)) and value != default:
            self.refuse(key, f"is {value!r}: {_suggestion(value, words)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty when the key is absent."""
        entries: list[YamlEntry] = self._get(
            key, [], lambda value: isinstance(value, list), "give a list of text."
        )
        for entry in entries:
            if not isinstance(entry.value, str):
                place = f"{self._path(key)} in {self._file}, line {entry.line},"
                raise UsageError(f"{place} is not a list of text: quote its items.")
        return tuple(entry.value for entry in entries)

    def choices(self, key: str, choices: Mapping[str, T]) -> tuple[T, ...]:
        """Return the values that `choices` maps the listed strings to."""
        for word in (words := self.texts(key)):
            if word not in choices:
                self.refuse(key, f"has {word!r}: {_suggestion(word, choices)}")
        return tuple(choices[word] for word in words)

    def section(self, key: str, known: Collection[str] | None) -> Section:
        """Return the mapping below `key`; an empty one when the key is absent."""
        empty: dict[str, YamlEntry] = {}
        entries = self._get(
            key, empty, lambda value: isinstance(value, dict), "give `key: value` lines below it."
        )
        return Section(self._file, entries, known, self._path(key))

    def _path(self, key: str) -> str:
        shown = _shown(key)
        return f"{self._name}.{shown}" if self._name else shown

    def _get(self, key: str, default: T, fits: Callable[[Any], bool], expected: str) -> T:
        if key not in self:
            return default
        value: Any = self._entries[key].value
        if not fits(value):
            self.refuse(key, f"is {_description(value)}: {expected}")
        return value  # type: ignore[no-any-return]


def read(file: Path, known: Collection[str] | None) -> Section:
    """Return the top level of a YAML file of `key: value` lines; raises UsageError."""
    return Section(file, _entries(file), known)


def read_plain(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file as lists, scalars and mappings with string keys.

    Raises UsageError.
    """
    plain: dict[str, Any] = _plain(YamlEntry(_entries(file), 1), {})
    return plain


def _plain(entry: YamlEntry, converted: dict[int, Any]) -> Any:
    """Convert an entry and everything below it, each once: aliases share one value."""
    if id(entry.value) not in converted:
        value = entry.value
        if isinstance(value, dict):
            value = {key: _plain(item, converted) for key, item in value.items()}
        elif isinstance(value, list):
            value = [_plain(item, converted) for item in value]
        converted[id(entry.value)] = value
    return converted[id(entry.value)]


def _entries(file: Path) -> dict[str, YamlEntry]:
    try:
        content = read_bytes(file)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}; check the path.") from error
    except ValueError:
        raise UsageError(
            f"{file} is a device or larger than {MAX_BYTES >> 20} MiB: give the right file."
        ) from None
    check_kind(file, content[:HEAD_BYTES], None, "a YAML file")
    entries = _parse(content, file).value
    if not isinstance(entries, dict | None):
        raise UsageError(f"{file} must hold `key: value` lines: correct it.")
    return entries or {}


def read_bytes(file: Path) -> bytes:
    """Return the content of a file.

    Raise OSError, or ValueError for more than MAX_BYTES and for a device, which may have no end.
    """
    if file.is_char_device() or file.stat().st_size > MAX_BYTES:
        raise ValueError("too large")
    return file.read_bytes()


def _parse(content: bytes, file: Path) -> YamlEntry:
    """Parse YAML. Constructing a scalar that its tag does not fit raises any of these errors."""
    import yaml  # only where there is a file to read: it takes a megabyte

    try:
        loader = yaml.SafeLoader(content)
        try:
            node = loader.get_single_node()
            return YamlEntry(None, 1) if node is None else _Converter(loader, file).entry(node)
        finally:
            loader.dispose()
    except (
        yaml.YAMLError,
        UnicodeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
    ) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise UsageError(f"{file} is not valid YAML{line}: correct it.") from error


class _Converter:
    """Converts nodes to entries, each node once: aliases of aliases do not multiply."""

    def __init__(self, loader: yaml.SafeLoader, file: Path) -> None:
        self._loader, self._file = loader, file
        self._converted: dict[int, YamlEntry] = {}

    def entry(self, node: yaml.Node) -> YamlEntry:
        """Return the entry of a node and everything below it."""
        if id(node) not in self._converted:
            self._converted[id(node)] = YamlEntry(self._value(node), node.start_mark.line + 1)
        return self._converted[id(node)]

    def _value(self, node: yaml.Node) -> Any:
        import yaml

        if isinstance(node, yaml.SequenceNode):
            return [self.entry(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if node.tag in _NUMBER_TAGS and len(node.value) > MAX_NUMBER_LENGTH:
            line = node.start_mark.line + 1
            raise UsageError(f"the number in {self._file}, line {line}, is too long: correct it.")
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, YamlEntry]:
        import yaml

        entries: dict[str, YamlEntry] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"a key in {self._file}, line {line}, is not text: correct it.")
            name: str = key.value
            if name in entries:
                place = f"{_shown(name)!r} in {self._file}, line {line}"
                raise UsageError(f"duplicate key {place}: keep one.")
            entries[name] = replace(self.entry(value), line=line)
        return entries


def _shown(key: str) -> str:
    return printable(key[:MAX_SHOWN])


def _description(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else repr(value)[:MAX_SHOWN]


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < 1e9


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _suggestion(word: str, choices: Collection[str]) -> str:
    return did_you_mean(word, choices, f"give one of {', '.join(choices)}.")
