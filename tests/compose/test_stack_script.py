"""deploy/stack.sh reports what is missing before it starts anything."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.stack import answers, free_port, get, running
from support.waiting import until


def stack(root: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return exit code and stderr of the script."""
    command = [str(root / "deploy" / "stack.sh"), *arguments]
    environment = {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_an_unknown_option_is_refused(root: Path) -> None:
    """An unknown option is answered with the known ones."""
    expected = "Unknown option --dmeo: run deploy/stack.sh or deploy/stack.sh --demo.\n"
    assert stack(root, "--dmeo") == (2, expected)


def test_a_missing_prometheus_is_named(root: Path, tmp_path: Path) -> None:
    """Without Prometheus, the script prints the command that installs it."""
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    (tmp_path / "bash").symlink_to("/bin/bash")
    expected = "prometheus is not on PATH: run sudo apt-get install prometheus.\n"
    assert stack(root, PATH=str(tmp_path)) == (2, expected)


@pytest.mark.stack
def test_a_missing_torchmem_is_named(root: Path) -> None:
    """Without torchmem, the script prints how to install it; TORCHMEM overrides the command."""
    expected = (
        "/nowhere/torchmem is not on PATH: run pip install '.[exporter]' in a clone of torchmem, "
        "or set TORCHMEM to the command.\n"
    )
    assert stack(root, TORCHMEM="/nowhere/torchmem") == (2, expected)


@pytest.mark.stack
def test_a_port_in_use_names_its_variable(root: Path, torchmem: str) -> None:
    """If a port is in use, the message names the variable that sets another one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        expected = (
            f"the exporter needs port {port}, which is in use: set EXPORTER_PORT to another port.\n"
        )
        assert stack(root, TORCHMEM=torchmem, EXPORTER_PORT=port) == (2, expected)


@pytest.fixture
def torchmem(tmp_path: Path) -> str:
    """A `torchmem` command of the code under test."""
    command = tmp_path / "torchmem"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchmem.cli "$@"\n')
    command.chmod(0o755)
    return str(command)


@contextmanager
def started(
    torchmem: str, folder: Path, path: str = os.environ["PATH"]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Run what `torchmem manifests stack` writes on free ports; yield its output and the ports."""
    written = folder / "manifests"
    subprocess.run([torchmem, "manifests", "stack", "--out", written], check=True)
    names = ("EXPORTER_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT", "GRAFANA_PORT")
    ports = {name: str(free_port()) for name in names}
    log = folder / "stack.log"
    environment = {**os.environ, **ports, "TORCHMEM": torchmem, "PATH": path}
    with running([str(written / "deploy" / "stack.sh")], log, environment):
        until(lambda: "Ctrl-C" in log.read_text(), pause=0.2)
        yield log.read_text(), ports


@pytest.mark.stack
def test_every_printed_address_exists(root: Path, torchmem: str, tmp_path: Path) -> None:
    """On other ports, every printed address answers, Prometheus scrapes all three programs, and
    the link of an alert leads to its runbook.
    """
    with started(torchmem, tmp_path) as (output, ports):
        addresses = re.findall(r"http://[\w.:/-]+", output)
        assert {re.findall(r":(\d+)", address)[0] for address in addresses} >= {
            ports[name] for name in ("EXPORTER_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT")
        }
        assert [address for address in addresses if not answers(address)] == []
        prometheus = f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}"
        targets = f"{prometheus}/api/v1/targets"
        until(lambda: get(targets).count(b'"scrapeUrl"') == 3)
        found = get(targets).decode()
        assert all(f"127.0.0.1:{ports[name]}/metrics" in found for name in list(ports)[:3])
        alerts = f"{prometheus}/api/v1/alerts"
        until(lambda: b"TorchmemWatchdog" in get(alerts), pause=0.5)
        (page,) = re.findall(r'"runbook_url":"([^"]*/TorchmemWatchdog.md)"', get(alerts).decode())
        assert page.startswith(prometheus)
        assert b"# TorchmemWatchdog" in get(page)


@pytest.mark.stack
def test_without_grafana_it_says_how_to_see_the_dashboards(
    root: Path, torchmem: str, tmp_path: Path
) -> None:
    """The printed command runs the Grafana of docker-compose.yml on this stack's Prometheus."""
    with started(torchmem, tmp_path) as (output, ports):
        (image,) = re.findall(r"image: (grafana/.*)", (root / "docker-compose.yml").read_text())
        command = output[output.index("docker run") : output.index("and open port")]
        assert image in command
        assert f"PROMETHEUS_URL=http://127.0.0.1:{ports['PROMETHEUS_PORT']}" in command
        assert f"{tmp_path}/manifests/dashboards:/dashboards:ro" in command


@pytest.mark.stack
def test_a_grafana_on_path_is_started(root: Path, torchmem: str, tmp_path: Path) -> None:
    """The script starts `grafana server` with the dashboards provisioned, and prints where."""
    grafana = tmp_path / "grafana"
    grafana.write_text(
        "#!/bin/sh\n"
        'test "$1" = server -a -d "$GF_PATHS_PROVISIONING" -a -d "$TORCHMEM_DASHBOARDS" || exit 1\n'
        f'exec {sys.executable} -m http.server --bind 127.0.0.1 "$GF_SERVER_HTTP_PORT"\n'
    )
    grafana.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with started(torchmem, tmp_path, path) as (output, ports):
        address = f"http://127.0.0.1:{ports['GRAFANA_PORT']}"
        assert address in output
        assert answers(address)
