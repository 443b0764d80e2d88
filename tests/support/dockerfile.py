"""The steps of exporter/Dockerfile, run in a root folder of Debian where there is no engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "exporter" / "Dockerfile"
PINNED = ("exporter/requirements.txt", "exporter/build-requirements.txt")
# As in the base image, whose Python is not Debian's, pip may change this environment.
_PYTHON = "/usr/local/python"
_PATH = f"{_PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# pip takes the packages from a folder.
_PIP = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}


def instructions() -> Iterator[tuple[str, str]]:
    """Yield the instructions of the Dockerfile with their arguments, in order."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name:
            yield name, rest.strip()


@dataclass
class ImageRoot:
    """A root folder in which the steps have run, and how its process starts."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    directory: str = "/"
    user: str = "0:0"

    def command(self, *words: str) -> list[str]:
        """Return the command that runs a program in the root, as the image's user."""
        script = f'cd {self.directory} && exec "$@"'
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        chroot = ["chroot", f"--userspec={self.user}", str(self.folder)]
        return [*chroot, "/usr/bin/env", "-i", *variables, "/bin/sh", "-c", script, "sh", *words]

    def start(self) -> list[str]:
        """Return the command of a container of the image."""
        return self.command(*words_of("ENTRYPOINT"), *words_of("CMD"))


def prepare(folder: Path) -> None:
    """Make the root of the base image's Debian, with the pinned packages in /wheels."""
    (suite,) = re.findall(r"^ARG PYTHON_IMAGE=.*-slim-(\w+)@", DOCKERFILE.read_text(), re.MULTILINE)
    options = ["--variant=minbase", "--include=python3,python3-venv"]
    subprocess.run(["debootstrap", *options, suite, str(folder)], check=True, capture_output=True)
    image = ImageRoot(folder)
    subprocess.run(image.command("python3", "-m", "venv", _PYTHON), check=True)
    version = image.command("python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    python = subprocess.check_output(version, text=True).strip()
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes"]
    options = ["--only-binary", ":all:", "--python-version", python, "-d", str(folder / "wheels")]
    files = [word for name in PINNED for word in ("-r", str(ROOT / name))]
    subprocess.run([*download, *options, *files], check=True)


def run(folder: Path, arguments: dict[str, str]) -> ImageRoot:
    """Run the Dockerfile's steps in a prepared root; both stages have the same one."""
    image = ImageRoot(folder)
    for name, rest in instructions():
        if name == "WORKDIR":
            image.directory = rest
            (folder / rest.lstrip("/")).mkdir(parents=True)
        elif name == "FROM":
            image.directory = "/"
        elif (name, rest) == ("COPY", ". ."):
            copy_context(folder / image.directory.lstrip("/"))
        elif name == "RUN":
            step = ImageRoot(folder, {**image.environment, **_PIP, **arguments}, image.directory)
            subprocess.run(step.command("/bin/sh", "-c", rest), check=True)
        elif name == "ENV":
            pairs = (word.split("=", 1) for word in rest.split())
            image.environment |= {key: value.replace("$PATH", _PATH) for key, value in pairs}
        elif name == "USER":
            image.user = rest
    return image


def words_of(instruction: str) -> list[str]:
    """Return the words of an instruction that starts a process."""
    (rest,) = [rest for name, rest in instructions() if name == instruction]
    words: list[str] = json.loads(rest[rest.index("[") :])
    return words


def copy_context(target: Path) -> None:
    """Copy what .dockerignore leaves of the checkout."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for pattern in (line[1:] for line in lines if line.startswith("!")):
        for path in ROOT.glob(pattern):
            to = target / path.relative_to(ROOT)
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(path, to, ignore=ignored, symlinks=True)
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)


def missing() -> str | None:
    """Return why the steps cannot run here, or None."""
    if os.geteuid() != 0:
        return "no container engine runs, and only root can run the Dockerfile's steps without one"
    if not shutil.which("debootstrap"):
        return "no container engine runs, and no debootstrap on PATH: apt-get install debootstrap"
    return None
