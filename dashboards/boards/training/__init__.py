"""The dashboard "Training memory": will a rank run out of memory, which one, and where did the memory go?"""

from __future__ import annotations

from dashboards import choices, common
from dashboards.boards.training import (
    comparison,
    fragmentation,
    memory,
    overview,
    pressure,
    processes,
)
from dashboards.panels import Board

BOARD = Board(
    common.TRAINING,
    "Training memory",
    "GPU memory of PyTorch training, per rank and per GPU: what the allocator holds, what it cannot use, and how much "
    "room is left.",
    (*choices.TRAINING, choices.COMPARE),
    {
        "Will it run out of memory?": overview.panels(),
        "Where is the memory?": memory.panels(),
        "Fragmentation": fragmentation.panels(),
        "Pressure": pressure.panels(),
        "Ranks and settings": processes.panels(),
        "Before and after: the chosen run and the one to compare with": comparison.panels(),
    },
    (common.OOM_NOTE,),
)
