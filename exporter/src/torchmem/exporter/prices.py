"""What an hour of each GPU costs, as a series: the one place where rules and reports find it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuIdentity
from torchmem.metrics import catalog
from torchmem.metrics.families import family

DEFAULT_CURRENCY = "USD"
CURRENCY = re.compile(r"[A-Z]{3}")
"""The code of a currency, as in ISO 4217."""


@dataclass(frozen=True, slots=True)
class GpuPrices:
    """Prices of a GPU-hour in `currency`, by a part of the name that the driver gives the GPU."""

    by_model: Mapping[str, float] = field(default_factory=dict)
    currency: str = DEFAULT_CURRENCY

    def price(self, name: str) -> float | None:
        """Return the price of a GPU: that of the longest part that its name has."""
        known = [part for part in self.by_model if part.casefold() in name.casefold()]
        return self.by_model[max(known, key=len)] if known else None


def price_families(prices: GpuPrices, gpus: Iterable[GpuIdentity]) -> Iterator[Metric]:
    """Yield the price of each GPU that has one, also of GPUs that are lost."""
    rows = [
        ((*gpu.labels, gpu.name, prices.currency), price)
        for gpu in gpus
        if gpu.name and (price := prices.price(gpu.name)) is not None
    ]
    if rows:
        yield family(catalog.GPU_HOUR_PRICE, rows)
