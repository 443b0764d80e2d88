"""Recordings, played into a Prometheus once and kept until their sources change."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pictures.history import History, Scrapes, prometheus
from pictures.nodes import Node
from pictures.recordings import END, RECORDINGS, Recording
from pictures.rules import evaluate

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "pictures"
SOURCES = ("tests/pictures", "sdk/src", "exporter/src", "tools/src", "prometheus/rules")
NOT_SOURCES = {"drawing.py", "findings.py", "__main__.py"}
SCRAPES_AT_ONCE = 30


@contextmanager
def served(name: str) -> Iterator[str]:
    """Run a Prometheus that holds the recording of this name; yield its URL."""
    folder = BUILD / "recordings" / f"{name}-{_fingerprint()}"
    if not (folder / "complete").exists():
        for old in folder.parent.glob(f"{name}-????????????"):
            shutil.rmtree(old)
        with prometheus(folder) as url:
            record(RECORDINGS[name], url)
        (folder / "complete").touch()
    with prometheus(folder) as url:
        yield url


def record(recording: Recording, url: str) -> None:
    """Play a recording into a Prometheus, then evaluate the rules over it."""
    history = History(url)
    nodes = [(Node(plan, recording.start), Scrapes(history)) for plan in recording.nodes()]
    step = recording.interval * 1000
    ticks = range(int(recording.start) * 1000, int(END) * 1000 + 1, step)
    for number, tick in enumerate(ticks):
        for node, scrapes in nodes:
            node.play(tick / 1000)
            scrapes.add(tick, node.scrape())
        if number % SCRAPES_AT_ONCE == 0:
            history.flush()
    history.flush()
    for node, _ in nodes:
        node.exporter.close()
    evaluate(history, ticks)


def _fingerprint() -> str:
    """Return a hash of everything that recordings are made by."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            is_test = path.name.startswith("test_")
            if path.suffix in {".py", ".yml"} and not is_test and path.name not in NOT_SOURCES:
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
