"""ECC errors, and the rows and pages of device memory that were taken out of use for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.exporter.values import RECOVERY_ACTIONS
from torchmem.sample import catalog
from torchmem.sample.families import family, known


def collect(reading: Reading) -> Iterator[Metric]:
    """Mode and errors by kind and scope."""
    rows = [(gpu.labels, ecc) for gpu, ecc in reading.each(reading.nvml.ecc)]
    yield family(catalog.NVML_ECC_ENABLED, known((labels, ecc.enabled) for labels, ecc in rows))
    errors = [((*labels, *key), count) for labels, ecc in rows for key, count in ecc.errors.items()]
    yield family(catalog.NVML_ECC_ERRORS, errors)


def collect_repairs(reading: Reading) -> Iterator[Metric]:
    """Remapped rows by kind, retired pages by cause, whether more waits for a reset, and what the driver asks for."""
    rows = [(gpu.labels, repairs) for gpu, repairs in reading.each(reading.nvml.repairs)]
    remapped = [
        ((*labels, kind), count)
        for labels, found in rows
        for kind, count in found.remapped_rows.items()
    ]
    yield family(catalog.NVML_REMAPPED_ROWS, remapped)
    yield family(
        catalog.NVML_ROW_REMAP_PENDING,
        known((labels, found.remap_pending) for labels, found in rows),
    )
    yield family(
        catalog.NVML_ROW_REMAP_FAILED, known((labels, found.remap_failed) for labels, found in rows)
    )
    retired = [
        ((*labels, cause), count)
        for labels, found in rows
        for cause, count in found.retired_pages.items()
    ]
    yield family(catalog.NVML_RETIRED_PAGES, retired)
    pending = known((labels, found.retirement_pending) for labels, found in rows)
    yield family(catalog.NVML_RETIRED_PAGES_PENDING, pending)
    asked = [
        (labels, found.recovery_action)
        for labels, found in rows
        if found.recovery_action is not None
    ]
    actions = [
        ((*labels, action), float(action == wanted))
        for labels, wanted in asked
        for action in RECOVERY_ACTIONS
    ]
    yield family(catalog.NVML_RECOVERY_ACTION, actions)
