"""`torchmem demo --list`: what the scenarios do, and the published numbers they arrive at."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from torchmem.simulator.scenarios import SCENARIOS

CAPTION = "The numbers were published by others; the demo reaches them with a simulated allocator."


def listing() -> Table:
    """A table as wide as the terminal."""
    table = Table(expand=True, header_style="bold", caption=CAPTION, caption_justify="left", show_lines=True)
    table.add_column("scenario", no_wrap=True, style="cyan")
    table.add_column("what happens", ratio=3)
    table.add_column("number it reproduces, and its source", ratio=3)
    for name, scenario in SCENARIOS.items():
        number = Text.assemble(f"{scenario.reproduces}\n", (scenario.source, "dim"))
        table.add_row(name, scenario.summary, number)
    return table
