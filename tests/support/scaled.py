"""The programs of deploy/scale on loopback, from its configuration files: shards, store, rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.stack import ROOT, answers, free_port, running
from support.waiting import until

SCALE = ROOT / "deploy" / "scale"
SHARD = (SCALE / "prometheus-shard.yml").read_text()
_INTERVAL = re.compile(r"interval: (15s|30s|1m|5m)\b")
_STORE, _ALERTMANAGER = "victoria-metrics:8428", "alertmanager:9093"


def command(unit: str, changed: Mapping[str, str] | None = None) -> list[str]:
    """Return the command of a systemd unit, with texts replaced."""
    text = (SCALE / unit).read_text().replace("\\\n", " ")
    for shipped, here in (changed or {}).items():
        assert shipped in text, shipped
        text = text.replace(shipped, here)
    (found,) = re.findall(r"^ExecStart=/usr/bin/(.+)$", text, re.MULTILINE)
    return str(found).split()


def shard(number: int, shards: int = 4, store: str = _STORE) -> str:
    """Return the configuration of one of several servers that write to a store (HOST:PORT)."""
    assert SHARD.count('"0"') == 2
    modulus = SHARD.replace("modulus: 4", f"modulus: {shards}")
    return modulus.replace('"0"', f'"{number}"').replace(_STORE, store)


@contextmanager
def scaled(
    folder: Path, shards: int, exporters: Sequence[str], alertmanager: str
) -> Iterator[tuple[str, list[str]]]:
    """Run everything with an interval of 1 s; yield the URLs of the store and of the shards.

    `exporters` and `alertmanager` are HOST:PORT.
    """
    for path in (ROOT / "prometheus" / "rules").glob("*.yml"):
        faster = _INTERVAL.sub("interval: 1s", path.read_text())
        (folder / "rules").mkdir(exist_ok=True)
        (folder / "rules" / path.name).write_text(faster)
    (folder / "targets").mkdir()
    (folder / "targets" / "exporters.yml").write_text(json.dumps([{"targets": list(exporters)}]))
    with ExitStack() as stack:
        store = stack.enter_context(_store(folder))
        servers = [
            stack.enter_context(_server(folder, number, shards, store)) for number in range(shards)
        ]
        stack.enter_context(_rules(folder, store, alertmanager))
        yield f"http://{store}", servers


@contextmanager
def _store(folder: Path) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    changed = {"/var/lib/victoria-metrics": str(folder / "store"), "=:8428": f"={address}"}
    # A share of the memory would be too much beside other tests. Rules are evaluated each second.
    own = ["-memory.allowedBytes=256MB", "-search.latencyOffset=1s"]
    with running([*command("victoria-metrics.service", changed), *own], folder / "store.log"):
        until(lambda: answers(f"http://{address}/health"))
        yield address


@contextmanager
def _server(folder: Path, number: int, shards: int, store: str) -> Iterator[str]:
    configuration = folder / f"prometheus-{number}.yml"
    faster = _INTERVAL.sub("interval: 1s", shard(number, shards, store))
    configuration.write_text(faster.replace("scrape_timeout: 10s", "scrape_timeout: 1s"))
    address = f"127.0.0.1:{free_port()}"
    server = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / f'shard-{number}'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with running(server, folder / f"shard-{number}.log"):
        until(lambda: answers(f"http://{address}/-/ready"))
        yield f"http://{address}"


@contextmanager
def _rules(folder: Path, store: str, alertmanager: str) -> Iterator[None]:
    changed = {
        "/etc/torchmem/rules": str(folder / "rules"),
        _STORE: store,
        _ALERTMANAGER: alertmanager,
        "-evaluationInterval=30s": "-evaluationInterval=1s",
        "=:8880": f"=127.0.0.1:{free_port()}",
    }
    with running(command("vmalert.service", changed), folder / "vmalert.log"):
        yield
