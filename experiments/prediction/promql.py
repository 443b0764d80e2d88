"""PromQL over a recording: the rules' own expressions, for all scrapes of one job at once.

A vector has an array for each set of labels, with a value for each evaluation, NaN where Prometheus
has none. Rules are evaluated at each scrape, so that every offset and range is a whole number of
scrapes. Only what rules about memory use is implemented; anything else raises NotImplementedError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import reduce
from typing import Any

import numpy as np
import promql_parser
from experiments.prediction.recordings import SCRAPE_SECONDS, Labels, Values
from numpy.lib.stride_tricks import sliding_window_view
from promql_parser import AggModifierType, LabelModifierType

Vector = dict[Labels, Values]
Operand = Vector | float
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    ">": np.greater,
    "<": np.less,
    ">=": np.greater_equal,
    "<=": np.less_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
_AGGREGATES: Mapping[str, Callable[[Values, Values], Values]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


class Evaluation:
    """The scraped series of one job, and those that its rules have recorded so far."""

    def __init__(self, series: Mapping[str, Vector], scrapes: int) -> None:
        self.series = {name: dict(vector) for name, vector in series.items()}
        self.scrapes = scrapes
        self._parsed: dict[str, Any] = {}

    def record(
        self, name: str, expression: str, labels: Mapping[str, str], interval: int = 1
    ) -> None:
        """Evaluate a recording rule and keep its result, as Prometheus does.

        `interval` is the number of scrapes from one evaluation to the next; in between, Prometheus
        finds the latest value.
        """
        recorded = self.series.setdefault(name, {})
        for found, values in self.vector(expression).items():
            kept = np.repeat(values[::interval], interval)[: len(values)]
            recorded[_relabeled(found, labels)] = kept

    def vector(self, expression: str) -> Vector:
        """Return the value of an expression that is a vector, without metric names."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = self._value(promql_parser.parse(expression))
        if isinstance(value, float):
            raise NotImplementedError(f"a scalar is not a rule: {expression}")
        return {labels: values for labels, values in value.items() if not np.isnan(values).all()}

    def _value(self, node: Any) -> Operand:
        evaluate: Mapping[str, Callable[[Any], Operand]] = {
            "NumberLiteral": lambda number: float(number.val),
            "ParenExpr": lambda inner: self._value(inner.expr),
            "UnaryExpr": lambda inner: _arithmetic("*", self._value(inner.expr), -1.0, None),
            "VectorSelector": self._selected,
            "BinaryExpr": self._binary,
            "AggregateExpr": self._aggregated,
            "Call": self._call,
        }
        kind = type(node).__name__
        if kind not in evaluate:
            raise NotImplementedError(kind)
        return evaluate[kind](node)

    def _selected(self, node: Any) -> Vector:
        """Return the series that match, each shifted by the offset."""
        found = self.series.get(node.name, {})
        matched = {
            labels: values
            for labels, values in found.items()
            if all(_matches(dict(labels), matcher) for matcher in node.matchers.matchers)
        }
        shift = _scrapes(node.offset)
        return {labels: _shifted(values, shift) for labels, values in matched.items()}

    def _binary(self, node: Any) -> Operand:
        operator = str(node.op)
        left, right = self._value(node.lhs), self._value(node.rhs)
        if operator in ("and", "or", "unless"):
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            return _set_operation(operator, left, right, _grouping(node.modifier))
        if operator in _COMPARISONS:
            is_bool = bool(node.modifier and node.modifier.return_bool)
            return _comparison(operator, left, right, node.modifier, is_bool=is_bool)
        return _arithmetic(operator, left, right, node.modifier)

    def _aggregated(self, node: Any) -> Vector:
        vector, modifier = self._value(node.expr), node.modifier
        assert isinstance(vector, dict)
        operator = str(node.op)
        if operator not in {*_AGGREGATES, "group", "count"}:
            raise NotImplementedError(operator)
        groups: dict[Labels, list[Values]] = {}
        for labels, values in vector.items():
            groups.setdefault(_grouped(labels, modifier), []).append(values)
        return {labels: _aggregate(operator, values) for labels, values in groups.items()}

    def _call(self, node: Any) -> Operand:
        name, selector = node.func.name, node.args[0]
        if name == "label_replace":
            vector = self._value(selector)
            assert isinstance(vector, dict)
            words = [argument.val for argument in node.args[1:]]
            return {_replaced(labels, *words): values for labels, values in vector.items()}
        if name == "clamp_min":
            vector, limit = self._value(selector), self._value(node.args[1])
            assert isinstance(vector, dict)
            assert isinstance(limit, float)
            return {labels: np.maximum(values, limit) for labels, values in vector.items()}
        if name not in _OVER_TIME or type(selector).__name__ != "MatrixSelector":
            raise NotImplementedError(name)
        ranged = self._selected(selector.vector_selector)
        width = _scrapes(selector.range)
        return {labels: _OVER_TIME[name](values, width) for labels, values in ranged.items()}


# --- Series and their labels


def _relabeled(labels: Labels, added: Mapping[str, str]) -> Labels:
    return frozenset({**dict(labels), **added}.items())


def _replaced(labels: Labels, target: str, replacement: str, source: str, pattern: str) -> Labels:
    """Return labels with `target` from what matches all of `source`; they stay without a match."""
    found = re.fullmatch(pattern, dict(labels).get(source, ""))
    if found is None:
        return labels
    value = found.expand(re.sub(r"\$(\d)", r"\\\1", replacement))
    kept = {name: text for name, text in labels if name != target}
    return frozenset((kept | ({target: value} if value else {})).items())


def _matches(labels: Mapping[str, str], matcher: Any) -> bool:
    value, kind = labels.get(matcher.name, ""), str(matcher.op).rpartition(".")[2]
    matches: Callable[[], bool] = {
        "Equal": lambda: value == matcher.value,
        "NotEqual": lambda: value != matcher.value,
        "Re": lambda: re.fullmatch(matcher.value, value) is not None,
        "NotRe": lambda: re.fullmatch(matcher.value, value) is None,
    }[kind]
    return matches()


def _grouped(labels: Labels, modifier: Any) -> Labels:
    if modifier is None:
        return frozenset()
    named, by = set(modifier.labels), modifier.type == AggModifierType.By
    return frozenset(pair for pair in labels if (pair[0] in named) == by)


def _grouping(modifier: Any) -> Callable[[Labels], Labels]:
    """Return what labels a binary operation matches series by."""
    matching = modifier and modifier.matching
    if not matching:
        return lambda labels: labels
    named, include = set(matching.labels), matching.type == LabelModifierType.Include
    return lambda labels: frozenset(pair for pair in labels if (pair[0] in named) == include)


def _scrapes(duration: timedelta | None) -> int:
    seconds = duration.total_seconds() if duration else 0.0
    whole = round(seconds / SCRAPE_SECONDS)
    if whole * SCRAPE_SECONDS != seconds:
        raise NotImplementedError(f"{seconds} s is not a multiple of {SCRAPE_SECONDS} s")
    return whole


def _shifted(values: Values, scrapes: int) -> Values:
    if scrapes == 0:
        return values
    return np.concatenate([np.full(min(scrapes, len(values)), np.nan), values[:-scrapes]])


# --- Operators


def _arithmetic(operator: str, left: Operand, right: Operand, modifier: Any) -> Operand:
    operation = _ARITHMETIC[operator]
    if isinstance(left, float) and isinstance(right, float):
        return float(operation(left, right))
    if isinstance(left, float) or isinstance(right, float):
        return _with_scalar(operation, left, right)
    return {
        labels: operation(ours, theirs) for labels, ours, theirs in _matched(left, right, modifier)
    }


def _with_scalar(operation: Callable[[Any, Any], Values], left: Operand, right: Operand) -> Vector:
    if isinstance(left, dict):
        return {labels: operation(values, right) for labels, values in left.items()}
    assert isinstance(right, dict)
    return {labels: operation(left, values) for labels, values in right.items()}


def _comparison(
    operator: str, left: Operand, right: Operand, modifier: Any, *, is_bool: bool
) -> Vector:
    """Keep the values of the left side, or of the vector, where the comparison holds."""
    operation = _COMPARISONS[operator]

    def compared(ours: Any, theirs: Any) -> Values:
        known = ~np.isnan(ours) & ~np.isnan(theirs)
        holds = operation(ours, theirs)
        if is_bool:
            return np.where(known, holds.astype(float), np.nan)
        kept = ours if isinstance(ours, np.ndarray) else theirs
        return np.where(holds & known, kept, np.nan)

    if isinstance(left, dict) and isinstance(right, dict):
        pairs = _matched(left, right, modifier)
        return {labels: compared(ours, theirs) for labels, ours, theirs in pairs}
    return _with_scalar(compared, left, right)


def _matched(left: Vector, right: Vector, modifier: Any) -> Iterable[tuple[Labels, Values, Values]]:
    """Yield the pairs of series that a binary operation joins, with the labels of the result."""
    key = _grouping(modifier)
    cardinality = str(modifier.card).rpartition(".")[2] if modifier else "OneToOne"
    many, one = (right, left) if cardinality == "OneToMany" else (left, right)
    ones: dict[Labels, Values] = {}
    for labels, values in one.items():
        known = ones.get(key(labels))
        ones[key(labels)] = values if known is None else np.where(np.isnan(known), values, known)
    for labels, values in many.items():
        if key(labels) in ones:
            result = labels if cardinality in ("ManyToOne", "OneToMany") else key(labels)
            pair = (values, ones[key(labels)])
            yield (result, *(reversed(pair) if cardinality == "OneToMany" else pair))


def _set_operation(
    operator: str, left: Vector, right: Vector, key: Callable[[Labels], Labels]
) -> Vector:
    if operator == "or":
        present = _presence(left, key)
        added = {
            labels: np.where(present.get(key(labels), False), np.nan, values)
            for labels, values in right.items()
        }
        return {
            labels: _first(left.get(labels), added.get(labels))
            for labels in dict.fromkeys([*left, *added])
        }
    present = _presence(right, key)
    wanted = operator == "and"
    return {
        labels: np.where(present.get(key(labels), False) == wanted, values, np.nan)
        for labels, values in left.items()
    }


def _presence(vector: Vector, key: Callable[[Labels], Labels]) -> dict[Labels, Any]:
    present: dict[Labels, Any] = {}
    for labels, values in vector.items():
        present[key(labels)] = present.get(key(labels), False) | ~np.isnan(values)
    return present


def _first(values: Values | None, others: Values | None) -> Values:
    if values is None or others is None:
        chosen = values if others is None else others
        assert chosen is not None
        return chosen
    return np.where(np.isnan(values), others, values)


def _aggregate(operator: str, group: list[Values]) -> Values:
    known = np.array([~np.isnan(values) for values in group])
    if operator in ("count", "group"):
        number = known.sum(axis=0) if operator == "count" else known.any(axis=0)
        return np.where(known.any(axis=0), number.astype(float), np.nan)
    neutral = {"sum": 0.0, "max": -np.inf, "min": np.inf}[operator]
    filled = [np.where(np.isnan(values), neutral, values) for values in group]
    return np.where(known.any(axis=0), reduce(_AGGREGATES[operator], filled), np.nan)


# --- Functions of a range


def _windows(values: Values, width: int) -> Values:
    """Return the samples of each range; Prometheus 2 includes both ends of it."""
    padded = np.concatenate([np.full(width, np.nan), values])
    return sliding_window_view(padded, width + 1)


def _extreme(values: Values, width: int, neutral: float, best: Callable[..., Values]) -> Values:
    """Return the best value of each range, from that of ranges half as wide."""
    found, covered = np.where(np.isnan(values), neutral, values), 1
    while covered < width + 1:
        shift = min(covered, width + 1 - covered)
        before = np.concatenate([np.full(min(shift, len(found)), neutral), found[:-shift]])
        found, covered = best(found, before), covered + shift
    return np.where(np.isinf(found), np.nan, found)


def _derivative(values: Values, width: int) -> Values:
    """Return the slope of the least-squares line through the samples of each range."""
    windows = _windows(values, width)
    known = ~np.isnan(windows)
    times = np.where(known, np.arange(width + 1) * SCRAPE_SECONDS, 0.0)
    filled, number = np.where(known, windows, 0.0), known.sum(axis=1)
    time_mean, mean = times.sum(axis=1) / number, filled.sum(axis=1) / number
    deviations = np.where(known, times - time_mean[:, None], 0.0)
    slope = (deviations * (filled - mean[:, None])).sum(axis=1) / (deviations**2).sum(axis=1)
    return np.where(number >= 2, slope, np.nan)


def _last(values: Values, width: int) -> Values:
    """Return the last sample of each range."""
    found = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
    recent = (found >= 0) & (np.arange(len(values)) - found <= width)
    return np.where(recent, values[found], np.nan)


_OVER_TIME: Mapping[str, Callable[[Values, int], Values]] = {
    "last_over_time": _last,
    "min_over_time": lambda values, width: _extreme(values, width, np.inf, np.minimum),
    "max_over_time": lambda values, width: _extreme(values, width, -np.inf, np.maximum),
    "deriv": _derivative,
}
