"""Prometheus and Alertmanager on loopback, with the shipped configuration."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.local_http import Answer, Request, answering
from support.waiting import until

from torchmem.explain.thresholds import Thresholds
from torchmem.manifests.render import render, write

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_INTERVAL, TEST_INTERVAL = "interval: 10s", "interval: 1s"


def free_port() -> int:
    """Return a port that the kernel assigns to no other process for a minute.

    After this side has closed a connection, the port is in TIME_WAIT. The kernel then does not
    choose it for a bind to port 0, but servers, which set SO_REUSEADDR, can listen on it.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
        with socket.create_connection(address):
            probe.accept()[0].close()
        return int(address[1])


def get(url: str) -> bytes:
    """Return the body of the response."""
    with urllib.request.urlopen(url, timeout=60) as response:  # noqa: S310 - loopback
        return bytes(response.read())


def answers(url: str) -> bool:
    """Return whether a server responds."""
    try:
        get(url)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False
    return True


@contextmanager
def running(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end of the block, with its output in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Prometheus:
    """A running Prometheus, queried over HTTP for now, or for a time in Unix seconds."""

    def __init__(self, url: str, timestamp: float | None = None) -> None:
        self.url = url
        self._time = {} if timestamp is None else {"time": timestamp}

    def when(self, condition: Callable[[Prometheus], object], pause: float = 0.1) -> Prometheus:
        """Return a Prometheus for the first time at which `condition` holds."""

        def then() -> Prometheus | None:
            # A scrape is stored within its timeout of 1 s, with the time at which it started, and
            # what rules record of it before their next evaluation, a second later.
            past = Prometheus(self.url, time.time() - 2.1)
            return past if condition(past) else None

        return until(then, 300, pause)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result vector of an instant query: a list of {metric, value}."""
        text = urllib.parse.urlencode({"query": expression, **self._time})
        response = json.loads(get(f"{self.url}/api/v1/query?{text}"))
        result: list[dict[str, Any]] = response["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Return the only value of an expression, or None if it has none."""
        result = self.query(expression)
        assert len(result) <= 1, f"{expression} has {len(result)} values"
        return float(result[0]["value"][1]) if result else None

    def alerts(self) -> list[dict[str, Any]]:
        """Return the pending and firing alerts, without the one that always fires."""
        response = json.loads(get(f"{self.url}/api/v1/alerts"))
        alerts: list[dict[str, Any]] = response["data"]["alerts"]
        return [alert for alert in alerts if alert["labels"]["severity"] != "none"]


@contextmanager
def prometheus(
    folder: Path,
    exporters: str | list[str],
    alertmanager: str | None = None,
    thresholds: Thresholds | None = None,
) -> Iterator[Prometheus]:
    """Run Prometheus with the shipped configuration, except for targets and an interval of 1 s.

    `exporters` is HOST:PORT, of one or of several; `thresholds` are those of the rules, by default
    the shipped ones.
    """
    configuration = folder / "prometheus"
    shutil.copytree(ROOT / "prometheus", configuration)
    if thresholds:
        write(configuration / "rules", render(thresholds))
    main = configuration / "prometheus.yml"
    shipped = main.read_text()
    assert SHIPPED_INTERVAL in shipped
    main.write_text(
        shipped.replace(SHIPPED_INTERVAL, TEST_INTERVAL).replace(
            "scrape_timeout: 8s", "scrape_timeout: 1s"
        )
    )
    # Groups whose rules need no more are evaluated more rarely.
    for rules in (configuration / "rules").glob("*.yml"):
        rules.write_text(re.sub(r"interval: (30s|1m)\b", TEST_INTERVAL, rules.read_text()))
    _targets(configuration, "exporters", exporters)
    _targets(configuration, "alertmanagers", alertmanager)
    address = f"127.0.0.1:{free_port()}"
    _targets(configuration, "prometheus", address)
    command = [
        "prometheus",
        f"--config.file={main}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with running(command, folder / "prometheus.log"):
        until(lambda: answers(f"http://{address}/-/ready"))
        yield Prometheus(f"http://{address}")


@contextmanager
def victoria_metrics(folder: Path) -> Iterator[str]:
    """Run VictoriaMetrics, which keeps samples of any age; yield its URL."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        "victoria-metrics",
        f"-storageDataPath={folder / 'victoria'}",
        f"-httpListenAddr={address}",
        "-retentionPeriod=100y",
        "-memory.allowedBytes=256MB",
    ]
    with running(command, folder / "victoria.log"):
        until(lambda: answers(f"http://{address}/health"))
        yield f"http://{address}"


def _targets(configuration: Path, kind: str, addresses: str | list[str] | None) -> None:
    listed = [addresses] if isinstance(addresses, str) else addresses
    targets = [{"targets": listed}] if listed else []
    (configuration / "targets" / f"{kind}.yml").write_text(json.dumps(targets))


class Receiver:
    """A webhook receiver and the alerts that it has received."""

    def __init__(self) -> None:
        self.url = ""
        self.alerts: list[dict[str, Any]] = []


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Run a webhook receiver on loopback."""
    received = Receiver()

    def receive(request: Request) -> Answer:
        received.alerts.extend(json.loads(request.body)["alerts"])
        return Answer()

    with answering(receive) as address:
        received.url = f"http://{address}/"
        yield received


@contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """Run Alertmanager with the shipped configuration and a webhook; yield HOST:PORT."""
    shipped = (ROOT / "alertmanager" / "alertmanager.yml").read_text()
    assert "  - name: default\n" in shipped
    hook = f"  - name: default\n    webhook_configs:\n      - url: {webhook}\n"
    configuration = folder / "alertmanager.yml"
    configuration.write_text(
        shipped.replace("  - name: default\n", hook).replace("group_wait: 10s", "group_wait: 1s")
    )
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus-alertmanager",
        f"--config.file={configuration}",
        f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with running(command, folder / "alertmanager.log"):
        until(lambda: answers(f"http://{address}/-/ready"))
        yield address


@contextmanager
def full_stack(folder: Path, exporter: str) -> Iterator[tuple[Prometheus, Receiver]]:
    """Run Prometheus, Alertmanager and a webhook receiver together."""
    with ExitStack() as stack:
        received = stack.enter_context(receiver())
        address = stack.enter_context(alertmanager(folder, received.url))
        yield stack.enter_context(prometheus(folder, exporter, address)), received
