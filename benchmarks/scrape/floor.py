"""prometheus_client's own server with gauges, as a lower bound (arguments: PORT SERIES)."""

from __future__ import annotations

import sys
import time

from prometheus_client import CollectorRegistry, Gauge, start_http_server

FAMILIES = 60
LABELS = ("gpu", "uuid", "rank", "pid", "run")


def registry(series: int) -> CollectorRegistry:
    """Return gauges with five labels each, spread evenly over the families."""
    gauges = CollectorRegistry()
    for number in range(min(FAMILIES, series)):
        name, documentation = f"floor_{number}_bytes", "A help text of usual length."
        gauge = Gauge(name, documentation, LABELS, registry=gauges)
        for rank in range(number, series, FAMILIES):
            gauge.labels(
                "0", "GPU-00000000-0000-4000-8000-00000000000a", str(rank), "4242", "night"
            ).set(rank << 20)
    return gauges


if __name__ == "__main__":
    start_http_server(int(sys.argv[1]), "127.0.0.1", registry(int(sys.argv[2])))
    while True:
        time.sleep(3600)
