"""PCIe and NVLink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchmem.exporter.nvml.binding import Door, real, scaled
from torchmem.exporter.values import NvLink, Pcie, Transfer

_KILOBYTE, _KIBIBYTE = 1000, 1024  # nvml.h says KB for PCIe and KiB for NVLink
_TX, _RX = 0, 1  # nvmlPcieUtilCounter_t
_ALL_LINKS = (1 << 32) - 1  # as the scope of a field: the sum over all links
_LINK_COUNT = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT
_DATA_TX_RX_KIB = (138, 139)  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX
_TX_RX_BYTES = (
    202,
    204,
)  # NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES and _RCV_BYTES, which NVLink 5 has instead
_MOST_LINKS = 72
_ERRORS = (
    "replay",
    "recovery",
    "crc_flit",
    "crc_data",
    "ecc_data",
)  # nvmlNvLinkErrorCounter_t 0 to 4


def pcie(door: Door, handle: Any) -> Pcie:
    """Link generation and width, now and at most; replay counter."""
    return Pcie(
        generation=real(door.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)),
        max_generation=real(door.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        width=real(door.ask("nvmlDeviceGetCurrPcieLinkWidth", handle)),
        max_width=real(door.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)),
        replays=real(door.ask("nvmlDeviceGetPcieReplayCounter", handle)),
    )


def pcie_throughput(door: Door, handle: Any) -> Transfer:
    """nvmlDeviceGetPcieThroughput, KB/s over 20 ms for each direction."""
    return Transfer(
        rx=scaled(door.ask("nvmlDeviceGetPcieThroughput", handle, _RX), _KILOBYTE),
        tx=scaled(door.ask("nvmlDeviceGetPcieThroughput", handle, _TX), _KILOBYTE),
    )


def nvlink(door: Door, handle: Any, known: Mapping[tuple[int, str], int]) -> NvLink:
    """State of every link, error counters, bytes over all; nothing on a GPU without links.

    Only links that are up count: one that is down keeps its errors of `known`, else the sum over links would fall.
    """
    (count,) = door.fields(handle, _LINK_COUNT)
    up = _states(door, handle, _MOST_LINKS if count is None else min(count, _MOST_LINKS))
    if not up:
        return NvLink()
    active = [link for link, is_up in up.items() if is_up]
    errors = {**known, **_error_counters(door, handle, active)}
    return NvLink(up, errors, _transferred(door, handle))


def _states(door: Door, handle: Any, count: int) -> dict[int, bool]:
    """nvmlDeviceGetNvLinkState up to the first link that does not exist."""
    up: dict[int, bool] = {}
    for link in range(count):
        state = door.ask("nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            break
        up[link] = bool(state)
    return up


def _error_counters(door: Door, handle: Any, links: list[int]) -> dict[tuple[int, str], int]:
    """nvmlDeviceGetNvLinkErrorCounter; a kind that the first link does not count is not asked of the others."""
    found: dict[tuple[int, str], int] = {}
    for number, kind in enumerate(_ERRORS):
        for link in links:
            errors = real(door.ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, number))
            if errors is None:
                break
            found[link, kind] = errors
    return found


def _transferred(door: Door, handle: Any) -> Transfer:
    wanted = [(field, _ALL_LINKS) for field in (*_DATA_TX_RX_KIB, *_TX_RX_BYTES)]
    tx_kib, rx_kib, tx, rx = door.fields(handle, *wanted)
    return Transfer(
        rx=rx if rx_kib is None else rx_kib * _KIBIBYTE,
        tx=tx if tx_kib is None else tx_kib * _KIBIBYTE,
    )
