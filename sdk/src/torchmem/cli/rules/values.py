"""The kinds of thresholds: what may stand in the file, and how it is written in PromQL."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = int | float | str | list[int]

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
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
    size = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if size:
        return str(round(float(size[1]) * _UNITS[size[2]]))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 60:
        raise WrongValueError("a size such as 1GiB or 512MiB, or a number of bytes")
    return str(value)


def _duration(value: object) -> str:
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise WrongValueError("a duration such as 30s, 5m or 1h30m")
    return value


def _codes(value: object) -> str:
    """Integers as the alternatives of a regular expression."""
    if not isinstance(value, list) or any(isinstance(code, bool) or not isinstance(code, int) for code in value):
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
