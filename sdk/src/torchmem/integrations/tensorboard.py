"""TensorBoard: memory as scalars of a SummaryWriter, by torch.utils.tensorboard or tensorboardX.

from torchmem.integrations.tensorboard import log_memory

log_memory(SummaryWriter("runs/gpt"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torchmem import sdk
from torchmem.integrations.memory_log import EVERY_SECONDS, MemoryLog
from torchmem.sample.sample import Sample

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Writer(Protocol):
    """The part of a SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> Any:
        """Add one value."""


def log_memory(
    writer: Writer, every: float = EVERY_SECONDS, **settings: Unpack[sdk.SettingsKeywords]
) -> MemoryLog:
    """Log the memory of this process to a writer that the script has opened.

    Logs every `every` seconds from a separate thread, at the step that the session counts, until
    the writer is closed. Takes the settings of `sdk.instrument`.
    """

    def write(scalars: dict[str, float], sample: Sample) -> None:
        # A writer that was closed has no file, and would open another one.
        if getattr(writer, "file_writer", writer) is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, sample.steps.count, sample.timestamp)

    return MemoryLog(sdk.instrument(**settings), write, every)
