"""ECC errors, and the rows and pages of device memory that were retired because of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuLabels, GpuValue, series
from torchmem.exporter.nvml import NvmlDevice, available
from torchmem.exporter.reading import Reading
from torchmem.metrics import catalog
from torchmem.metrics.families import Row, family, value_family

_KINDS = ("corrected", "uncorrected")  # nvmlMemoryErrorType_t
# nvmlEccCounterType_t: since the driver was loaded, over the lifetime of the GPU
_SCOPES = ("volatile", "aggregate")
_RETIRED_FIELDS = (29, 30, 31)  # NVML_FI_DEV_RETIRED_SBE, _DBE, _PENDING
_RECOVERY_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
# nvmlDeviceGpuRecoveryAction_t of nvml.h (driver 580), by number
_RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
_ACTION_BY_NUMBER: dict[int | None, str] = dict(enumerate(_RECOVERY_ACTIONS))


@dataclass(frozen=True, slots=True)
class Ecc(GpuValue):
    """Whether ECC is enabled, and errors by kind (corrected, uncorrected) and scope."""

    enabled: bool | None = None
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Ecc:
        """Call nvmlDeviceGetEccMode and nvmlDeviceGetTotalEccErrors."""
        errors = {}
        for kind, scope in product(range(len(_KINDS)), range(len(_SCOPES))):
            count = available(gpu.call("nvmlDeviceGetTotalEccErrors", kind, scope))
            if count is not None:
                errors[_KINDS[kind], _SCOPES[scope]] = count
        mode = gpu.call_seldom("nvmlDeviceGetEccMode")
        return cls(None if mode is None else bool(mode[0]), errors)


def recovery_actions(asked: str | None) -> Mapping[str, float]:
    """Return 1 for the action that the driver asks for and 0 for the others, if it is known."""
    return {} if asked is None else {action: float(action == asked) for action in _RECOVERY_ACTIONS}


@dataclass(frozen=True, slots=True)
class Repairs(GpuValue):
    """Device memory taken out of use: remapped rows (Ampere and newer), retired pages (older).

    `recovery_action`: what the driver asks the operator to do.
    """

    remapped_rows: Mapping[str, int] = series(catalog.NVML_REMAPPED_ROWS, default_factory=dict)
    remap_pending: bool | None = series(catalog.NVML_ROW_REMAP_PENDING)
    remap_failed: bool | None = series(catalog.NVML_ROW_REMAP_FAILED)
    retired_pages: Mapping[str, int | None] = series(
        catalog.NVML_RETIRED_PAGES, default_factory=dict
    )
    retirement_pending: bool | None = series(catalog.NVML_RETIRED_PAGES_PENDING)
    recovery_action: str | None = series(
        catalog.NVML_RECOVERY_ACTION, recovery_actions, default=None
    )

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Repairs:
        """Call nvmlDeviceGetRemappedRows; read retired pages and recovery action as fields."""
        rows = gpu.call("nvmlDeviceGetRemappedRows")
        fields = gpu.field_values(*_RETIRED_FIELDS, _RECOVERY_ACTION_FIELD)
        single, double, pending, action = fields
        remapped = {} if rows is None else {"correctable": rows[0], "uncorrectable": rows[1]}
        return cls(
            remapped_rows=remapped,
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            retired_pages={"multiple_single_bit": single, "double_bit": double},
            retirement_pending=None if pending is None else bool(pending),
            recovery_action=_ACTION_BY_NUMBER.get(action),
        )


def families(reading: Reading) -> Iterator[Metric]:
    """Yield ECC mode and errors by kind and scope."""
    rows = reading.read(Ecc)
    yield value_family(catalog.NVML_ECC_ENABLED, rows, lambda ecc: ecc.enabled)
    yield family(catalog.NVML_ECC_ERRORS, _error_rows(rows))


def _error_rows(rows: Iterable[tuple[GpuLabels, Ecc]]) -> Iterator[Row]:
    for labels, ecc in rows:
        for key, count in ecc.errors.items():
            yield (*labels, *key), count
