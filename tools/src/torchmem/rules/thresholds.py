"""The kinds of thresholds: what may stand in the file, and how it is written in PromQL.

The file of thresholds: read strictly, so that a misspelt name is an error and not a default.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from torchmem.allocator.sizes import parse_size
from torchmem.exporter import strict_yaml
from torchmem.sample.errors import UsageError, did_you_mean

Value = int | float | str | list[int]

# Prometheus' durations: largest unit first, each at most once (prometheus/common, model.ParseDuration).
_DURATION = re.compile(r"(?=\d)(\d+d)?(\d+h)?(\d+m)?(\d+s)?")


class WrongValueError(ValueError):
    """A value that its threshold cannot take; the text says what it can."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` checks a value from the file and gives it as PromQL or text; `compared`: it is the side of a comparison.

    Only what is compared can differ between runs: a duration is fixed in the rule.
    """

    parse: Callable[[object], str]
    compared: bool = True


def kind(name: str) -> Kind:
    """The kind of a threshold by its name, which ends in its unit."""
    return next(found for suffix, found in _KINDS.items() if name.endswith(suffix))


def _number(value: object, wanted: str, low: float, high: float) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise WrongValueError(wanted)
    return f"{value:.15g}"


def _ratio(value: object) -> str:
    return _number(value, "a share between 0 and 1, such as 0.05", 0, 1)


def _positive(value: object) -> str:
    return _number(value, "a number above 0", 1e-9, 1e15)


def _factor(value: object) -> str:
    return _number(value, "a factor of 1 or more, such as 1.5", 1, 1e6)


def _bytes(value: object) -> str:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return str(parse_size(value))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 60:
        raise WrongValueError("a size such as 1GiB or 512MiB, or a number of bytes")
    return str(value)


def _duration(value: object) -> str:
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise WrongValueError("a duration such as 30s, 5m or 1h30m")
    return value


def _codes(value: object) -> str:
    """Integers as the alternatives of a regular expression."""
    if not isinstance(value, list) or any(
        isinstance(code, bool) or not isinstance(code, int) for code in value
    ):
        raise WrongValueError("a list of numbers, such as [13, 31]")
    return "|".join(map(str, value))


def _text(value: object) -> str:
    """Text that stands within double quotes or in a link as it is."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.:/@%?&=+~-]*", value):
        raise WrongValueError("text without spaces and quotes")
    return value


_KINDS: Mapping[str, Kind] = {
    "_ratio": Kind(_ratio),
    "_bytes": Kind(_bytes),
    "_seconds": Kind(_positive),
    "_per_minute": Kind(_positive),
    "_steps": Kind(_positive),
    "_factor": Kind(_factor),
    "_for": Kind(_duration, compared=False),
    "_xids": Kind(_codes, compared=False),
    "_job": Kind(_text, compared=False),
    "_at": Kind(_text, compared=False),
}


DEFAULTS = files("torchmem.rules").joinpath("thresholds.yml")
_EXAMPLE = 'match: {run: "llm-.*"}'


@dataclass(frozen=True, slots=True)
class Override:
    """Other values where `label` (run or instance) matches `pattern` as a whole."""

    label: str
    pattern: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Every threshold as PromQL or text, by name, and the exceptions, the first of which decides."""

    values: Mapping[str, str]
    overrides: tuple[Override, ...] = ()


def scope(name: str) -> str | None:
    """The label by which a threshold can be overridden: instance for GPUs and nodes, run for ranks, or None."""
    if not kind(name).compared:
        return None
    return "instance" if name.startswith("gpu_") else "run"


def defaults_text() -> str:
    """The shipped file, with its comments."""
    return DEFAULTS.read_text(encoding="utf-8")


def defaults() -> Thresholds:
    """The shipped thresholds."""
    return _checked(yaml.safe_load(defaults_text()), "the shipped thresholds", {})


def load(file: Path) -> Thresholds:
    """The thresholds of `file`; what it leaves out has its shipped value. Raises UsageError."""
    return _checked(strict_yaml.read_plain(file), str(file), defaults().values)


def _checked(content: dict[str, Any], where: str, known: Mapping[str, str]) -> Thresholds:
    names = [*known, "overrides"] if known else list(content)
    for name in content:
        if name not in names:
            raise UsageError(f"Unknown threshold {name!r} in {where}: {_hint(name, names)}")
    own = {
        name: _value(name, value, where) for name, value in content.items() if name != "overrides"
    }
    values = {**known, **own}
    listed = content.get("overrides") or []
    if not isinstance(listed, list):
        raise UsageError(
            f"overrides in {where} is {listed!r}: give a list, each entry with {_EXAMPLE}."
        )
    entries = enumerate(listed, start=1)
    return Thresholds(
        values, tuple(_override(entry, f"override {n} of {where}", values) for n, entry in entries)
    )


def _hint(name: object, names: list[str]) -> str:
    return did_you_mean(str(name), names, "`torchmem rules --defaults` shows all.")


def _value(name: str, value: object, where: str) -> str:
    try:
        return kind(name).parse(value)
    except WrongValueError as wanted:
        raise UsageError(f"{name} in {where} is {value!r}: give {wanted}.") from None


def _override(entry: object, where: str, known: Mapping[str, str]) -> Override:
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("match"), dict)
        or len(entry["match"]) != 1
    ):
        raise UsageError(f"The {where} has no `match` with one label: begin it with {_EXAMPLE}.")
    ((label, pattern),) = entry["match"].items()
    if label not in {"run", "instance"}:
        raise UsageError(
            f"The {where} matches the label {label!r}: match run, or instance for GPUs and nodes."
        )
    _check_pattern(pattern, where)
    for name in entry:
        _check_overridable(name, label, where, known)
    return Override(
        label,
        pattern,
        {name: _value(name, entry[name], where) for name in entry if name != "match"},
    )


def _check_pattern(pattern: object, where: str) -> None:
    """Raises UsageError; Prometheus' expressions are RE2, which lacks what Python has beyond it."""
    try:
        sound = (
            isinstance(pattern, str)
            and re.compile(pattern)
            and not re.search(r"\(\?[=!<>(#]|\\[1-9]|[*+?}]\+", pattern)
        )
    except re.error:
        sound = False
    if not sound:
        raise UsageError(
            f"The {where} matches {pattern!r}: give a regular expression as Prometheus takes it (RE2)."
        )


def _check_overridable(name: object, label: str, where: str, known: Mapping[str, str]) -> None:
    if name == "match":
        return
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"Unknown threshold {name!r} in {where}: {_hint(name, list(known))}")
    wanted = scope(name)
    if wanted is None:
        raise UsageError(
            f"{name} in {where} is the same everywhere: Prometheus cannot set it for one {label}."
        )
    if wanted != label:
        raise UsageError(
            f"{name} in {where} cannot differ by {label}: match {wanted} in an override of its own."
        )
