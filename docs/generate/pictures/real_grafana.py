"""A real Grafana: the one at GRAFANA_URL, or the binary on PATH with the shipped provisioning."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docs.generate.pictures.drawing import CHROMIUM, PACKAGES
from docs.generate.pictures.recorder import ROOT
from docs.generate.pictures.recordings import END
from support.dashboards import filled_in
from support.stack import answers, free_port, running
from support.waiting import until

Json = dict[str, Any]
BINARIES = {"grafana-server": ["grafana-server"], "grafana": ["grafana", "server"]}
DATASOURCE = "torchmem-prometheus"
"""Its uid in dashboards/provisioning/datasources."""
NEITHER = "there is no Grafana: set GRAFANA_URL, or install grafana (docs/dashboards.md)"
INTERVAL_MS, MAX_POINTS = 15_000, 1000


class Grafana:
    """The HTTP API of a Grafana; `credentials` are user:password, empty for an anonymous one."""

    def __init__(self, url: str, credentials: str = "", log: Path | None = None) -> None:
        self.url, self.log = url.rstrip("/"), log
        self.authorization = (
            f"Basic {b64encode(credentials.encode()).decode()}" if credentials else ""
        )

    def ask(self, path: str, body: object = None, method: str | None = None) -> Any:
        """Return the JSON of an answer; raises HTTPError only for a status without JSON."""
        headers = {"Content-Type": "application/json"}
        if self.authorization:
            headers["Authorization"] = self.authorization
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def add(self, prometheus: str, boards: Sequence[Json]) -> None:
        """Add the data source and the boards, which the binary reads from its provisioning."""
        self.ask(f"/api/datasources/uid/{DATASOURCE}", method="DELETE")
        source = {"name": "torchmem", "uid": DATASOURCE, "type": "prometheus", "access": "proxy"}
        self.ask("/api/datasources", {**source, "url": prometheus, "isDefault": True})
        for board in boards:
            self.ask("/api/dashboards/db", {"dashboard": board, "overwrite": True})

    def errors(self, panel: Json) -> list[str]:
        """Return the errors of a panel's queries."""
        queries = [_query(target) for target in panel.get("targets", ())]
        if not queries:
            return []
        times = {"from": str(round((END - 3600) * 1000)), "to": str(round(END * 1000))}
        answer = self.ask("/api/ds/query", {**times, "queries": queries})
        return errors_of(answer, [query["refId"] for query in queries])

    def shoot(self, uids: Sequence[str], folder: Path) -> list[Path]:
        """Take a screenshot of each board."""
        times = f"from={round((END - 3600) * 1000)}&to={round(END * 1000)}"
        shots = {
            uid: {"url": f"{self.url}/d/{uid}?kiosk&{times}", "picture": str(folder / f"{uid}.png")}
            for uid in uids
        }
        (folder / "shots.json").write_text(json.dumps(list(shots.values())))
        environment = os.environ | {
            "CHROMIUM": shutil.which(CHROMIUM) or "",
            "AUTHORIZATION": self.authorization,
        }
        command = ["node", str(PACKAGES / "shoot.mjs"), str(folder / "shots.json")]
        subprocess.run(command, env=environment, check=True)
        return [Path(shot["picture"]) for shot in shots.values()]

    def complaints(self) -> list[str]:
        """Return the lines of the log in which provisioning failed."""
        lines = self.log.read_text().splitlines() if self.log else []
        return [line for line in lines if "provisioning" in line and "level=error" in line]


def errors_of(answer: Mapping[str, Any], letters: Sequence[str]) -> list[str]:
    """Return what is wrong with an answer of /api/ds/query to the queries of these letters."""
    if "results" not in answer:
        return [str(answer.get("message", answer))]
    results = answer["results"]
    failed = [
        f"{letter}: {result['error']}" for letter, result in results.items() if "error" in result
    ]
    return failed + [f"{letter}: no answer" for letter in letters if letter not in results]


def absent() -> str | None:
    """Return why there is no Grafana, or None."""
    return None if os.environ.get("GRAFANA_URL") or _command() else NEITHER


@contextmanager
def grafana(prometheus: str, boards: Sequence[Json], folder: Path) -> Iterator[Grafana]:
    """Yield a Grafana that has the boards and this Prometheus."""
    if url := os.environ.get("GRAFANA_URL"):
        found = Grafana(url, os.environ.get("GRAFANA_CREDENTIALS", "admin:admin"))
        found.add(prometheus, boards)
        yield found
    else:
        with _started(_command(), prometheus, folder) as started:
            yield started


def _command() -> Sequence[str]:
    """Return the command that starts Grafana, empty if it is not installed."""
    return next((command for name, command in BINARIES.items() if shutil.which(name)), [])


@contextmanager
def _started(command: Sequence[str], prometheus: str, folder: Path) -> Iterator[Grafana]:
    """Run the binary with dashboards/provisioning, as deploy/stack.sh does."""
    port = free_port()
    settings = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_PATHS_DATA": str(folder),
        "GF_PATHS_LOGS": str(folder),
        "GF_PATHS_PROVISIONING": str(ROOT / "dashboards" / "provisioning"),
        "PROMETHEUS_URL": prometheus,
        "TORCHMEM_DASHBOARDS": str(ROOT / "dashboards" / "json"),
    }
    home = os.environ.get("GRAFANA_HOME", "/usr/share/grafana")
    log, url = folder / "grafana.log", f"http://127.0.0.1:{port}"
    with running([*command, f"--homepath={home}"], log, os.environ | settings):
        until(lambda: answers(f"{url}/api/health"), 120)
        yield Grafana(url, log=log)


def _query(target: Json) -> Json:
    """Return a target as the front end sends it: with the data source, and variables filled in."""
    return {
        **target,
        "expr": filled_in(target["expr"]),
        "datasource": {"type": "prometheus", "uid": DATASOURCE},
        "intervalMs": INTERVAL_MS,
        "maxDataPoints": MAX_POINTS,
    }
