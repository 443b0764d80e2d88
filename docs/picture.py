"""Draw docs/demo.svg from a run of the demo: `python docs/picture.py` (takes a minute)."""

from __future__ import annotations

import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from torchmem.demo.screen import Exposition, Heading, screen

PICTURE = Path(__file__).resolve().parent / "demo.svg"
URL = "http://127.0.0.1:9847"
DURATION_SECONDS, PICTURE_SECONDS = 60.0, 50.0


def main() -> None:
    """Run the demo, scrape its exporter once, and draw the screen of that time."""
    demo = [sys.executable, "-m", "torchmem.cli", "demo", "--duration", str(DURATION_SECONDS)]
    with subprocess.Popen(demo, stdout=subprocess.DEVNULL) as process:
        time.sleep(PICTURE_SECONDS)
        exposition = Exposition.scrape(URL)
        process.terminate()
    console = Console(record=True, width=116, file=StringIO())
    title = "torchmem demo: fragmentation, simulated"
    heading = Heading(title, URL, PICTURE_SECONDS, DURATION_SECONDS)
    console.print(screen(heading, exposition.ranks(exposition.pids())))
    console.save_svg(str(PICTURE), title="torchmem demo")


if __name__ == "__main__":
    main()
