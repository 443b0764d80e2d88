"""The exporter with one of two encoders (arguments: library|cached, then the exporter's own)."""

from __future__ import annotations

import sys

from benchmarks.scrape import cached_encoder

from torchmem.exporter import __main__, scrapes
from torchmem.exporter.scrapes import OPENMETRICS, TEXT, Format


def _use_cached_encoder() -> None:
    formats = {
        TEXT: Format(TEXT.content_type, cached_encoder.text),
        OPENMETRICS: Format(OPENMETRICS.content_type, cached_encoder.openmetrics),
    }
    choose = scrapes.choose_format
    scrapes.choose_format = lambda accept: formats[choose(accept)]


if __name__ == "__main__":
    if sys.argv.pop(1) == "cached":
        _use_cached_encoder()
    sys.exit(__main__.main())
