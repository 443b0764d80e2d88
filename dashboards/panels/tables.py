"""Tables that join several queries on their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards.panels.style import Json, Query, Text, framed, ref, target
from grafana_foundation_sdk.builders import common, table
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the values of `query`, or its label `label`, or a label that all queries share.

    `words` says what to show instead of a value, `colors` how to colour it, `link` where a click leads, `bar` that the
    cell is filled in proportion, from 0 to 1.
    """

    heading: str
    query: str | None = None
    label: str | None = None
    unit: str | None = None
    colors: Mapping[str, str] | None = None
    words: Mapping[str, str] | None = None
    link: tuple[str, str] | None = None
    bar: bool = False
    width: int | None = None


def joined_table(
    text: Text, columns: Sequence[Column], *, sort: str = "", descending: bool = False
) -> table.Panel:
    """One row per label set that the queries of the columns share, columns in the given order, sorted by `sort`."""
    panel = framed(table.Panel(), text, units.Short, span=24, height=9)
    panel.with_transformation(models.DataTransformerConfig("merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig("organize", options=_arrangement(columns))
    )
    for index, query in enumerate(_column_queries(columns)):
        panel.with_target(target(Query(query), index).instant().format(PromQueryFormat.TABLE))
    for column in columns:
        if style := _column_style(column):
            panel.override_by_name(column.heading, style)
    return (
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(descending)])
        if sort
        else panel
    )


def _column_queries(columns: Sequence[Column]) -> list[str]:
    """Each query once, also where several columns show a label of it."""
    return list(dict.fromkeys(column.query for column in columns if column.query))


def _arrangement(columns: Sequence[Column]) -> Json:
    """Options of Grafana's `organize`: which fields of the joined frame are shown, in which order, under which name."""
    values = {query: f"Value #{ref(index)}" for index, query in enumerate(_column_queries(columns))}
    shown = [column.label or values[column.query or ""] for column in columns]
    return {
        "excludeByName": {
            name: True for name in ("Time", "uuid", *values.values()) if name not in shown
        },
        "indexByName": {name: index for index, name in enumerate(shown)},
        "renameByName": {name: column.heading for name, column in zip(shown, columns, strict=True)},
    }


def _column_style(column: Column) -> list[models.DynamicConfigValue]:
    style = []
    if column.unit:
        style.append(models.DynamicConfigValue("unit", column.unit))
    if column.colors or column.words:
        style.append(
            models.DynamicConfigValue("mappings", [{"type": "value", "options": _mapped(column)}])
        )
    if column.colors:
        style.append(models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
    if column.bar:
        style += [models.DynamicConfigValue("min", 0), models.DynamicConfigValue("max", 1)]
        style.append(models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": "blue"}))
        style.append(
            models.DynamicConfigValue("custom.cellOptions", {"type": "gauge", "mode": "basic"})
        )
    if column.link:
        title, url = column.link
        style.append(models.DynamicConfigValue("links", [{"title": title, "url": url}]))
    if column.width:
        style.append(models.DynamicConfigValue("custom.width", column.width))
    return style


def _mapped(column: Column) -> dict[str, dict[str, str]]:
    colors, words = column.colors or {}, column.words or {}
    return {
        value: {"text": words.get(value, value)}
        | ({"color": colors[value]} if value in colors else {})
        for value in [*words, *(value for value in colors if value not in words)]
    }
