"""Rules files for Prometheus, rendered from the templates and the thresholds.

A template is a rules file with placeholders in `[[ ]]`: the name of a threshold, a name in TEXTS,
`of OBJECT SELECTOR FORMAT` for another value of the alert's object, `with OBJECT SELECTOR` for the
start of a Go template about it, or `links KIND ALERT` for the alert's links. `ooms WINDOW` and
`retries WINDOW` are how much these counters rose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from textwrap import indent

from torchmem.explain.growth import MIN_ROOM_RATIO
from torchmem.explain.headline import ONSET_SUMMARIES
from torchmem.explain.oom_report import CAUSE_SUMMARIES
from torchmem.explain.threat_words import (
    FAILS,
    FLUSHES,
    FRAGMENTED,
    KEPT_TENSORS,
    LEAKS,
    NEARLY_FULL,
    NO_ROOM_FOR_LIBRARIES,
)
from torchmem.explain.thresholds import Thresholds, scope
from torchmem.manifests import counters, prediction
from torchmem.metrics import catalog
from torchmem.sample.errors import UsageError
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind
from torchmem.sample.xids import XIDS

# The start of the first line of every rendered file.
RENDERED_BY = "# Rendered by `torchmem manifests rules`"
HEADER = f"{RENDERED_BY} from the thresholds file. Change the thresholds, not this file.\n"
TEMPLATES = files("torchmem.manifests").joinpath("rule_templates")
_PLACEHOLDER = re.compile(r"\[\[([^\[\]]+)\]\]")
# A link of an alert that only the Prometheus or the Grafana of docker-compose.yml completes.
_HALF_LINK = re.compile(
    r'^ +(?:runbook_url: "\{\{ \$externalURL|dashboard_url: /).*\n', re.MULTILINE
)


def _xid_explanation() -> str:
    """Return a Go template that explains the XID of an alert."""
    branches = "\nelse ".join(
        f'if eq $labels.xid "{xid.number}" }}}}XID {xid.summary}.{{{{'
        for xid in XIDS.values()
        if xid.severity != "application"
    )
    return f"{{{{ {branches}\nelse }}}}NVIDIA's XID catalog explains it.{{{{ end }}}}"


# Labels of torchmem_process_info that name a team, the first one that is set counts.
TEAM_LABELS = ("team", "slurm_job_account", "namespace")

# Labels that identify the object of an alert.
OBJECTS: Mapping[str, tuple[str, ...]] = {
    "device": ("instance", "uuid", "rank", "pid", "run"),
    "process": ("instance", "rank", "pid", "run"),
    "gpu": ("instance", "uuid"),
}


# The end of the Go template that formats a value.
FORMATS: Mapping[str, str] = {
    "bytes": "humanize1024 }}B",
    "share": "humanizePercentage }}",
    "count": 'printf "%.0f" }}',
    "decimals": 'printf "%.2f" }}',
    "duration": "humanizeDuration }}",
}


def _with(labels: tuple[str, ...], selector: str) -> str:
    """Return the start of a Go template that holds the series with the same labels, if any."""
    name, _, matchers = selector.rstrip("}").partition("{")
    # %q of Go escapes quotes and backslashes as PromQL reads them.
    matched = ",".join([*filter(None, [matchers]), *(f"{label}=%q" for label in labels)])
    arguments = " ".join(f"$labels.{label}" for label in labels)
    return f"with printf `{name}{{{matched}}}`\n{arguments} | query"


def _query(labels: tuple[str, ...], selector: str, form: str) -> str:
    """Return a Go template for the value of another series with the same labels, empty if absent.

    `selector` is a metric with or without matchers.
    """
    # The dash takes away the line break before it, which keeps the lines of a rules file short.
    value = f"{{{{- . | first | value | {FORMATS[form]}{{{{ end }}}}"
    return f"{{{{ {_with(labels, selector)} }}}}\n{value}"


def _bytes(selector: str) -> str:
    """Return a Go template for another value of the alert's rank, in bytes; empty if absent."""
    return _query(OBJECTS["device"], selector, "bytes")


def _oom_explanation() -> str:
    """Return a Go template that explains the cause and the onset of an OOM, with its first advice.

    The onset and the advice are those of the newest OOM, if that has the alert's cause.
    """
    meanings: dict[str, str] = {
        cause: f"{text[0].upper()}{text[1:]}." for cause, text in CAUSE_SUMMARIES.items()
    }
    why_now: dict[str, str] = {
        onset: f"Why now: {text}." for onset, text in ONSET_SUMMARIES.items()
    }
    about = _with(("cause", *OBJECTS["device"]), catalog.LAST_OOM_INFO.name)
    return (
        f"{_branches('$labels.cause', meanings)}\n"
        f'{{{{- $onset := "" }}}}{{{{ $remedy := "" }}}}{{{{ {about} }}}}\n'
        '{{- $onset = . | first | label "onset" }}{{ $remedy = . | first | label "remedy" }}'
        "{{ end }}\n"
        f"{_branches('$onset', why_now)}\n"
        "{{- if $remedy }} {{ $remedy }}.{{ end }}"
    )


def _branches(value: str, texts: Mapping[str, str]) -> str:
    """Return a Go template with the text for a value, after a space; empty for other values."""
    branches = "".join(
        f'{{{{- else if eq {value} "{name}" }}}} {text}\n' for name, text in texts.items()
    )
    return f"{branches.replace('else if', 'if', 1).rstrip()}{{{{ end }}}}"


def _onset() -> str:
    """Return a Go template with the onset of an OOM, after a comma; empty if it is unknown."""
    known = _with(("cause", *OBJECTS["device"]), f'{catalog.LAST_OOM_INFO.name}{{onset!=""}}')
    return f'{{{{- {known} }}}}, {{{{ . | first | label "onset" }}}}{{{{ end }}}}'


def _advice(otherwise: RemedyKind) -> str:
    """Return a Go template with the first advice of the alert's rank, or else this remedy."""
    known = _with(OBJECTS["device"], f'{catalog.THREAT_INFO.name}{{remedy!=""}}')
    words = REMEDY_WORDS[otherwise]
    return (
        f'{{{{ {known} }}}}{{{{ . | first | label "remedy" }}}}{{{{ else }}}}{words}{{{{ end }}}}.'
    )


def _kill_explanation() -> str:
    """Return a Go template that names what killed a process."""
    series = catalog.KILL_CAUSE.name
    return (
        f"{{{{ with printf `{series}{{instance=%q,rank=%q,pid=%q,run=%q}} == 1`\n"
        "$labels.instance $labels.rank $labels.pid $labels.run | query }}\n"
        '{{- if eq (. | first | label "cause") "host_memory" }}The kernel\'s OOM killer ended it,\n'
        "because host memory was full.\n"
        "{{- else }}The kernel's OOM killer did not end it: the scheduler or a user sent SIGKILL.\n"
        "{{- end }}{{ else }}Usual reasons: the kernel's OOM killer because host memory was full\n"
        "(see journalctl -k), a limit of the scheduler, or kill -9.{{ end }}"
    )


def _grown_component() -> str:
    """Return a Go template that names the component that grows, empty if none is known.

    It is the one that the rank names, else the one that grew most in 30 minutes.
    """
    named = _with(OBJECTS["device"], f'{catalog.THREAT_INFO.name}{{component!=""}}')
    grown = _with(OBJECTS["device"], "rank:torchmem_component_bytes:increase30m")
    grown = grown.replace("`rank", "`topk(1, rank").replace("}`", "} > 0)`")
    name = '{{ . | first | label "component" }}'
    return (
        f"{{{{- {named} }}}} Most of it is in\n{name}.{{{{ else }}}}\n"
        f"{{{{- {grown} }}}} Most of it is in\n{name}:\n"
        "{{ . | first | value | humanize1024 }}B.{{ end }}{{ end }}"
    )


def _with_neighbor() -> str:
    """Return the start of a Go template about the process that grew most beside the alert's rank.

    The rank's own process is known by its run and rank: its pid may be that of a container.
    """
    series = "process:nvml_process_memory_bytes:increase30m"
    return (
        f"with printf `topk(1, {series}{{instance=%q,uuid=%q}}\n"
        f"unless {series}{{run=%q,rank=%q}})`\n"
        "$labels.instance $labels.uuid $labels.run $labels.rank | query"
    )


def _neighbor() -> str:
    """Return a Go template that names this process."""
    place = '{{ with . | first | label "pod" }}, pod {{ . }}{{ end }}'
    user = '{{ with . | first | label "user" }}, user {{ . }}{{ end }}'
    return (
        f'{{{{ . | first | label "name" }}}} (pid {{{{ . | first | label "pid" }}}}{user}{place})'
    )


def _owner() -> str:
    """Return the processes with the label `team`, which is the first of some labels that is set."""
    teams = ", ".join(f'"{label}"' for label in TEAM_LABELS)
    joined = f'label_join({catalog.PROCESS_INFO.name}, "team", ";", {teams})'
    return f'label_replace({joined}, "team", "$1", "team", ";*([^;]*).*")'


def _increases() -> Iterator[tuple[str, str]]:
    for window in counters.SECONDS:
        ranks, newest = counters.KNOWN_RANKS, catalog.LAST_OOM_TIMESTAMP.name
        yield f"ooms {window}", counters.ooms(counters.POSITIVE_OOMS, ranks, newest, window)
        yield f"retries {window}", counters.retries(catalog.ALLOC_RETRIES.name, window)


def _threats() -> Iterator[tuple[str, str]]:
    """Yield what the page says about a threat, with the values of the alert's rank.

    The alert's own value is that of torchmem_threat_bytes.
    """
    value = "{{ humanize1024 $value }}B"
    headroom = {
        flush: _bytes(f'torchmem_headroom_bytes{{flush="{flush}"}}') for flush in ("false", "true")
    }
    sentences = {
        "fragmented": FRAGMENTED.format(stranded=value, headroom=headroom["false"], end=FLUSHES),
        "fails": FRAGMENTED.format(stranded=value, headroom=headroom["true"], end=FAILS),
        "leak": LEAKS.format(
            what=KEPT_TENSORS, pace=_bytes(f'{catalog.GROWTH.name}{{kind="kept"}}')
        ),
        "full": NEARLY_FULL.format(headroom=value),
        "library": NO_ROOM_FOR_LIBRARIES.format(
            free=_bytes(catalog.DRIVER_FREE.name), releasable=value
        ),
    }
    for name, text in sentences.items():
        yield f"threat {name}", f"{text[0].lower()}{text[1:]}"


TEXTS: Mapping[str, str] = {
    "live": "and on (job, instance, rank, pid, run) rank:torchmem_process_state:live",
    # For rules that read no record of another group, which may be older than what they filter.
    "live now": (
        "and on (job, instance, rank, pid, run)\n"
        'torchmem_process_state{state=~"running|stalled"} == 1'
    ),
    "min_room_ratio": str(MIN_ROOM_RATIO),
    "rank": "{{ $labels.run }} rank {{ $labels.rank }}",
    "gpu": "{{ $labels.instance }} GPU {{ or $labels.gpu $labels.uuid }}",
    "Rank": (
        "Rank {{ $labels.rank }} (pid {{ $labels.pid }}) of run {{ $labels.run }} "
        "on {{ $labels.instance }}"
    ),
    "Rank and GPU": (
        "Rank {{ $labels.rank }} (pid {{ $labels.pid }}) of run {{ $labels.run }}\n"
        "on GPU {{ or $labels.gpu $labels.uuid }} of {{ $labels.instance }}"
    ),
    "GPU": "GPU {{ or $labels.gpu $labels.uuid }} of {{ $labels.instance }} ({{ $labels.uuid }})",
    "failed": (
        "ended with an uncaught exception or an exit code, and not out of memory.\n"
        "The traceback or message is in the output of the script."
    ),
    "grown component": _grown_component(),
    "with neighbor": _with_neighbor(),
    "neighbor": _neighbor(),
    "kill cause": _kill_explanation(),
    "oom cause": _oom_explanation(),
    "oom onset": _onset(),
    "owner": _owner(),
    "planned worth": prediction.planned_worth(),
    "prediction worth": prediction.worth(),
    # How inference servers name their processes, of which the kernel keeps 15 characters: vLLM's
    # set_process_title (VLLM::EngineCore, VLLM::Worker_TP0), SGLang's sglang::scheduler_TP0,
    # tritonserver and triton_python_backend_stub, ollama and ollama_llama_server, TGI's
    # text-generation-server.
    "serving processes": "(?i)(vllm|sglang|triton|ollama|llama-server|text-generation|trtllm).*",
    "xid explanation": _xid_explanation(),
    **dict(_increases()),
    **dict(_threats()),
    **{f"advice {remedy}": _advice(remedy) for remedy in REMEDY_WORDS},
    **{f"words {remedy}": words for remedy, words in REMEDY_WORDS.items()},
}

# The dashboards' variables by the label that they filter; see dashboards/board.py.
_VARIABLES = {label: label for label in ("run", "instance", "rank", "launch")} | {"uuid": "gpu"}
# The dashboard that an alert links to, and the labels that set its variables.
LINKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "device": ("torchmem-training-memory", ("run", "launch", "instance", "uuid", "rank")),
    "process": ("torchmem-training-memory", ("run", "launch", "instance", "rank")),
    "run": ("torchmem-training-memory", ("run", "launch", "instance")),
    "oom": ("torchmem-oom", ("run", "launch", "instance", "rank")),
    "node": ("torchmem-node", ("instance", "uuid")),
    "self": ("torchmem-self", ("instance",)),
    "monitoring": ("torchmem-self", ()),
}
# Metrics that have the label of an override for every run or node.
_METRICS_WITH = {"run": "torchmem_process_state", "instance": "up"}


def render(thresholds: Thresholds) -> dict[str, str]:
    """Return the text of every rules file by name."""
    return {name: HEADER + _filled(text, thresholds) for name, text in templates()}


def templates() -> Iterator[tuple[str, str]]:
    """Return name and text of every template."""
    for file in sorted(TEMPLATES.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yml"):
            yield file.name, file.read_text(encoding="utf-8")


def _filled(template: str, thresholds: Thresholds) -> str:
    """Replace the placeholders; further lines of a value are indented like the first one."""

    def replaced(match: re.Match[str], indent: str) -> str:
        return _text(match[1], thresholds).replace("\n", f"\n{indent}")

    return "\n".join(
        _PLACEHOLDER.sub(partial(replaced, indent=line[: len(line) - len(line.lstrip())]), line)
        for line in template.split("\n")
    )


def _text(placeholder: str, thresholds: Thresholds) -> str:
    if placeholder in thresholds.values:
        return _threshold(placeholder, thresholds)
    if placeholder in TEXTS:
        return TEXTS[placeholder]
    kind, name, *selector, last = placeholder.split(" ")
    if kind == "links":
        return _links(name, last, thresholds)
    if kind == "with":
        return _with(OBJECTS[name], " ".join([*selector, last]))
    return _query(OBJECTS[name], " ".join(selector), last)


def _threshold(name: str, thresholds: Thresholds) -> str:
    """Return a number; with overrides, an expression that looks it up by run or instance."""
    default, label = thresholds.values[name], scope(name)
    overrides = [override for override in thresholds.overrides if name in override.values]
    if label is None or not overrides:
        return default
    metric = _METRICS_WITH[label]
    alternatives = [
        f"{override.values[name]} * group by ({label}) "
        f"({metric}{{{label}=~{json.dumps(override.pattern, ensure_ascii=False)}}})"
        for override in overrides
    ]
    lookup = "\nor ".join([*alternatives, f"{default} * group by ({label}) ({metric})"])
    return f"on ({label}) group_left () (\n{lookup}\n)"


def _links(kind: str, alert: str, thresholds: Thresholds) -> str:
    uid, labels = LINKS[kind]
    names = _VARIABLES | ({"launch": "launches"} if kind == "oom" else {})
    variables = "&".join(
        f"var-{names[label]}={{{{ $labels.{label} | urlquery }}}}" for label in labels
    )
    page = f"{uid}?{variables}" if variables else uid
    return (
        f'runbook_url: "{_absolute(thresholds.values["runbooks_at"])}/{alert}.md"\n'
        f"dashboard_url: {thresholds.values['dashboards_at']}/d/{page}"
    )


def _absolute(address: str) -> str:
    """Return a URL unchanged, and a path as a Go template with the URL of Prometheus in front."""
    return f"{{{{ $externalURL }}}}{address}" if address.startswith("/") else address


def prometheus_rule(thresholds: Thresholds, namespace: str) -> str:
    """Return all groups as a PrometheusRule, an object of the Prometheus Operator.

    Its Prometheus serves no runbooks and no dashboards, so only links with a whole URL are kept.
    """
    groups = _HALF_LINK.sub("", _groups(render(thresholds)))
    return (
        f"{HEADER}apiVersion: monitoring.coreos.com/v1\n"
        "kind: PrometheusRule\n"
        "metadata:\n"
        "  name: torchmem\n"
        f"  namespace: {namespace}\n"
        "  labels:\n"
        "    app.kubernetes.io/part-of: torchmem\n"
        f"spec:\n  groups:\n{indent(groups, '  ')}"
    )


def at(place: Path, rendered: Mapping[str, str]) -> tuple[Path, Mapping[str, str]]:
    """Return the folder and the files for a place: a folder, or one .yml file for all groups."""
    if place.suffix not in {".yml", ".yaml"} or place.is_dir():
        return place, rendered
    return place.parent, {place.name: f"{HEADER}groups:\n{_groups(rendered)}"}


def _groups(rendered: Mapping[str, str]) -> str:
    return "".join(text.partition("groups:\n")[2] for text in rendered.values())


def outdated(folder: Path, rendered: Mapping[str, str]) -> list[str]:
    """Return the names of files in the folder that are missing, changed or no longer rendered."""
    present = _present(folder)
    obsolete = _obsolete(present, rendered)
    return sorted(
        name for name in {*rendered, *obsolete} if rendered.get(name) != present.get(name)
    )


def write(folder: Path, rendered: Mapping[str, str], *, force: bool = False) -> None:
    """Write every file, and remove files of an earlier rendering.

    Raises UsageError, and writes nothing, if a file was not rendered and `force` is not set.
    """
    try:
        present = _present(folder)
        foreign = [name for name in rendered if (folder / name).exists() and name not in present]
        if foreign and not force:
            raise UsageError(
                f"{', '.join(foreign)} in {folder} would be replaced, and `torchmem "
                "manifests rules` did not write it: add --force, or give another --out."
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in _obsolete(present, rendered):
            (folder / name).unlink()
        for name, text in rendered.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the rules to {folder} ({error.strerror}): give another --out."
        ) from error


def _obsolete(present: Mapping[str, str], rendered: Mapping[str, str]) -> set[str]:
    """Return the rendered files that belong to no rule any more; none beside a single file."""
    names = {name for name, _ in templates()}
    return present.keys() - rendered.keys() if names <= rendered.keys() else set()


def _present(folder: Path) -> dict[str, str]:
    """Return the rendered files in a folder by name; other files are left alone."""
    texts = {
        file.name: file.read_text(encoding="utf-8", errors="replace")
        for pattern in ("*.yml", "*.yaml")
        for file in folder.glob(pattern)
    }
    return {name: text for name, text in texts.items() if text.startswith(RENDERED_BY)}
