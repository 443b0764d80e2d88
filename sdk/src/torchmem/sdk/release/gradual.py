"""The tier `gradual` of the setting `release`: the allocator collects its own oldest segments."""

from __future__ import annotations

from collections.abc import Mapping

from torchmem.sdk.reading.device import DeviceRecord

# Ages of cached segments count from here on; in effect nothing is collected.
AGING_SHARE = 0.999
# The share of the device is set anew when it moves by more than this.
MIN_CHANGE = 0.02
MIN_SHARE = 0.01


def share_to_keep(total: int, driver_free: int, reserved: int, share: float) -> float:
    """Return the share of the device that the allocator may hold before it collects.

    Its reserved bytes, less what the driver lacks to have `share` of the device free; all in bytes.
    """
    wanted = share * total - driver_free
    if wanted <= 0:
        return AGING_SHARE
    return min(AGING_SHARE, max(MIN_SHARE, (reserved - wanted) / total))


class Collected:
    """Finds what the allocator collected by itself on one device, in a window between two reads."""

    def __init__(self) -> None:
        self._returned = 0
        self._retries = 0
        self._others = 0

    def end_window(self, record: DeviceRecord) -> int:
        """Return the bytes; 0 if a retry returned the cache in the same window."""
        retries = record.alloc_retries or 0
        others = sum(
            account.released_bytes for tier, account in record.releases.items() if tier != "gradual"
        )
        returned = record.returned_bytes - self._returned - (others - self._others)
        was_flushed = retries != self._retries
        self._returned, self._retries, self._others = record.returned_bytes, retries, others
        return 0 if was_flushed else max(0, returned)


def shares_to_keep(records: Mapping[int, DeviceRecord], share: float) -> dict[int, float]:
    """Return `share_to_keep` of each device whose memory is known, by torch's index."""
    return {
        index: share_to_keep(
            record.device.total_bytes, record.driver_free, record.reserved_bytes(), share
        )
        for index, record in records.items()
        if record.device.total_bytes is not None and record.driver_free is not None
    }
