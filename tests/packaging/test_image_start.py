"""The exporter's image, built and started: by Docker, or its steps in a root folder of Debian."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from deploy.version import version
from support import dockerfile
from support.stack import free_port
from support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
TAG = f"localhost/torchmem-exporter:test-{os.getpid()}"
LISTENS = "0.0.0.0:9847"
# Long enough to pull the base image and to build.
SECONDS = 900
pytestmark = pytest.mark.timeout(2 * SECONDS)


@dataclass(frozen=True)
class Started:
    """A started exporter: its version, where it serves, and how to run a program beside it."""

    version: str
    url: str
    beside: tuple[str, ...]
    health_check: tuple[str, ...]

    def page(self) -> str:
        """Return its metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:  # noqa: S310
            return str(answer.read().decode())

    def run(self, *words: str) -> str:
        """Run a program of the image, and return what it prints."""
        return subprocess.check_output([*self.beside, *words], text=True, timeout=60).strip()


def docker(*words: str) -> subprocess.CompletedProcess[str]:
    """Run docker to its end."""
    command = ["docker", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def an_engine_runs() -> bool:
    """Return whether Docker has an engine."""
    return shutil.which("docker") is not None and docker("info").returncode == 0


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The exporter of the image, built from this tree with its version as the argument."""
    folder = tmp_path_factory.mktemp("image")
    name = version()
    with in_docker(name) if an_engine_runs() else in_root(name, folder / "root") as started:
        yield started


@contextmanager
def in_docker(name: str) -> Iterator[Started]:
    """Build the image and start a container of it; remove both at the end."""
    base = next(rest for name, rest in dockerfile.instructions() if name == "ARG").partition("=")[2]
    if docker("pull", "--quiet", base).returncode:
        pytest.skip(f"the container engine cannot pull {base.partition('@')[0]}")
    argument = f"VERSION={name}"
    built = docker(
        "build", "-f", "exporter/Dockerfile", "--build-arg", argument, "-t", TAG, str(ROOT)
    )
    assert built.returncode == 0, built.stderr
    label = '{{index .Config.Labels "org.opencontainers.image.version"}}'
    assert docker("inspect", "--format", label, TAG).stdout.strip() == name
    container = docker("run", "--detach", "--publish", "127.0.0.1::9847", TAG).stdout.strip()
    try:
        address = docker("port", container, "9847").stdout.strip()
        beside = ("docker", "exec", container)
        yield Started(name, f"http://{address}", beside, health_check())
    finally:
        docker("rm", "--force", container)
        docker("rmi", TAG)


@contextmanager
def in_root(name: str, folder: Path) -> Iterator[Started]:
    """Run the Dockerfile's steps in a root of its Debian, and start what the image starts."""
    if reason := dockerfile.missing():
        pytest.skip(reason)
    dockerfile.prepare(folder)
    image = dockerfile.run(folder, {"VERSION": name})
    address = f"127.0.0.1:{free_port()}"
    command = [word.replace(LISTENS, address) for word in image.start()]
    check = tuple(word.replace("9847", address.rpartition(":")[2]) for word in health_check())
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield Started(name, f"http://{address}", tuple(image.command()), check)
        finally:
            process.terminate()
            process.wait(60)


def health_check() -> tuple[str, ...]:
    """Return the command of HEALTHCHECK."""
    return tuple(dockerfile.words_of("HEALTHCHECK"))


def test_the_image_serves_the_version_of_this_tree(exporter: Started) -> None:
    """The health check passes, and the metrics name the version that was the build's argument."""
    healthy = functools.partial(subprocess.run, [*exporter.beside, *exporter.health_check])
    until(lambda: healthy(check=False, capture_output=True).returncode == 0, pause=0.5)

    assert 'torchmem_exporter_build_info{python_version="3.' in exporter.page()
    assert f'version="{exporter.version}"' in exporter.page()


def test_the_commands_of_the_image_know_their_version(exporter: Started) -> None:
    """`torchmem --version` in the image is the version of this tree, and its user is not root."""
    assert exporter.run("torchmem", "--version") == f"torchmem {exporter.version}"
    assert exporter.run("id", "-u") == "9847"
    assert exporter.run("stat", "-c", "%a %u", "/run/torchmem") == "3777 9847"
