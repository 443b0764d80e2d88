"""Draw the README's picture from a real run of the demo: `python docs/picture.py` (about a minute)."""

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
DURATION, MOMENT = 60.0, 50.0


def main() -> None:
    """Run the demo, read its exporter at one moment and draw what its screen shows then."""
    demo = [sys.executable, "-m", "torchmem.cli", "demo", "--duration", str(DURATION)]
    with subprocess.Popen(demo, stdout=subprocess.DEVNULL) as process:
        time.sleep(MOMENT)
        exposition = Exposition.scrape(URL)
        process.terminate()
    console = Console(record=True, width=116, file=StringIO())
    heading = Heading("torchmem demo: fragmentation, simulated", URL, MOMENT, DURATION)
    console.print(screen(heading, exposition.ranks(exposition.pids())))
    console.save_svg(str(PICTURE), title="torchmem demo")


if __name__ == "__main__":
    main()
