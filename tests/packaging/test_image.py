"""exporter/Dockerfile agrees with the other shipped files."""

from __future__ import annotations

import os
import re
import shutil
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


def pins(name: str = "requirements.txt") -> dict[str, list[str]]:
    """Return the hashes of each pinned package of a file, by package."""
    text = (ROOT / "exporter" / name).read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    return {
        canonicalize_name(line.split("==")[0]): re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line)
        for line in lines
    }


def _requirements(name: str) -> set[str]:
    """Return what a distribution requires in the image; of torchmem, with the image's extras."""
    requirements = [Requirement(line) for line in requires(name) or []]
    image = {
        "python_version": "3.12",
        "python_full_version": "3.12.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    extras = ("exporter", "kubernetes") if name == "torchmem" else ("",)
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        for extra in extras
        if requirement.marker is None or requirement.marker.evaluate({**image, "extra": extra})
    }


def test_every_dependency_is_pinned() -> None:
    """Each direct and indirect requirement of the image has one exact version."""
    new, seen = {"torchmem"}, set[str]()
    while new:
        new = {requirement for name in new for requirement in _requirements(name)} - seen
        seen |= new
    assert seen == set(pins())


@pytest.mark.parametrize("name", ["requirements.txt", "build-requirements.txt"])
def test_pip_installs_only_known_files(name: str) -> None:
    """Each package has hashes, and pip refuses files without one, from wherever they come."""
    assert all(pins(name).values())
    assert f"-r exporter/{name}" in DOCKERFILE.replace("\\\n", "")
    assert "http" not in (ROOT / "exporter" / name).read_text()
    for command in re.findall(r"pip (?:--python \S+ )?install .*", DOCKERFILE.replace("\\\n", "")):
        for part in command.split("&&"):
            assert "--require-hashes" in part or "--no-index" in part or "install" not in part


IMAGE = re.compile(r"[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}")
PINNED = ("docker-compose.yml", "docker-compose.gpu.yml", "exporter/Dockerfile")


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
@pytest.mark.parametrize("digest", ["sha256:" + "5" * 64, "", "sha256:short"])
def test_images_are_pinned_to_the_newest_digest(tmp_path: Path, digest: str) -> None:
    """The script writes the digest that the registry gives, and stops if it gives none."""
    for name in (*PINNED, "deploy/pin_images.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho '\"{digest}\"'\n")
    docker.chmod(0o755)
    before = [(tmp_path / name).read_text() for name in PINNED]
    done = subprocess.run(
        [tmp_path / "deploy/pin_images.sh"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    after = [(tmp_path / name).read_text() for name in PINNED]

    if len(digest) < 64:
        assert (1, before) == (done.returncode, after)
        assert "no digest for" in done.stderr
    else:
        assert done.returncode == 0
        assert after == [re.sub(r"sha256:[0-9a-f]{64}", digest, text) for text in before]
        assert {digest} == {image.split("@")[1] for image in IMAGE.findall("".join(after))}


def test_the_user_is_not_root() -> None:
    """The user is numeric, as runAsNonRoot requires, and owns every run directory."""
    number = USER.split(":", maxsplit=1)[0]
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == [USER]
    assert f"install -d -m 3777 -o {number} -g {number} /run/torchmem" in DOCKERFILE
    assert f"-o {number} -g {number} /run/torchmem" in (ROOT / "docker-compose.gpu.yml").read_text()


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
