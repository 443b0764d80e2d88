"""What training code imports: `from torchmem import sdk; sdk.instrument()`."""

from torchmem.sdk._instrument import instrument
from torchmem.sdk._session import Session

__all__ = ["Session", "instrument"]
