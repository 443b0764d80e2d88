"""The compose files agree with the other shipped files, and open nothing to the network."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchmem.manifests import shipped

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN_IMAGE = "localhost/torchmem-exporter"
EACH = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@EACH
def test_ports_are_open_to_this_machine_only(service: dict[str, Any]) -> None:
    """Every published port is bound to 127.0.0.1."""
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in service.get("ports", []))


@EACH
def test_images_are_pinned(service: dict[str, Any]) -> None:
    """Each image has an exact version and a digest; ours is built each time, from this tree."""
    if service["image"] != OWN_IMAGE:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", service["image"])


def test_both_files_have_the_same_images() -> None:
    """What the GPU file starts besides is an image of the other file."""
    images = {service["image"] for service in SERVICES.values()}
    assert {
        service["image"] for service in GPU["services"].values() if "image" in service
    } <= images


@EACH
def test_no_registry_is_asked_for_our_image(service: dict[str, Any]) -> None:
    """Our image has a name that no registry serves, and `up` builds it after every change."""
    assert (service["image"] == OWN_IMAGE) == ("build" in service)
    assert not service["image"].startswith("torchmem")
    if "build" in service:
        assert service["pull_policy"] == "build"
        assert service["build"]["args"] == {"VERSION": "${TORCHMEM_VERSION:-}"}


@EACH
def test_no_service_can_fill_the_machine(service: dict[str, Any]) -> None:
    """Memory and logs of each service have limits, and it has time to stop."""
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert re.fullmatch(r"\d+[sm]", service["stop_grace_period"])


def test_prometheus_keeps_a_limited_amount() -> None:
    """What Prometheus stores is limited in time and in size."""
    flags = dict(flag.split("=", 1) for flag in SERVICES["prometheus"]["command"])
    assert re.fullmatch(r"\d+d", flags["--storage.tsdb.retention.time"])
    assert re.fullmatch(r"\d+GB", flags["--storage.tsdb.retention.size"])


@pytest.mark.parametrize("name", ["prometheus", "alertmanager"])
def test_links_in_messages_work_in_a_browser(name: str) -> None:
    """Prometheus and Alertmanager know the address that a browser on this machine uses."""
    (port,) = SERVICES[name]["ports"]
    address = port.rpartition(":")[0]
    assert f"--web.external-url=http://{address}" in SERVICES[name]["command"]


def test_prometheus_serves_the_runbooks() -> None:
    """The folder docs is mounted below the user assets, where the alerts' links point."""
    (assets,) = [
        flag.partition("=")[2]
        for flag in SERVICES["prometheus"]["command"]
        if flag.startswith("--web.user-assets=")
    ]
    assert f"./docs:{assets}/docs:ro" in SERVICES["prometheus"]["volumes"]


def test_a_restart_keeps_the_run_directory() -> None:
    """No container's end empties the run directory: Docker does that to volumes in memory."""
    (mount,) = SERVICES["exporter"]["volumes"]
    options = COMPOSE["volumes"][mount.split(":")[0]] or {}
    assert "driver_opts" not in options
    assert "tmpfs" not in SERVICES["exporter"]


def test_a_changed_run_directory_takes_effect() -> None:
    """TORCHMEM_RUN_DIR is part of the services: Docker never changes an existing volume."""
    for service in GPU["services"].values():
        assert service["volumes"] == ["${TORCHMEM_RUN_DIR:-/run/torchmem}:/run/torchmem"]
    assert "volumes" not in GPU


def test_the_run_directory_of_the_host_keeps_its_mode() -> None:
    """The container that makes it has its group: the kernel clears set-group-ID for others."""
    run_dir = GPU["services"]["run-dir"]
    mode, owner, group = re.findall(r"-m (\d+) -o (\d+) -g (\d+)", run_dir["command"][0])[0]
    assert (
        f"install -d -m {mode} -o {owner} -g {group} /run/torchmem"
        in (ROOT / "exporter" / "Dockerfile").read_text()
    )
    assert run_dir["user"] == f"0:{group}"
    assert run_dir["cap_add"] == ["CHOWN", "FOWNER"]


def test_down_ends_the_demo() -> None:
    """The demo is not a profile, which `down` would ignore: it is scaled to none by default."""
    assert not any("profiles" in service for service in SERVICES.values())
    assert SERVICES["torchmem-demo"]["scale"] == "${TORCHMEM_DEMO:-0}"


def test_a_checkout_of_any_umask_is_readable() -> None:
    """Every folder of the checkout that a service mounts is made readable before it starts."""
    permissions = SERVICES["permissions"]
    readable = {mount.split(":")[0] for mount in permissions["volumes"]}
    for name, service in SERVICES.items():
        mounted = {m.split(":")[0] for m in service.get("volumes", []) if m.startswith(".")}
        if name != "permissions" and mounted:
            assert service["depends_on"] == {
                "permissions": {"condition": "service_completed_successfully"}
            }
            folders = {f"./{Path(folder).parts[0]}" for folder in mounted}
            assert folders <= readable


@pytest.mark.parametrize("mode", [0o000, 0o005], ids=oct)
def test_other_users_can_read_the_checkout_afterwards(mode: int, tmp_path: Path) -> None:
    """The command of `permissions` gives others the right to read, and changes nothing else."""
    folder = tmp_path / "checkout" / "rules"
    folder.mkdir(parents=True)
    (folder / "a.yml").write_text("groups: []")
    (folder / "a.yml").chmod(0o600)
    (folder / "b.sh").touch(0o755)
    folder.chmod(0o700 | mode)
    service = SERVICES["permissions"]
    command = [*service["entrypoint"], *service["command"]]
    subprocess.run(
        [str(tmp_path / "checkout") if word == "/checkout" else word for word in command],
        check=True,
    )
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "a.yml", folder / "b.sh")]
    assert modes == [0o705, 0o604, 0o755]


@EACH
def test_every_mount_exists(service: dict[str, Any]) -> None:
    """Each mounted file and folder exists; only `permissions` may write to the checkout."""
    for mount in service.get("volumes", []):
        source, _, mode = mount.split(":") if mount.count(":") == 2 else (*mount.split(":"), "rw")
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            assert mode == "ro" or service is SERVICES["permissions"], mount
        else:
            assert source in COMPOSE["volumes"]


@EACH
def test_services_have_no_capabilities(service: dict[str, Any]) -> None:
    """No service can gain a capability; only `permissions`, which ends at once, starts with two."""
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    if service is SERVICES["permissions"]:
        assert service["cap_add"] == ["DAC_READ_SEARCH", "FOWNER"]
        assert (service["restart"], service["network_mode"]) == ("no", "none")
    else:
        assert "cap_add" not in service
        assert service["restart"] == "unless-stopped"


@EACH
def test_every_service_has_a_health_check(service: dict[str, Any]) -> None:
    """Each service that runs on has a health check in the compose file or in its Dockerfile."""
    if service is SERVICES["permissions"]:
        return
    if "build" in service:
        assert "HEALTHCHECK" in (ROOT / service["build"]["dockerfile"]).read_text()
    else:
        assert service["healthcheck"]["test"][0] == "CMD"


def test_the_targets_are_services() -> None:
    """Prometheus scrapes services of the compose file, itself and Alertmanager included."""
    for kind in ("exporters", "alertmanagers", "prometheus"):
        for group in yaml.safe_load((ROOT / f"prometheus/targets-compose/{kind}.yml").read_text()):
            for target in group["targets"]:
                name, port = target.split(":")
                name = kind if name == "127.0.0.1" else name
                assert f"127.0.0.1:{port}:{port}" in SERVICES[name]["ports"]
    jobs = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["torchmem", "prometheus", "alertmanager"]
    assert jobs[0]["dns_sd_configs"][0]["names"] == ["torchmem-demo"]


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
    folders = [
        file["services"]["exporter"]["volumes"][0].rpartition(":")[2] for file in (COMPOSE, GPU)
    ]
    assert folders[0] == folders[1]


def test_the_image_is_built_in_two_stages_without_a_compiler() -> None:
    """Both stages use one Python 3.12 slim, without a Dockerfile frontend or apt; the user is 9847.

    The base has an exact version and a digest.
    """
    text = (ROOT / "exporter" / "Dockerfile").read_text()
    base = r"^ARG PYTHON_IMAGE=python:3\.12\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}$"
    assert re.search(base, text, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${PYTHON_IMAGE}"] * 2
    assert "# syntax=" not in text
    assert "apt-get" not in text
    assert re.findall(r"^USER (\d+):", text, re.MULTILINE) == ["9847"]


def test_the_image_gets_what_the_wheel_is_built_from() -> None:
    """.dockerignore lets through every file that the wheel is built from."""
    allowed = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    sources = [
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        "core",
        "sdk",
        "lab",
        "tools",
    ]
    assert [
        name
        for name in [*sources, *shipped.paths(ROOT, *shipped.KINDS)]
        if not any(fnmatch(name, line) or name.startswith(f"{line}/") for line in allowed)
    ] == []


def test_the_image_is_built_from_a_wheel_where_there_is_no_source() -> None:
    """The Dockerfile builds the checkout, and else installs the wheel, which .dockerignore allows.

    `torchmem manifests image` writes that wheel.
    """
    text = (ROOT / "exporter" / "Dockerfile").read_text()
    assert "if [ -e pyproject.toml ]; then source=.; else source=$(echo torchmem-*.whl); fi" in text
    assert "!torchmem-*.whl" in (ROOT / ".dockerignore").read_text().splitlines()
