"""NVLink: state of each link, errors by kind, and bytes over all links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmem.exporter.gpus import GpuValue, series
from torchmem.exporter.nvml import DeviceState, NvmlDevice, available
from torchmem.exporter.subjects.pcie import Traffic
from torchmem.metrics import catalog

_KIBIBYTE = 1024  # the unit of the throughput fields is KiB
_ALL_LINKS = (1 << 32) - 1  # as the scope of a field: the sum over all links
_LINK_COUNT = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT
# NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX (KiB), and what NVLink 5 has instead:
# NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES and _RCV_BYTES
_TRAFFIC_FIELDS = (138, 139, 202, 204)
_MAX_LINKS = 72
# nvmlNvLinkErrorCounter_t 0 to 4
_ERRORS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")

LinkErrors = dict[tuple[int, str], int]


class _Errors(DeviceState):
    """The last error counters of each link, so that the sum does not fall when a link goes down."""

    def __init__(self) -> None:
        self.by_link: LinkErrors = {}


def errors_by_kind(errors: Mapping[tuple[int, str], int]) -> Mapping[str, int]:
    """Return the errors over all links: the errors of each link would be 72 series or more."""
    total = Counter[str]()
    for (_, kind), count in errors.items():
        total[kind] += count
    return total


@dataclass(frozen=True, slots=True)
class NvLink(GpuValue):
    """Whether each link is up, errors by (link, kind), and bytes over all links."""

    up: Mapping[int, bool] = series(catalog.NVML_NVLINK_UP, default_factory=dict)
    errors: Mapping[tuple[int, str], int] = series(
        catalog.NVML_NVLINK_ERRORS, errors_by_kind, default_factory=dict
    )
    transferred: Traffic = series(
        catalog.NVML_NVLINK_BYTES, Traffic.directions, default_factory=Traffic
    )

    @classmethod
    def read(cls, gpu: NvmlDevice) -> NvLink:
        """Read every link; nothing on a GPU without links. State and errors are read seldom.

        Only links that are up have error counters; one that is down keeps its last ones.
        """
        up, errors = gpu.seldom(_states_and_errors)
        return cls(up, errors, _transferred(gpu)) if up else cls()


def _states_and_errors(gpu: NvmlDevice) -> tuple[Mapping[int, bool], LinkErrors]:
    """Read every link, which takes more calls than the rest of a scrape."""
    (count,) = gpu.field_values(_LINK_COUNT)
    up = _states(gpu, _MAX_LINKS if count is None else min(count, _MAX_LINKS))
    active = [link for link, is_up in up.items() if is_up]
    last = gpu.state(_Errors)
    last.by_link = {**last.by_link, **_error_counters(gpu, active)} if up else {}
    return up, last.by_link


def _states(gpu: NvmlDevice, count: int) -> dict[int, bool]:
    """Call nvmlDeviceGetNvLinkState up to the first link that does not exist."""
    up: dict[int, bool] = {}
    for link in range(count):
        state = gpu.call("nvmlDeviceGetNvLinkState", link)
        if state is None:
            break
        up[link] = bool(state)
    return up


def _error_counters(gpu: NvmlDevice, links: Sequence[int]) -> LinkErrors:
    """Call nvmlDeviceGetNvLinkErrorCounter; skip a kind that the first link does not count."""
    errors: LinkErrors = {}
    for number, kind in enumerate(_ERRORS):
        for link in links:
            count = available(gpu.call("nvmlDeviceGetNvLinkErrorCounter", link, number))
            if count is None:
                break
            errors[link, kind] = count
    return errors


def _transferred(gpu: NvmlDevice) -> Traffic:
    fields = [(number, _ALL_LINKS) for number in _TRAFFIC_FIELDS]
    tx_kib, rx_kib, tx, rx = gpu.field_values(*fields)
    return Traffic(
        rx=rx if rx_kib is None else rx_kib * _KIBIBYTE,
        tx=tx if tx_kib is None else tx_kib * _KIBIBYTE,
    )
