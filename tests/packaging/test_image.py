"""exporter/Dockerfile: the image is what the other shipped files take it for."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import requires
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "exporter" / "Dockerfile").read_text()
PORT = 9847
USER = "9847:9847"


def pins() -> dict[str, str]:
    """Version by name of what the image installs."""
    lines = (ROOT / "exporter" / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(line.split("==")[0]): line.split("==")[1]
        for line in lines
        if not line.startswith("#")
    }


def _needs(name: str) -> set[str]:
    """What the distribution needs in the image, `torchmem` with its extra."""
    wanted = [Requirement(line) for line in requires(name) or []]
    image = {
        "python_version": "3.12",
        "python_full_version": "3.12.0",
        "extra": "exporter" if name == "torchmem" else "",
    }
    return {
        canonicalize_name(w.name) for w in wanted if w.marker is None or w.marker.evaluate(image)
    }


def test_every_dependency_is_pinned() -> None:
    """What the exporter's extra asks for, and what that needs in turn, has one exact version."""
    wanted, seen = {"torchmem"}, set[str]()
    while wanted:
        wanted = {need for name in wanted for need in _needs(name)} - seen
        seen |= wanted
    assert seen == set(pins())


def test_nobody_is_root() -> None:
    """The user is a number, so that runAsNonRoot can be checked, and owns the run directory wherever that is made."""
    number = USER.split(":", maxsplit=1)[0]
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == [USER]
    assert f"install -d -m 1777 -o {number} -g {number} /run/torchmem" in DOCKERFILE
    compose: Any = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert f"uid={number},gid={number}" in compose["volumes"]["run-dir"]["driver_opts"]["o"]
    assert f"-o {number} -g {number} /run/torchmem" in (ROOT / "docker-compose.gpu.yml").read_text()


def test_the_label_names_this_version() -> None:
    """`docker inspect` shows the version of the package."""
    (version,) = re.findall(r'image\.version="([^"]+)"', DOCKERFILE)
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server on a free port that answers every request with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/-/healthy" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def check(port: int) -> int:
    """Exit code of the image's health check against this port."""
    (words,) = re.findall(r"^HEALTHCHECK .*CMD (\[(?:.|\\\n)*?\])$", DOCKERFILE, re.MULTILINE)
    command: list[str] = yaml.safe_load(words.replace("\\\n", ""))
    assert str(PORT) in command[-1]
    command[-1] = command[-1].replace(str(PORT), str(port))
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash, as the image has it")
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_believes_the_answer(status: int, healthy: bool) -> None:
    """It asks /-/healthy and passes on 200 alone, with nothing but bash."""
    with answering(status) as port:
        assert (check(port) == 0) is healthy


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash, as the image has it")
def test_the_health_check_fails_when_nobody_listens() -> None:
    """A closed port is unhealthy."""
    with answering(200) as port:
        pass
    assert check(port) != 0


def test_the_image_says_what_it_runs() -> None:
    """It serves on the port of the documentation, from the run directory of the documentation."""
    assert f"EXPOSE {PORT}\n" in DOCKERFILE
    assert f'CMD ["exporter", "--listen", "0.0.0.0:{PORT}"]' in DOCKERFILE
    assert "TORCHMEM_RUN_DIR=/run/torchmem" in DOCKERFILE
