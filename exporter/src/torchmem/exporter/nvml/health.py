"""ECC errors and what was done about them."""

from __future__ import annotations

from typing import Any

from torchmem.exporter.nvml.binding import Door, real
from torchmem.exporter.values import RECOVERY_ACTIONS, Ecc, Repairs

_KINDS = ("corrected", "uncorrected")  # nvmlMemoryErrorType_t
_SCOPES = (
    "volatile",
    "aggregate",
)  # nvmlEccCounterType_t: since the driver was loaded, since the card was made
_RETIRED_SINGLE, _RETIRED_DOUBLE, _RETIRED_PENDING = (
    29,
    30,
    31,
)  # NVML_FI_DEV_RETIRED_SBE, _DBE, _PENDING
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_ACTIONS: dict[int | None, str] = dict(enumerate(RECOVERY_ACTIONS))


def ecc(door: Door, handle: Any) -> Ecc:
    """nvmlDeviceGetEccMode and nvmlDeviceGetTotalEccErrors."""
    mode = door.ask("nvmlDeviceGetEccMode", handle)
    errors = {
        (kind, scope): real(
            door.ask("nvmlDeviceGetTotalEccErrors", handle, kind_number, scope_number)
        )
        for kind_number, kind in enumerate(_KINDS)
        for scope_number, scope in enumerate(_SCOPES)
    }
    known = {key: count for key, count in errors.items() if count is not None}
    return Ecc(None if mode is None else bool(mode[0]), known)


def repairs(door: Door, handle: Any) -> Repairs:
    """nvmlDeviceGetRemappedRows; retired pages and recovery action from field values."""
    rows = door.ask("nvmlDeviceGetRemappedRows", handle)
    wanted = (_RETIRED_SINGLE, _RETIRED_DOUBLE, _RETIRED_PENDING, _RECOVERY_ACTION)
    single, double, pending, action = door.fields(handle, *wanted)
    pages = {"multiple_single_bit": single, "double_bit": double}
    return Repairs(
        remapped_rows={} if rows is None else {"correctable": rows[0], "uncorrectable": rows[1]},
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        retired_pages={cause: count for cause, count in pages.items() if count is not None},
        retirement_pending=None if pending is None else bool(pending),
        recovery_action=_ACTIONS.get(action),
    )
