"""Draw the live page from a run of the demo: `PYTHONPATH=tests python docs/picture.py`.

It takes three minutes and needs what the tests in Chromium need (CONTRIBUTING.md).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from support.browser import Page, open_page
from support.stack import answers, free_port

DOCS = Path(__file__).resolve().parent
MOVIE = DOCS / "demo.webp"
MOVIE_SIZE = (1180, 880)
DURATION_SECONDS = 90.0
FRAME_SECONDS = 1.0
FRAMES_PER_SECOND = 4
LAST_FRAMES_SECONDS = 3.0
OUT_OF_MEMORY = "document.querySelector('[data-state=oom]')"


def main() -> None:
    """Run the demo until a rank is out of memory, and write the movie and the pictures."""
    with TemporaryDirectory() as folder, demo() as url, open_page() as page:
        page.media(motion="reduce")
        page.resize(*MOVIE_SIZE)
        page.goto(url)
        page.wait("document.querySelectorAll('.rank').length === 4")
        names = [*until_out_of_memory(page, Path(folder)), *explanation(page, Path(folder))]
        draw_pictures(page)
        write_movie(names)


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


def write_movie(names: Sequence[Path]) -> None:
    """Write the frames as an animated WebP, whose last frames stay for longer."""
    frames = [Image.open(name).convert("RGB") for name in names]
    usual, last = 1000 // FRAMES_PER_SECOND, int(1000 * LAST_FRAMES_SECONDS)
    durations = [*[usual] * (len(frames) - 2), last, 2 * last]
    frames[0].save(
        MOVIE,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        lossless=False,
        quality=80,
        method=4,
    )
    print(f"{MOVIE.name}: {len(frames)} frames, {MOVIE.stat().st_size:,} bytes")


def draw_pictures(page: Page) -> None:
    """Write the pictures of docs/live-page.md."""
    page.resize(1440, 815)  # above the call stack, whose paths are those of this machine
    page.evaluate("document.querySelector('.gpu:has(.details)').scrollIntoView()")
    save(page, "live-page")
    page.click("role=tab[name=Now]")
    page.media("dark", motion="reduce")
    page.evaluate("scrollTo(0, 0)")
    save(page, "live-page-dark")
    page.media("light", motion="reduce")
    page.resize(390, 844)
    save(page, "live-page-phone")


def save(page: Page, name: str) -> None:
    """Write one picture to docs/pictures."""
    time.sleep(1)  # the charts follow the size of the window
    path = DOCS / "pictures" / f"{name}.png"
    page.screenshot(path)
    with Image.open(path) as picture:
        opaque = picture.convert("RGB")
    opaque.save(path, optimize=True)


if __name__ == "__main__":
    main()
