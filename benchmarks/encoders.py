"""Compare prometheus_client's encoders with a cached one: CPU time of a whole scrape and alone.

    PYTHONPATH=tests python -m benchmarks.encoders

Two exporters on the same simulated node, one with each encoder, are scraped in turn over HTTP as
Prometheus scrapes, with every rank publishing before each scrape. The encoding alone is measured on
the families of the same node, in this process. Needs a C compiler, and no GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.scrape import cached_encoder
from benchmarks.scrape.node import Node
from benchmarks.scrape.server import HEADERS, Server, started
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support.idle_processes import idle_processes

from torchmem.exporter.scrapes import OPENMETRICS, TEXT, Format

FORMATS = {"OpenMetrics": OPENMETRICS, "text": TEXT}
ACCEPT = {"OpenMetrics": HEADERS["Accept"], "text": "text/plain;version=0.0.4"}
GPM_SECONDS = 1.0  # GPM metrics need two reads with some time between them
CACHED = {"OpenMetrics": cached_encoder.openmetrics, "text": cached_encoder.text}
HEADER = "| ranks | format | series | whole scrape, ms | cached | ratio | encoding, ms | cached |"


@contextmanager
def exporters(node: Node) -> Iterator[tuple[Server, Server]]:
    """Start an exporter with prometheus_client's encoders and one with the cached encoder."""
    with (
        started(_command("library", node), node.environment()) as library,
        started(_command("cached", node), node.environment()) as cached,
    ):
        yield library, cached


def _command(encoder: str, node: Node) -> list[str]:
    flags = ["--listen", "127.0.0.1:PORT", "--run-dir", str(node.run_dir)]
    return [sys.executable, "-m", "benchmarks.scrape.with_encoder", encoder, *flags]


def whole_scrapes(node: Node, servers: tuple[Server, ...], accept: str, count: int) -> list[float]:
    """Return the CPU seconds of a scrape of each server, which are scraped in turn."""
    used = [0.0] * len(servers)
    for server in servers:
        server.scrape(accept)
        server.scrape(accept)
    for _ in range(count):
        for number, server in enumerate(servers):
            node.publish()
            before = server.cpu_seconds
            server.scrape(accept)
            used[number] += server.cpu_seconds - before
    return [seconds / count for seconds in used]


class Page(CollectorRegistry):
    """The families of a page in the text format."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.families = list(text_string_to_metric_families(text))

    def collect(self) -> list[object]:  # type: ignore[override]
        """Return the families."""
        return self.families  # type: ignore[return-value]


def encoding(encode: Callable[[CollectorRegistry], bytes], page: Page, count: int) -> float:
    """Return the CPU seconds of encoding the page once."""
    encode(page)
    start = time.process_time()
    for _ in range(count):
        encode(page)
    return (time.process_time() - start) / count


def compare(gpus: int, ranks: int, scrapes: int) -> None:
    """Print one row for each format."""
    with tempfile.TemporaryDirectory() as folder, idle_processes(ranks) as pids:
        node = Node(Path(folder), gpus, pids)
        with exporters(node) as servers:
            servers[0].scrape()
            time.sleep(GPM_SECONDS)
            page = Page(servers[0].scrape(ACCEPT["text"]).text)
            for name, format_ in FORMATS.items():
                _check(page, format_, name)
                library, cached = whole_scrapes(node, servers, ACCEPT[name], scrapes)
                alone = [encoding(encode, page, 10) for encode in (format_.encode, CACHED[name])]
                series = sum(len(family.samples) for family in page.families)
                print(
                    f"| {ranks} | {name} | {series:,} | {library * 1e3:.1f} | {cached * 1e3:.1f} | "
                    f"{cached / library:.2f} | {alone[0] * 1e3:.1f} | {alone[1] * 1e3:.1f} |",
                    flush=True,
                )


def _check(page: Page, format_: Format, name: str) -> None:
    if format_.encode(page) != CACHED[name](page):
        sys.exit(f"the encoders of {name} disagree")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--scrapes", type=int, default=60, help="of each exporter at 8 ranks")
    arguments = parser.parse_args()
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}")
    for ranks in arguments.ranks:
        compare(arguments.gpus, ranks, max(8, arguments.scrapes * 8 // max(8, ranks)))


if __name__ == "__main__":
    main()
