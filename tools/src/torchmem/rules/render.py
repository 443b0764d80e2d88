"""Words that many rules share, by the name under which the templates ask for them.

From templates and thresholds to the files that Prometheus loads.

A template is a rules file with `[[ ]]` where something is filled in: the name of a threshold, of a text in `snippets`,
`of device SELECTOR FORM` for another value of the same object, or `links KIND ALERT` for an alert's links.

What `torchmem rules` does, by its flags.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from torchmem.rules.thresholds import Thresholds, defaults, defaults_text, load, scope
from torchmem.sample.errors import UsageError

PROCESS = ("instance", "rank", "pid", "run")
DEVICE = ("instance", "uuid", "rank", "pid", "run")
GPU = ("instance", "uuid")

# How a value is written, after the query gave it.
_FORMATS = {
    "bytes": "humanize1024 }}B",
    "share": "humanizePercentage }}",
    "count": 'printf "%.0f" }}',
    "decimals": 'printf "%.2f" }}',
    "duration": "humanizeDuration }}",
}

FIXED: Mapping[str, str] = {
    "live": "and on (job, instance, rank, pid, run) rank:torchmem_process_state:live",
    "rank": "{{ $labels.run }} rank {{ $labels.rank }}",
    "gpu": "{{ $labels.instance }} GPU {{ or $labels.gpu $labels.uuid }}",
    "Rank": "Rank {{ $labels.rank }} (pid {{ $labels.pid }}) of run {{ $labels.run }} on {{ $labels.instance }}",
    "Rank and GPU": (
        "Rank {{ $labels.rank }} (pid {{ $labels.pid }}) of run {{ $labels.run }}\n"
        "on GPU {{ or $labels.gpu $labels.uuid }} of {{ $labels.instance }}"
    ),
    "GPU": "GPU {{ or $labels.gpu $labels.uuid }} of {{ $labels.instance }} ({{ $labels.uuid }})",
    "remedy": (
        "Restart the run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        "(PYTORCH_ALLOC_CONF from PyTorch 2.10 on)."
    ),
}


def query(labels: tuple[str, ...], selector: str, form: str) -> str:
    """Text of an annotation: the value of another series of the same object; nothing where it has none.

    `selector` is a metric's name with or without matchers.
    """
    name, _, matchers = selector.rstrip("}").partition("{")
    wanted = ",".join([*([matchers] if matchers else []), *(f"{label}=%q" for label in labels)])
    arguments = " ".join(f"$labels.{label}" for label in labels)
    return (
        f"{{{{ with printf `{name}{{{wanted}}}`\n{arguments} | query }}}}\n{{{{- . | first | value | {_FORMATS[form]}"
        "{{ end }}"
    )


def dashboard(uid: str, labels: tuple[str, ...]) -> str:
    """Path of a dashboard with its variables set to what the alert is about."""
    chosen = "&".join(
        f"var-{_VARIABLES[label]}={{{{ $labels.{label} | urlquery }}}}" for label in labels
    )
    return f"/d/{uid}?{chosen}" if chosen else f"/d/{uid}"


# The dashboards' variables by the label they choose; see dashboards/queries.py.
_VARIABLES = {"run": "run", "instance": "node", "uuid": "gpu", "rank": "rank"}
LINKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "device": ("torchmem-training-memory", ("run", "instance", "uuid", "rank")),
    "process": ("torchmem-training-memory", ("run", "instance", "rank")),
    "oom": ("torchmem-oom", ("run", "instance", "rank")),
    "node": ("torchmem-node", ("instance", "uuid")),
    "self": ("torchmem-self", ("instance",)),
}

QUERIES: Mapping[str, Callable[[str, str], str]] = {
    "of device": lambda selector, form: query(DEVICE, selector, form),
    "of process": lambda selector, form: query(PROCESS, selector, form),
    "of gpu": lambda selector, form: query(GPU, selector, form),
}


HEADER = (
    "# Rendered by `torchmem rules` from the file of thresholds: change numbers there, not here.\n"
)
TEMPLATES = files("torchmem.rules").joinpath("templates")
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
        return _PLACEHOLDER.sub(
            lambda found: self._value(found[1]).replace("\n", f"\n{indent}"), line
        )

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
        special = [
            (found.pattern, found.values[name])
            for found in self._thresholds.overrides
            if name in found.values
        ]
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


def run(arguments: argparse.Namespace) -> int:
    """Print the defaults, write the rules, check those that are there, or print them all. Raises UsageError."""
    if arguments.defaults:
        sys.stdout.write(defaults_text())
        return 0
    rendered = render(load(arguments.thresholds) if arguments.thresholds else defaults())
    if arguments.check:
        return _check(arguments.check, rendered)
    if arguments.out is None:
        raise UsageError("Say where the rules shall go: torchmem rules --out DIR.")
    _write(arguments.out, rendered)
    print(
        f"{len(rendered)} files in {arguments.out}; check them with: promtool check rules {arguments.out}/*.yml"
    )
    return 0


def _check(folder: Path, rendered: dict[str, str]) -> int:
    different = differences(rendered, _present(folder))
    if different:
        print(f"torchmem: {folder} is not what the thresholds give ({', '.join(different)}): run `torchmem rules "
              f"--out {folder}` with the same thresholds.", file=sys.stderr)  # fmt: skip
    return 1 if different else 0


def _write(folder: Path, rendered: dict[str, str]) -> None:
    """Write every file, and remove those that an earlier rendering left and this one has no more."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _present(folder).keys() - rendered.keys():
            (folder / name).unlink()
        for name, text in rendered.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"Cannot write the rules to {folder}: {error.strerror}; give another --out."
        ) from error


def _present(folder: Path) -> dict[str, str]:
    """The rules in a folder that were rendered by us; files of others are left alone."""
    found = {
        file.name: file.read_text(encoding="utf-8", errors="replace")
        for file in folder.glob("*.yml")
    }
    return {name: text for name, text in found.items() if text.startswith(HEADER)}
