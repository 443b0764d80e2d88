"""Checks of the exporter and of Prometheus, over HTTP."""

from __future__ import annotations

import math
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from torchmem.cli.http import HttpAnswer, fetch, why_not, without_credentials
from torchmem.doctor import holders, processes
from torchmem.doctor.check import Check, Place, Values
from torchmem.metrics import catalog
from torchmem.sample.sample import Process
from torchmem.sample.untrusted import sanitize_text, strict_json

MAX_CLOCK_DIFFERENCE_SECONDS = 5.0
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
COLLECTION_SECONDS = 1.0
START = "Start it: `torchmem exporter`, or the service torchmem-exporter."


Fetch = Callable[[str], HttpAnswer]


def checks(place: Place, get: Fetch = fetch) -> Iterator[Check]:
    """Yield the checks of the exporter and, if its address is given, of Prometheus."""
    yield from _exporter(place, get)
    if place.prometheus:
        yield from _prometheus(place.prometheus.rstrip("/"), get)
    else:
        step = "Pass its address: --prometheus http://HOST:9090"
        yield Check("Prometheus", "note", "not checked", step)


def _exporter(place: Place, get: Fetch) -> Iterator[Check]:
    address = place.exporter.rstrip("/")
    answer, url = _try(f"{address}/metrics", get), without_credentials(address)
    if isinstance(answer, str):
        yield Check("exporter", "problem", f"{url} does not respond: {answer}", START)
        return
    if answer.status in {401, 403}:
        found = f"{url} requires credentials"
        yield Check("exporter", "note", found, "Pass --exporter http://USER:PASSWORD@HOST:9847")
        return
    values = _values(answer)
    if answer.status != 200 or values is None:
        yield _no_exporter(url, answer)
        return
    yield _exporter_version(url, values)
    yield from _exporter_problems(values)
    yield from holders.checks(values)
    if urllib.parse.urlsplit(address).hostname in LOOPBACK:
        yield from _missing_processes(
            place.directory, values, lambda: _try(f"{address}/metrics", get)
        )
    yield _clock("exporter", answer)


def _no_exporter(url: str, answer: HttpAnswer) -> Check:
    if b"\nprometheus_build_info{" in answer.body:
        step = f"Pass it as --prometheus {url}, and an exporter as --exporter http://HOST:9847."
        return Check("exporter", "problem", f"{url} is Prometheus", step)
    found = f"{url} answers with status {answer.status} instead of torchmem's metrics"
    step = "Another program uses this port: give the exporter another one with --listen."
    return Check("exporter", "problem", found, step)


def _values(answer: HttpAnswer) -> Values | None:
    """Return the samples of a page of metrics by name; None if an exporter did not write it."""
    try:
        families = list(text_string_to_metric_families(answer.body.decode(errors="replace")))
    except ValueError:
        return None
    values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            values.setdefault(sample.name, []).append((sample.labels, sample.value))
    return values if catalog.BUILD_INFO.name in values else None


def _exporter_version(url: str, values: Values) -> Check:
    found = values[catalog.BUILD_INFO.name][0][0].get("version", "")
    ranks = len(values.get(catalog.SAMPLE_TIMESTAMP.name, ()))
    name, text = "exporter", f"{url}, version {sanitize_text(found)}, {ranks} processes"
    if found != version("torchmem"):
        step = "Run the same version everywhere: pip install --upgrade torchmem."
        return Check(name, "note", f"{text}; this command has {version('torchmem')}", step)
    return Check(name, "ok", text)


def _exporter_problems(values: Values) -> Iterator[Check]:
    for labels, value in values.get(catalog.RUN_DIRECTORY_PROBLEM.name, ()):
        if value:
            problem = sanitize_text(labels.get("problem", ""))
            step = "See the runbook TorchmemRunDirectoryUnusable."
            yield Check("its run directory", "problem", f"the exporter says: {problem}", step)
    rejected = [
        f"{value:,.0f} {sanitize_text(labels.get('reason', ''))}"
        for labels, value in values.get(catalog.REJECTED_SAMPLES.name, ())
        if value
    ]
    if rejected:
        step = "The exporter's log names file and owner: see TorchmemSamplesRejected."
        yield Check("rejected samples", "problem", ", ".join(rejected), step)


def _missing_processes(
    directory: Path, values: Values, ask_again: Callable[[], HttpAnswer | str]
) -> Iterator[Check]:
    """Yield a problem if the exporter of this machine shows none of its running processes."""
    running = processes.running(directory)
    if not running or _shows_one_of(running, values):
        return
    time.sleep(COLLECTION_SECONDS)  # its collection may have started before they did
    answer = ask_again()
    if isinstance(answer, str) or not _shows_one_of(running, _values(answer) or {}):
        found = f"the exporter shows none of the processes that run in {directory}"
        step = "Give both the same run directory: TORCHMEM_RUN_DIR, exporter --run-dir."
        yield Check("its run directory", "problem", found, step)


def _shows_one_of(running: Sequence[Process], values: Values) -> bool:
    served = {
        (labels.get("run"), labels.get("rank"))
        for labels, _ in values.get(catalog.SAMPLE_TIMESTAMP.name, ())
    }
    return any((item.run, str(item.rank)) in served for item in running)


def _prometheus(address: str, get: Fetch) -> Iterator[Check]:
    answer = _try(f"{address}/api/v1/targets?state=active", get)
    url = without_credentials(address)
    targets = None if isinstance(answer, str) else _data(answer)
    if isinstance(answer, str) or targets is None:
        reason = answer if isinstance(answer, str) else f"status {answer.status}"
        step = "Give the address of Prometheus itself, such as http://HOST:9090."
        yield Check(
            "Prometheus",
            "problem",
            f"{url} does not answer requests to Prometheus' API: {reason}",
            step,
        )
        return
    yield from _targets(url, targets)
    rules = _try(f"{address}/api/v1/rules?type=alert", get)
    yield _rules(None if isinstance(rules, str) else _data(rules))
    yield _clock("Prometheus", answer)


def _targets(url: str, data: Mapping[str, Any]) -> Iterator[Check]:
    own = [
        target
        for target in _objects(data.get("activeTargets"))
        if _object(target.get("labels")).get("job") == "torchmem"
    ]
    down = [target for target in own if target.get("health") != "up"]
    if not own:
        step = "Add the scrape job of prometheus/prometheus.yml, and reload Prometheus."
        yield Check("Prometheus", "problem", f"{url} has no target of the job torchmem", step)
    elif down:
        target = down[0]
        address = sanitize_text(str(target.get("scrapeUrl")))
        reason = sanitize_text(str(target.get("lastError"))) or "no scrape yet"
        step = f"Open {address} on the machine of Prometheus."
        found = f"{len(down)} of {len(own)} exporters are down; {address}: {reason}"
        yield Check("Prometheus", "problem", found, step)
    else:
        yield Check("Prometheus", "ok", f"{url} scrapes {len(own)} exporters")


def _rules(data: Mapping[str, Any] | None) -> Check:
    names = {
        str(rule.get("name"))
        for group in _objects((data or {}).get("groups"))
        for rule in _objects(group.get("rules"))
    }
    own = [name for name in names if name.startswith("Torchmem")]
    if not own:
        step = "Load prometheus/rules/*.yml with rule_files, and reload Prometheus."
        return Check("alert rules", "problem", "Prometheus has no alerts of torchmem", step)
    return Check("alert rules", "ok", f"{len(own)} alerts are loaded")


def _clock(name: str, answer: HttpAnswer) -> Check:
    subject = f"clock of {name}"
    if answer.date is None:
        return Check(subject, "note", f"unknown: {name} sends no Date header")
    difference = time.time() - answer.date
    found = f"{difference:+.0f} s from this machine's"
    if math.fabs(difference) > MAX_CLOCK_DIFFERENCE_SECONDS:
        step = "Synchronize the clocks: timedatectl set-ntp true."
        return Check(subject, "problem", found, step)
    return Check(subject, "ok", found)


def _try(url: str, get: Fetch) -> HttpAnswer | str:
    """Return the answer, or the reason why there is none."""
    try:
        return get(url)
    except (OSError, ValueError) as error:
        return why_not(error)


def _data(answer: HttpAnswer) -> Mapping[str, Any] | None:
    """Return `data` of an answer of Prometheus' API; None for anything else."""
    try:
        content = strict_json(answer.body)
    except ValueError:
        return None
    data = _object(content).get("data")
    return data if isinstance(data, dict) else None


def _object(value: Any) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a JSON list; none for anything else."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
