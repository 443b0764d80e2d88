"""What a training script imports: `from torchmem import sdk; sdk.instrument()`."""

from torchmem.sdk._session import Session, instrument

__all__ = ["Session", "instrument"]
