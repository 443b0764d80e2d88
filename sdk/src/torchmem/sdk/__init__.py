"""What a training script imports: `from torchmem import sdk; sdk.instrument()`."""

from torchmem.sdk.engine import EngineAllocation, EnginePlan, EngineSource, EngineTerms
from torchmem.sdk.iteration import Iteration, batch_size
from torchmem.sdk.served_engine import ServedEngine
from torchmem.sdk.session import Session, current_session, instrument, newest_sample
from torchmem.sdk.settings import SettingsKeywords

__all__ = [
    "EngineAllocation",
    "EnginePlan",
    "EngineSource",
    "EngineTerms",
    "Iteration",
    "ServedEngine",
    "Session",
    "SettingsKeywords",
    "batch_size",
    "current_session",
    "instrument",
    "newest_sample",
]
