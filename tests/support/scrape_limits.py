"""What a Prometheus should accept of a target: more than an exporter ever serves.

Every shipped configuration of Prometheus has these limits. Prometheus drops a whole scrape that
exceeds one of them, so they do not replace `budgets` and `churn` of the exporter. They protect
Prometheus from something else that serves at the address of an exporter or of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchmem.exporter.budgets import MAX_PAGE_BYTES_PER_USER, MAX_SERIES_PER_USER, NODE_SHARES
from torchmem.sample.untrusted import MAX_ITEMS, MAX_TEXT

MAX_OTHER_SERIES = 20_000
"""Those that are not in samples: of 16 GPUs with MIG and 32 processes each 6,000, and of 4096
devices of ranks two for each, for the bytes outside the allocator."""

_NAMES = 32  # of labels on one series that are the exporter's or Prometheus' own
_LABELS: Mapping[str, int] = {
    "label_limit": 2 * MAX_ITEMS + _NAMES,  # labels and versions on torchmem_process_info
    "label_name_length_limit": MAX_TEXT + 56,
    "label_value_length_limit": MAX_TEXT + 56,
}


def _limits(series: int, page_bytes: int) -> Mapping[str, int | str]:
    return {"sample_limit": series, "body_size_limit": f"{page_bytes >> 20}MB", **_LABELS}


NODE_LIMITS = _limits(
    NODE_SHARES * MAX_SERIES_PER_USER + MAX_OTHER_SERIES, 2 * NODE_SHARES * MAX_PAGE_BYTES_PER_USER
)
"""Of an exporter, as they are written in a scrape configuration of Prometheus."""

RANK_LIMITS = _limits(MAX_SERIES_PER_USER, 2 * MAX_PAGE_BYTES_PER_USER)
"""Of a rank that serves its own metrics, or those of all ranks of its pod."""
