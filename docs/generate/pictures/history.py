"""A Prometheus that holds a recorded past: scrapes, what the rules made of them, and alerts.

`promtool tsdb create-blocks-from` would import neither the markers with which Prometheus ends a
series, nor rules that read other rules, nor alerts. So the samples are sent to Prometheus, as a
remote write, with the timestamps of the recording.
"""

from __future__ import annotations

import json
import struct
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from docs.generate.pictures.nodes import Labels, Scrape
from support.stack import answers, free_port, running
from support.waiting import until

STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""The NaN that ends a series: `StaleNaN` of Prometheus' model/value/value.go."""
MAX_SERIES = 5000
CONFIGURATION = "storage:\n  tsdb:\n    out_of_order_time_window: 2d\n"


class History:
    """Samples on their way to Prometheus; a series that a scrape lacks gets the marker STALE.

    `copies` are the URLs of other stores that get the same samples.
    """

    def __init__(self, url: str, *copies: str) -> None:
        self.url, self._copies = url, copies
        self._pending: dict[Labels, list[tuple[int, float]]] = defaultdict(list)
        self._count = 0

    def add(self, series: Labels, points: Iterable[tuple[int, float]]) -> None:
        """Store points of one series: milliseconds since 1970 and value."""
        self._pending[series].extend(points)

    def flush(self) -> None:
        """Send everything that is pending."""
        pending, self._pending = list(self._pending.items()), defaultdict(list)
        for start in range(0, len(pending), MAX_SERIES):
            self._send(pending[start : start + MAX_SERIES])

    def _send(self, series: list[tuple[Labels, list[tuple[int, float]]]]) -> None:
        body = b"".join(_field(1, _time_series(labels, points)) for labels, points in series)
        for store in (self.url, *self._copies):
            request = urllib.request.Request(  # noqa: S310 - loopback
                f"{store}/api/v1/write",
                _snappy(body),
                {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"},
            )
            urllib.request.urlopen(request, timeout=60).close()  # noqa: S310

    def query_range(
        self, expression: str, start: float, end: float, step: float
    ) -> list[tuple[Mapping[str, str], dict[int, float]]]:
        """Return the labels of each series of the result, and its values by milliseconds."""
        parameters = {"query": expression, "start": start, "end": end, "step": step}
        data = urllib.parse.urlencode(parameters).encode()
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range", data, 60) as response:  # noqa: S310
            result = json.load(response)["data"]["result"]
        return [
            (
                series["metric"],
                {round(time * 1000): float(value) for time, value in series["values"]},
            )
            for series in result
        ]


class Scrapes:
    """Writes scrapes of one target, one after the other, into a history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._last: set[Labels] = set()

    def add(self, milliseconds: int, scrape: Scrape) -> None:
        """Store a scrape, and end the series that it lacks."""
        for series, value in scrape.items():
            self._history.add(series, [(milliseconds, value)])
        for series in self._last - scrape.keys():
            self._history.add(series, [(milliseconds, STALE)])
        self._last = set(scrape)


def with_stale_markers(points: Mapping[int, float], ticks: range) -> Iterator[tuple[int, float]]:
    """Yield the points, and STALE at the first of `ticks` after each gap begins."""
    was_present = False
    for tick in ticks:
        if tick in points:
            yield tick, points[tick]
        elif was_present:
            yield tick, STALE
        was_present = tick in points


@contextmanager
def prometheus(data: Path) -> Iterator[str]:
    """Run a Prometheus that neither scrapes nor evaluates rules; yield its URL."""
    data.mkdir(parents=True, exist_ok=True)
    configuration = data / "prometheus.yml"
    configuration.write_text(CONFIGURATION)
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={data / 'tsdb'}",
        f"--web.listen-address={address}",
        "--web.enable-remote-write-receiver",
        "--storage.tsdb.retention.time=10y",
        "--log.level=warn",
    ]
    with running(command, data / "prometheus.log"):
        until(lambda: answers(f"http://{address}/-/ready"))
        yield f"http://{address}"


def _time_series(labels: Labels, points: Iterable[tuple[int, float]]) -> bytes:
    """Encode prompb.TimeSeries."""
    return _labels(labels) + b"".join(_sample(*point) for point in points)


@cache
def _labels(labels: Labels) -> bytes:
    """Encode the labels of a series, in alphabetical order."""
    return b"".join(
        _field(1, _field(1, name.encode()) + _field(2, value.encode()))
        for name, value in sorted(labels)
    )


def _sample(milliseconds: int, value: float) -> bytes:
    moment = _varint(milliseconds)
    return b"\x12%c\x09%b\x10%b" % (len(moment) + 10, struct.pack("<d", value), moment)


def _field(number: int, content: bytes) -> bytes:
    """Encode a field of protobuf's wire type 2: length, then content."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


@cache
def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _snappy(content: bytes) -> bytes:
    """Return a block in snappy's format: the length, then one literal, not compressed."""
    return _varint(len(content)) + b"\xfc" + struct.pack("<I", len(content) - 1) + content
