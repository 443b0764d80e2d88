"""What is known of the run that a recording was made of."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.whatif.rebuild import Before


@dataclass(frozen=True, slots=True)
class Case:
    """A recording, the settings it was made under and the memory before it.

    `card_bytes`: what the allocator could get, `total_bytes`: all memory of the card; None where nobody knows.
    """

    recording: Recording
    config: AllocatorConfig
    before: Before
    card_bytes: int | None
    total_bytes: int | None
