"""What a training script imports: `from torchmem import sdk; sdk.instrument()`."""

from torchmem.sdk._iteration import Iteration, batch_size
from torchmem.sdk._session import Session, current_session, instrument
from torchmem.sdk._settings import SettingsKeywords

__all__ = [
    "Iteration",
    "Session",
    "SettingsKeywords",
    "batch_size",
    "current_session",
    "instrument",
]
