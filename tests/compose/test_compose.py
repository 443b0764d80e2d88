"""The compose files agree with the other shipped files, and open nothing to the network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EACH = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@EACH
def test_ports_are_open_to_this_machine_only(service: dict[str, Any]) -> None:
    """Every published port is bound to 127.0.0.1."""
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in service.get("ports", []))


@EACH
def test_images_are_pinned(service: dict[str, Any]) -> None:
    """Each image has an exact version; that of the exporter is the version of this package."""
    name, tag = service["image"].split(":")
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)
    if name == "torchmem/exporter":
        assert f'\nversion = "{tag}"\n' in (ROOT / "pyproject.toml").read_text()


@EACH
def test_every_mount_exists(service: dict[str, Any]) -> None:
    """Each file and folder that a service mounts exists, and is mounted read-only."""
    for mount in service.get("volumes", []):
        source, _, mode = mount.split(":") if mount.count(":") == 2 else (*mount.split(":"), "rw")
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            assert mode == "ro", mount
        else:
            assert source in COMPOSE["volumes"]


@EACH
def test_services_have_no_capabilities(service: dict[str, Any]) -> None:
    """No service has a capability or can gain one, and each is restarted after a failure."""
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"


@EACH
def test_every_service_has_a_health_check(service: dict[str, Any]) -> None:
    """Each service has a health check in the compose file or in its Dockerfile."""
    if "build" in service:
        assert "HEALTHCHECK" in (ROOT / service["build"]["dockerfile"]).read_text()
    else:
        assert service["healthcheck"]["test"][0] == "CMD"


def test_the_targets_are_services() -> None:
    """Prometheus addresses services of the compose file by name and port; the demo is optional."""
    for kind in ("exporters", "alertmanagers"):
        for group in yaml.safe_load((ROOT / f"prometheus/targets-compose/{kind}.yml").read_text()):
            for target in group["targets"]:
                name, port = target.split(":")
                assert f"127.0.0.1:{port}:{port}" in SERVICES[name]["ports"]
    scraped = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())[
        "scrape_configs"
    ][0]
    assert [{"demo"}] == [
        set(SERVICES[name]["profiles"]) for name in scraped["dns_sd_configs"][0]["names"]
    ]


def test_both_environments_have_the_same_target_files() -> None:
    """The folder that compose mounts over prometheus/targets has the same files."""
    names = [
        sorted(path.name for path in (ROOT / "prometheus" / kind).iterdir())
        for kind in ("targets", "targets-compose")
    ]
    assert names[0] == names[1]


def test_grafana_has_no_default_password() -> None:
    """The password is that of the environment or random, never Grafana's default."""
    grafana = SERVICES["grafana"]
    assert "${GRAFANA_PASSWORD:-}" in grafana["environment"].values()
    assert (
        'GF_SECURITY_ADMIN_PASSWORD="$${GRAFANA_PASSWORD:-$$(head -c 32 /dev/urandom'
        in grafana["entrypoint"][-1]
    )
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_grafana_finds_what_is_provisioned() -> None:
    """Data source and dashboards of Grafana are those of this compose file."""
    grafana = SERVICES["grafana"]
    port = grafana["environment"]["PROMETHEUS_URL"].removeprefix("http://prometheus:")
    assert f"127.0.0.1:{port}:{port}" in SERVICES["prometheus"]["ports"]
    assert (
        f"./dashboards/json:{grafana['environment']['TORCHMEM_DASHBOARDS']}:ro"
        in grafana["volumes"]
    )
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / "dashboards" / "json" / home.name).exists()


def test_no_gpu_is_needed_without_the_gpu_file() -> None:
    """Only the GPU file requests devices and the pid namespace of the host, for the exporter."""
    assert not any("deploy" in service or "pid" in service for service in SERVICES.values())
    exporter = GPU["services"]["exporter"]
    assert exporter["pid"] == "host"
    assert exporter["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
    folders = [file["services"]["exporter"]["volumes"][0].split(":")[1] for file in (COMPOSE, GPU)]
    assert folders[0] == folders[1]


def test_the_image_is_built_in_two_stages_without_a_compiler() -> None:
    """Both stages use Python 3.12 slim, without a Dockerfile frontend or apt; the user is 9847."""
    text = (ROOT / "exporter" / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["python:3.12-slim"] * 2
    assert "# syntax=" not in text
    assert "apt-get" not in text
    assert re.findall(r"^USER (\d+):", text, re.MULTILINE) == ["9847"]


def test_the_image_gets_what_the_wheel_is_built_from() -> None:
    """.dockerignore lets through every file that the wheel is built from."""
    allowed = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert {"pyproject.toml", "README.md", "LICENSE", "sdk", "exporter", "tools"} <= set(allowed)
    assert all((ROOT / name).exists() for name in allowed)
