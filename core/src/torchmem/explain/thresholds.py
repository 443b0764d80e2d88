"""The thresholds of the alerts, which the screens also use; thresholds.yml explains each.

A file of the user is read strictly: an unknown name is an error. The suffix of a threshold's name
determines which values it accepts and how PromQL writes them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from torchmem.allocator.sizes import parse_size
from torchmem.sample.errors import UsageError, did_you_mean

THRESHOLDS_VARIABLE = "TORCHMEM_THRESHOLDS"
"""The environment variable with the user's file, for screens, the exporter and rules."""
_EXAMPLE = 'match: {run: "llm-.*"}'

# Prometheus' durations: largest unit first, each at most once (prometheus/common, ParseDuration).
_DURATION = re.compile(r"(?=\d)(\d+d)?(\d+h)?(\d+m)?(\d+s)?")


class InvalidValueError(ValueError):
    """A value that a threshold does not accept; the message describes what it accepts."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of threshold.

    `parse` checks a value from the file and returns it as PromQL or text. A threshold is
    `overridable` if it is one side of a comparison; a duration is fixed in its rule.
    """

    parse: Callable[[object], str]
    overridable: bool = True


@dataclass(frozen=True, slots=True)
class Override:
    """Other values for the runs or instances whose `label` fully matches `pattern`."""

    label: str
    pattern: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """The thresholds that the screens apply to one rank, by their names in the file."""

    fragmentation_ratio: float
    stranded_ratio: float
    stranded_bytes: float
    headroom_ratio: float
    near_capacity_ratio: float
    gpu_library_bytes: float
    gpu_assigned_empty_seconds: float
    library_releasable_bytes: float
    host_available_ratio: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Every threshold as PromQL or text by name, and the overrides; the first match applies."""

    values: Mapping[str, str]
    overrides: tuple[Override, ...] = ()

    def limits(self, run: str, host: str) -> Limits:
        """Return the thresholds for a rank.

        An override for instances applies if it matches the name of the host: a screen does not know
        the instance of Prometheus.
        """
        labels = {"run": run, "instance": host}
        return Limits(**{f.name: float(self._value(f.name, labels)) for f in fields(Limits)})

    def _value(self, name: str, labels: Mapping[str, str]) -> str:
        matching = (
            override.values[name]
            for override in self.overrides
            if name in override.values and re.fullmatch(override.pattern, labels[override.label])
        )
        return next(matching, self.values[name])


def defaults_text() -> str:
    """Return the shipped thresholds file, with its comments."""
    return files("torchmem.explain").joinpath("thresholds.yml").read_text(encoding="utf-8")


@cache
def defaults() -> Thresholds:
    """Return the shipped thresholds. Their file needs no YAML parser: each one has a line."""
    lines = [line.split(": ", 1) for line in defaults_text().splitlines() if line[:1].isalpha()]
    content = {name: _scalar(value) for name, value in lines}
    return _thresholds(content, "the shipped thresholds", {})


def _scalar(text: str) -> object:
    """Return a number, a list or quoted text; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def changed(content: Mapping[str, Any], where: str) -> Thresholds:
    """Return the thresholds in a file's content, with shipped values for those it omits.

    `where` names the file in errors. Raises UsageError.
    """
    return _thresholds(content, where, defaults().values)


def scope(name: str) -> str | None:
    """Return the label by which a threshold can be overridden, or None.

    It is `instance` for thresholds of GPUs, `run` for those of ranks.
    """
    if not _kind(name).overridable:
        return None
    return "instance" if name.startswith("gpu_") else "run"


def _thresholds(content: Mapping[str, Any], where: str, known: Mapping[str, str]) -> Thresholds:
    content = dict(content)
    overrides = content.pop("overrides", None) or []
    for name in content:
        if known and name not in known:
            raise _unknown(name, where, [*known, "overrides"])
    values = {**known, **{name: _value(name, value, where) for name, value in content.items()}}
    if not isinstance(overrides, list):
        message = f"overrides in {where} is {overrides!r}: give a list of entries with {_EXAMPLE}."
        raise UsageError(message)
    return Thresholds(
        values,
        tuple(
            _override(entry, f"override {number} of {where}", values)
            for number, entry in enumerate(overrides, start=1)
        ),
    )


def _unknown(name: object, where: str, known: list[str]) -> UsageError:
    hint = did_you_mean(str(name), known, "`torchmem manifests rules --defaults` lists all.")
    return UsageError(f"unknown threshold {name!r} in {where}: {hint}")


def _value(name: str, value: object, where: str) -> str:
    try:
        return _kind(name).parse(value)
    except InvalidValueError as expected:
        raise UsageError(f"{name} in {where} is {value!r}: give {expected}.") from None


def _override(entry: object, where: str, known: Mapping[str, str]) -> Override:
    match = entry.get("match") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(match, dict) or len(match) != 1:
        raise UsageError(f"the {where} has no `match` with one label: start it with {_EXAMPLE}.")
    ((label, pattern),) = match.items()
    if label not in {"run", "instance"}:
        message = f"the {where} matches the label {label!r}: match run, or instance for GPUs."
        raise UsageError(message)
    if not _is_re2(pattern):
        raise UsageError(
            f"the {where} matches {pattern!r}: give a regular expression (RE2 syntax)."
        )
    values = {}
    for name, value in entry.items():
        if name != "match":
            _check_overridable(name, label, where, known)
            values[name] = _value(name, value, where)
    return Override(label, pattern, values)


def _is_re2(pattern: object) -> bool:
    """Return whether Prometheus accepts a pattern; RE2 lacks some of Python's syntax."""
    try:
        return (
            isinstance(pattern, str)
            and bool(re.compile(pattern))
            # Lookarounds, atomic groups, conditions, comments, backreferences, possessive
            # quantifiers.
            and not re.search(r"\(\?[=!<>(#]|\\[1-9]|[*+?}]\+", pattern)
        )
    except re.error:
        return False


def _check_overridable(name: object, label: str, where: str, known: Mapping[str, str]) -> None:
    if not isinstance(name, str) or name not in known:
        raise _unknown(name, where, list(known))
    supported = scope(name)
    if supported is None:
        message = f"{name} in {where} cannot be overridden: it is the same for every {label}."
        raise UsageError(message)
    if supported != label:
        message = f"{name} in {where} cannot differ by {label}: match {supported} in its own entry."
        raise UsageError(message)


def _kind(name: str) -> Kind:
    """Return the kind of a threshold by the suffix of its name."""
    found = next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)
    if found is None:
        raise UsageError(f"the threshold {name} has no known suffix: use {', '.join(_KINDS)}.")
    return found


def _number(value: object, expected: str, low: float, high: float) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidValueError(expected)
    return f"{value:.15g}"


def _ratio(value: object) -> str:
    return _number(value, "a ratio between 0 and 1, such as 0.05", 0, 1)


def _positive(value: object) -> str:
    return _number(value, "a number above 0", 1e-9, 1e15)


def _factor(value: object) -> str:
    return _number(value, "a factor of 1 or more, such as 1.5", 1, 1e6)


def _bytes(value: object) -> str:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return str(parse_size(value))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 60:
        raise InvalidValueError("a size such as 1GiB or 512MiB, or a number of bytes")
    return str(value)


def _duration(value: object) -> str:
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise InvalidValueError("a duration such as 30s, 5m or 1h30m")
    return value


def _codes(value: object) -> str:
    """Return integers as the alternatives of a regular expression."""
    if not isinstance(value, list) or any(type(code) is not int for code in value):
        raise InvalidValueError("a list of numbers, such as [13, 31]")
    return "|".join(map(str, value))


def _text(value: object) -> str:
    """Return text that needs no escaping within double quotes or a link."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.:/@%?&=+~-]*", value):
        raise InvalidValueError("text without spaces and quotes")
    return value


_KINDS: Mapping[str, Kind] = {
    "_ratio": Kind(_ratio),
    "_bytes": Kind(_bytes),
    "_seconds": Kind(_positive),
    "_per_minute": Kind(_positive),
    "_steps": Kind(_positive),
    "_inodes": Kind(_positive),
    "_requests": Kind(_positive),
    "_factor": Kind(_factor),
    "_for": Kind(_duration, overridable=False),
    "_xids": Kind(_codes, overridable=False),
    "_job": Kind(_text, overridable=False),
    "_at": Kind(_text, overridable=False),
}
