"""A target for Prometheus to scrape: the pages of simulated scenarios, or any other text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.local_http import Answer, answering
from support.simulated_time import Series

TEXT = "text/plain; version=0.0.4"
_TARGET = re.compile(r'job="[^"]*",instance="[^"]*",?')


def pages(scrapes: Series) -> list[str]:
    """Return the exposition of each scrape, without the labels that Prometheus adds."""
    count = 1 + max(max(values) for values in scrapes.values())
    lines: list[list[str]] = [[] for _ in range(count)]
    for series, values in scrapes.items():
        if series.startswith("up{"):
            continue
        exposed = _TARGET.sub("", series)
        for number, value in values.items():
            lines[number].append(f"{exposed} {value:.17g}\n")
    return ["".join(page) for page in lines]


@contextmanager
def serving(text: Callable[[], str]) -> Iterator[str]:
    """Serve the text that `text` returns for each request; yield the host and port on loopback."""
    with answering(lambda _: Answer(body=text().encode(), content_type=TEXT)) as address:
        yield address
