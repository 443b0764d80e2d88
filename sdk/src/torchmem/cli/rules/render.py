"""From templates and thresholds to the files that Prometheus loads.

A template is a rules file with `[[ ]]` where something is filled in: the name of a threshold, of a text in `snippets`,
`of device SELECTOR FORM` for another value of the same object, or `links KIND ALERT` for an alert's links.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files

from torchmem.cli.rules.snippets import FIXED, LINKS, QUERIES, dashboard
from torchmem.cli.rules.thresholds import Thresholds, scope

HEADER = "# Rendered by `torchmem rules` from the file of thresholds: change numbers there, not here.\n"
TEMPLATES = files("torchmem.cli.rules").joinpath("templates")
_PLACEHOLDER = re.compile(r"\[\[([^\[\]]+)\]\]")
# What has the labels that an override can match.
_SOURCES = {"run": "torchmem_process_state", "instance": "up"}


def render(thresholds: Thresholds) -> dict[str, str]:
    """The text of every rules file by its name."""
    fill = _Fill(thresholds)
    return {name: HEADER + fill.text(template) for name, template in templates()}


def templates() -> Iterator[tuple[str, str]]:
    """Name and text of every template."""
    found = {file.name: file for file in TEMPLATES.iterdir() if file.name.endswith(".yml")}
    for name in sorted(found):
        yield name, found[name].read_text(encoding="utf-8")


class _Fill:
    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._known = {name: self._compared(name) for name in thresholds.values} | dict(FIXED)

    def text(self, template: str) -> str:
        """The template with everything filled in; further lines of a text are indented as its first."""
        return "\n".join(self._line(line) for line in template.split("\n"))

    def _line(self, line: str) -> str:
        indent = line[: len(line) - len(line.lstrip())]
        return _PLACEHOLDER.sub(lambda found: self._value(found[1]).replace("\n", f"\n{indent}"), line)

    def _value(self, placeholder: str) -> str:
        if placeholder in self._known:
            return self._known[placeholder]
        kind, what, form = placeholder.rsplit(" ", 2)
        return self._links(what, form) if kind == "links" else QUERIES[kind](what, form)

    def _links(self, kind: str, alert: str) -> str:
        values = self._thresholds.values
        uid, labels = LINKS[kind]
        return (
            f"runbook_url: {values['runbooks_at']}/{alert}.md\n"
            f"dashboard_url: {values['dashboards_at']}{dashboard(uid, labels)}"
        )

    def _compared(self, name: str) -> str:
        """A number; with overrides the right side of a comparison that looks the number up by run or instance."""
        default, label = self._thresholds.values[name], scope(name)
        special = [(found.pattern, found.values[name]) for found in self._thresholds.overrides if name in found.values]
        if label is None or not special:
            return default
        source = _SOURCES[label]
        chosen = [
            f"{value} * group by ({label}) ({source}{{{label}=~{json.dumps(pattern, ensure_ascii=False)}}})"
            for pattern, value in special
        ]
        looked_up = "\nor ".join([*chosen, f"{default} * group by ({label}) ({source})"])
        return f"on ({label}) group_left () (\n{looked_up}\n)"


def differences(rendered: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Names of files that are missing, changed or left over."""
    return sorted(name for name in {*rendered, *present} if rendered.get(name) != present.get(name))
