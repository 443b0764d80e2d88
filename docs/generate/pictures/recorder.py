"""Recordings, played into a Prometheus once and kept until what they are made by changes.

`python -m docs.generate.pictures.recorder NAME...` makes them and prints their folders. A process
of its own does it, because the modules that it has imported are what a recording depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.generate.pictures.history import History, Scrapes, prometheus
from docs.generate.pictures.nodes import Node
from docs.generate.pictures.recordings import END, RECORDINGS, Recording
from docs.generate.pictures.rules import FOLDER, evaluate

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "pictures"
SCRAPES_AT_ONCE = 30


def recorded(names: Iterable[str]) -> dict[str, Path]:
    """Return the folders of recordings, by name; make those that are missing."""
    wanted = list(names)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "docs.generate.pictures.recorder", *wanted]
    made = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return dict(zip(wanted, map(Path, made.stdout.decode().split()), strict=True))


@contextmanager
def served(recording: Path) -> Iterator[str]:
    """Run a Prometheus with a copy of a recording; yield its URL."""
    with TemporaryDirectory(prefix="torchmem-recording-") as folder:
        copy = Path(folder) / "data"
        shutil.copytree(recording, copy)
        with prometheus(copy) as url:
            yield url


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def fingerprint(files: Iterable[Path]) -> str:
    """Return a hash of the names and contents of files of the repository."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _with_rules(folder: Path, recording: Recording) -> Path:
    """Return the folder of a recording and of the rules' results; make what is missing."""
    scrapes = _scrapes(folder, recording)
    data = folder / f"{scrapes.name}-{fingerprint(FOLDER.glob('*.yml'))}"
    if not (data / "complete").exists():
        _remove(folder, keep=scrapes)
        shutil.copytree(scrapes, data, ignore=shutil.ignore_patterns("complete"))
        with prometheus(data) as url:
            evaluate(History(url), _ticks(recording))
        (data / "complete").touch()
    return data


def _scrapes(folder: Path, recording: Recording) -> Path:
    """Return the folder of a recording without rules; make it if it is missing."""
    data = folder / fingerprint(_imported())
    if not (data / "complete").exists():
        _remove(folder)
        with prometheus(data) as url:
            _play(recording, History(url))
        (data / "complete").touch()
    return data


def _play(recording: Recording, history: History) -> None:
    nodes = [(Node(plan, recording.start), Scrapes(history)) for plan in recording.nodes()]
    for number, tick in enumerate(_ticks(recording)):
        for node, scrapes in nodes:
            node.play(tick / 1000)
            scrapes.add(tick, node.scrape())
        if number % SCRAPES_AT_ONCE == 0:
            history.flush()
    history.flush()
    for node, _ in nodes:
        node.exporter.close()


def _ticks(recording: Recording) -> range:
    """Return the times of all scrapes, in milliseconds since 1970."""
    return range(int(recording.start) * 1000, int(END) * 1000 + 1, recording.interval * 1000)


def _imported() -> Iterator[Path]:
    """Yield the files of the repository that this process has imported."""
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.is_relative_to(ROOT) and not path.is_relative_to(sys.prefix):
            yield path


def _remove(folder: Path, keep: Path | None = None) -> None:
    for old in folder.iterdir():
        if old.is_dir() and old != keep:
            shutil.rmtree(old)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        folder = BUILD / "recordings" / name
        with locked(folder / "lock"):
            print(_with_rules(folder, RECORDINGS[name]), flush=True)
