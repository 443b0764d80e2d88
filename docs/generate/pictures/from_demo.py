"""Pictures of the live page and of `torchmem top`, and the animation, from one run of the demo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from rich.console import Console
from rich.text import Text
from support.browser import Page, open_page
from support.stack import answers, free_port

MOVIE_SIZE = (1180, 880)
DURATION_SECONDS = 90.0
FRAME_SECONDS = 1.0
FRAMES_PER_SECOND = 4
LAST_FRAMES_SECONDS = 3.0
OUT_OF_MEMORY = "document.querySelector('[data-state=oom]')"
TERMINAL = (130, 30)
"""Columns and lines."""
TERMINAL_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 12px; width: max-content; background: #101014; color: #d0d0d0 }}
pre {{ margin: 0; font: 14px/18px "DejaVu Sans Mono", monospace }}
</style><body><pre>{code}</pre>"""


def draw(docs: Path) -> None:
    """Run the demo until a rank is out of memory, and write the movie and the pictures."""
    with TemporaryDirectory() as folder, demo() as url, open_page() as page:
        page.media(motion="reduce")
        page.resize(*MOVIE_SIZE)
        page.goto(url)
        page.wait("document.querySelectorAll('.rank').length === 4")
        names = [*until_out_of_memory(page, Path(folder)), *explanation(page, Path(folder))]
        draw_pictures(page, docs / "pictures")
        draw_top(page, url, Path(folder), docs / "pictures" / "top.png")
        write_movie(names, docs / "demo.webp")


@contextmanager
def demo() -> Iterator[str]:
    """Run the demo; yield the page's URL."""
    url = f"http://127.0.0.1:{free_port()}"
    arguments = ["--duration", str(DURATION_SECONDS), "--listen", url.removeprefix("http://")]
    command = [sys.executable, "-m", "torchmem.cli", "demo", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not answers(f"{url}/-/ready"):
            time.sleep(0.1)
        yield url
        process.terminate()


def until_out_of_memory(page: Page, folder: Path) -> Iterator[Path]:
    """Yield a frame about every second."""
    number = 0
    while not page.evaluate(f"{OUT_OF_MEMORY} !== null"):
        yield shot(page, folder / f"{number:03}.png")
        number += 1
        time.sleep(FRAME_SECONDS)


def explanation(page: Page, folder: Path) -> Iterator[Path]:
    """Yield frames in which the rank that is out of memory is opened."""
    yield shot(page, folder / "dead.png")
    page.click(".row:has([data-state=oom])")
    page.click("role=tab[name=Why]")
    page.wait("document.querySelector('.oom')")
    page.evaluate("document.querySelector('.gpu:has(.details)').scrollIntoView()")
    yield shot(page, folder / "why.png")


def shot(page: Page, path: Path) -> Path:
    """Take a picture of the window."""
    page.screenshot(path)
    return path


def write_movie(names: Sequence[Path], path: Path) -> None:
    """Write the frames as an animated WebP, whose last frames stay for longer."""
    frames = [Image.open(name).convert("RGB") for name in names]
    usual, last = 1000 // FRAMES_PER_SECOND, int(1000 * LAST_FRAMES_SECONDS)
    durations = [*[usual] * (len(frames) - 2), last, 2 * last]
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        lossless=False,
        quality=80,
        method=4,
    )


def draw_pictures(page: Page, folder: Path) -> None:
    """Write the pictures of docs/screens.md."""
    page.resize(1440, 815)  # above the call stack, whose paths are those of this machine
    page.evaluate("document.querySelector('.gpu:has(.details)').scrollIntoView()")
    save(page, folder / "live-page.png")
    page.click("role=tab[name=Now]")
    page.media("dark", motion="reduce")
    page.evaluate("scrollTo(0, 0)")
    save(page, folder / "live-page-dark.png")
    page.media("light", motion="reduce")
    page.resize(390, 844)
    save(page, folder / "live-page-phone.png")


def draw_top(page: Page, url: str, folder: Path, path: Path) -> None:
    """Write a screen of `torchmem top` as a terminal shows it."""
    columns, lines = TERMINAL
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    environment = os.environ | terminal | {"COLUMNS": str(columns), "LINES": str(lines)}
    command = [sys.executable, "-m", "torchmem.cli", "top", "--once", "--exporter", url]
    screen = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    console = Console(record=True, width=columns, file=StringIO())
    console.print(Text.from_ansi(screen.stdout.decode()))
    file = folder / "top.html"
    file.write_text(console.export_html(code_format=TERMINAL_PAGE, inline_styles=True))
    page.resize(9 * columns, 18 * lines)
    page.goto(file.as_uri())
    save(page, path)


def save(page: Page, path: Path) -> None:
    """Write one picture of the window."""
    time.sleep(1)  # the charts follow the size of the window
    page.screenshot(path)
    with Image.open(path) as picture:
        opaque = picture.convert("RGB")
    opaque.save(path, optimize=True)
