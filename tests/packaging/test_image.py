"""exporter/Dockerfile agrees with the other shipped files."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.local_http import Answer, Request, answering

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "exporter" / "Dockerfile").read_text()
PORT = 9847
USER = "9847:9847"


def pins() -> dict[str, str]:
    """Return the pinned version of each package in the image."""
    lines = (ROOT / "exporter" / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(line.split("==")[0]): line.split("==")[1]
        for line in lines
        if not line.startswith("#")
    }


def _requirements(name: str) -> set[str]:
    """Return what a distribution requires in the image; of torchmem, the extra is included."""
    requirements = [Requirement(line) for line in requires(name) or []]
    image = {
        "python_version": "3.12",
        "python_full_version": "3.12.0",
        "extra": "exporter" if name == "torchmem" else "",
    }
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(image)
    }


def test_every_dependency_is_pinned() -> None:
    """Each direct and indirect requirement of the exporter's extra has one exact version."""
    new, seen = {"torchmem"}, set[str]()
    while new:
        new = {requirement for name in new for requirement in _requirements(name)} - seen
        seen |= new
    assert seen == set(pins())


def test_the_user_is_not_root() -> None:
    """The user is numeric, as runAsNonRoot requires, and owns every run directory."""
    number = USER.split(":", maxsplit=1)[0]
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == [USER]
    assert f"install -d -m 3777 -o {number} -g {number} /run/torchmem" in DOCKERFILE
    assert f"-o {number} -g {number} /run/torchmem" in (ROOT / "docker-compose.gpu.yml").read_text()


def test_the_label_names_this_version() -> None:
    """The label of the image is the version of the package."""
    (version,) = re.findall(r'image\.version="([^"]+)"', DOCKERFILE)
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()


def port_of(address: str) -> str:
    """Return the port of HOST:PORT."""
    return address.rpartition(":")[2]


def check(port: str) -> int:
    """Return the exit code of the image's health check for a port."""
    (words,) = re.findall(r"^HEALTHCHECK .*CMD (\[(?:.|\\\n)*?\])$", DOCKERFILE, re.MULTILINE)
    command: list[str] = yaml.safe_load(words.replace("\\\n", ""))
    assert str(PORT) in command[-1]
    command[-1] = command[-1].replace(str(PORT), port)
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash, as the image has it")
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_follows_the_status(status: int, healthy: bool) -> None:
    """The health check passes only if /-/healthy returns 200; it needs nothing but bash."""

    def health(request: Request) -> Answer:
        return Answer(status if request.path == "/-/healthy" else 404)

    with answering(health) as address:
        assert (check(port_of(address)) == 0) is healthy


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash, as the image has it")
def test_the_health_check_fails_on_a_closed_port() -> None:
    """The health check fails if no server listens."""
    with answering(lambda _: Answer()) as address:
        pass
    assert check(port_of(address)) != 0


def test_the_image_runs_the_exporter() -> None:
    """The image serves the documented run directory on the documented port."""
    assert f"EXPOSE {PORT}\n" in DOCKERFILE
    assert f'CMD ["exporter", "--listen", "0.0.0.0:{PORT}"]' in DOCKERFILE
    assert "TORCHMEM_RUN_DIR=/run/torchmem" in DOCKERFILE
