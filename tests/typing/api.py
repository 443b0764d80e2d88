"""The public API is typed: a training script as mypy --strict sees it."""

from __future__ import annotations

from torchmem import sdk

session: sdk.Session = sdk.instrument(run="night", interval=2.0, port=0)
again = sdk.instrument()
session.step(samples=32)
address: str | None = session.url
with sdk.instrument(enabled=False) as inner:
    inner.step()
session.close()

sdk.instrument(intervall=2.0)  # type: ignore[call-arg]
sdk.instrument(port="9000")  # type: ignore[arg-type]
