"""Strict reading of YAML settings.

PyYAML keeps the last of two equal keys, and does not know the line of a value once it has read it.
Here, a duplicate key is an error, and an error names the key, the file and the line, and suggests
the key or word that was probably meant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
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
_MAPPING_TAG = "tag:yaml.org,2002:map"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
T = TypeVar("T")


class YamlMapping(dict[str, Any]):
    """A mapping in a file, and the line of each of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


class Section:
    """The keys of one mapping in a file. Raises UsageError for a value of the wrong type.

    `name` is the dotted path to the mapping, empty at the top level. `known` are the keys it may
    have, None for any; an unknown key raises UsageError at once.
    """

    def __init__(
        self,
        file: Path,
        entries: YamlMapping,
        known: Collection[str] | None,
        name: str = "",
    ) -> None:
        self._file, self._entries, self._name = file, entries, name
        for key in entries:
            if known is not None and key not in known:
                hint = did_you_mean(key, known, f"known keys are {', '.join(known)}.")
                where = f"{file}, line {entries.lines[key]}"
                raise UsageError(f"unknown key {self._path(key)!r} in {where}: {hint}")

    def __contains__(self, key: str) -> bool:
        return self._entries.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def refuse(self, key: str, sentence: str) -> NoReturn:
        """Raise UsageError about `key`. The message is its name, file and line, then `sentence`."""
        line = f", line {self._entries.lines[key]}," if key in self._entries else ""
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
        items: list[str] = self._get(
            key, [], lambda value: isinstance(value, list), "give a list of text."
        )
        if not all(isinstance(item, str) for item in items):
            self.refuse(key, "is not a list of text: quote its items.")
        return tuple(items)

    def choices(self, key: str, choices: Mapping[str, T]) -> tuple[T, ...]:
        """Return the values that `choices` maps the listed strings to."""
        for word in (words := self.texts(key)):
            if word not in choices:
                self.refuse(key, f"has {word!r}: {_suggestion(word, choices)}")
        return tuple(choices[word] for word in words)

    def section(self, key: str, known: Collection[str] | None) -> Section:
        """Return the mapping below `key`; an empty one when the key is absent."""
        expected = "give `key: value` lines below it."
        entries = self._get(
            key, YamlMapping(), lambda value: isinstance(value, YamlMapping), expected
        )
        return Section(self._file, entries, known, self._path(key))

    def _path(self, key: str) -> str:
        shown = _shown(key)
        return f"{self._name}.{shown}" if self._name else shown

    def _get(self, key: str, default: T, fits: Callable[[Any], bool], expected: str) -> T:
        if key not in self:
            return default
        value: Any = self._entries[key]
        if not fits(value):
            self.refuse(key, f"is {_description(value)}: {expected}")
        return value  # type: ignore[no-any-return]


def read(file: Path, known: Collection[str] | None) -> Section:
    """Return the top level of a YAML file of `key: value` lines; raises UsageError."""
    return Section(file, read_plain(file), known)


def read_plain(file: Path) -> YamlMapping:
    """Return the content of a YAML file as lists, scalars and mappings with string keys.

    Raises UsageError.
    """
    try:
        content = read_bytes(file)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}; check the path.") from error
    except ValueError:
        raise UsageError(
            f"{file} is a device or larger than {MAX_BYTES >> 20} MiB: give the right file."
        ) from None
    check_kind(file, content[:HEAD_BYTES], None, "a YAML file")
    entries = _parse(content, file)
    if not isinstance(entries, YamlMapping | None):
        raise UsageError(f"{file} must hold `key: value` lines: correct it.")
    return YamlMapping() if entries is None else entries


def read_bytes(file: Path) -> bytes:
    """Return the content of a file.

    Raise OSError, or ValueError for more than MAX_BYTES and for a device, which may have no end.
    """
    if file.is_char_device() or file.stat().st_size > MAX_BYTES:
        raise ValueError("too large")
    return file.read_bytes()


def _parse(content: bytes, file: Path) -> Any:
    """Parse YAML. Constructing a scalar that its tag does not fit raises any of these errors."""
    import yaml  # only where there is a file to read: it takes a megabyte

    try:
        loader = yaml.SafeLoader(content)
        # Those of this loader alone.
        loader.yaml_constructors = {  # type: ignore[misc]
            **loader.yaml_constructors,
            _MAPPING_TAG: partial(_mapping, file),
            **{tag: partial(_number, file, loader.yaml_constructors[tag]) for tag in _NUMBER_TAGS},
        }
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
    ) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise UsageError(f"{file} is not valid YAML{line}: correct it.") from error


def _mapping(file: Path, loader: yaml.SafeLoader, node: yaml.MappingNode) -> YamlMapping:
    mapping = YamlMapping()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key.value, str):
            raise UsageError(f"a key in {file}, line {line}, is not text: correct it.")
        if key.value in mapping:
            place = f"{_shown(key.value)!r} in {file}, line {line}"
            raise UsageError(f"duplicate key {place}: keep one.")
        mapping[key.value] = loader.construct_object(value, deep=True)
        mapping.lines[key.value] = line
    return mapping


def _number(
    file: Path,
    construct: Callable[[yaml.SafeLoader, yaml.ScalarNode], float],
    loader: yaml.SafeLoader,
    node: yaml.ScalarNode,
) -> float:
    """Construct a number; one with many digits would take minutes."""
    if len(node.value) > MAX_NUMBER_LENGTH:
        line = node.start_mark.line + 1
        raise UsageError(f"the number in {file}, line {line}, is too long: correct it.")
    return construct(loader, node)


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
