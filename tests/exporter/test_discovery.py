"""`/sd`: ranks that serve their own endpoint are found by Prometheus, and no sample can point it elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.publishing import own_process, own_sample, publish
from support.stack import Prometheus, answers, free_port, running
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.discovery import target_groups
from torchmem.exporter.run_directory import Published
from torchmem.exporter.server import serve
from torchmem.sdk._outputs import Endpoint
from torchmem.sdk._settings import Settings

NODE = {"127.0.0.1", "10.0.0.5", "::1", "fd00::5"}
REMOTE = "10.0.0.9"


def groups(
    url: str | None, asked_host: str = "node5:9847", asked_from: str = REMOTE, **changes: Any
) -> list[Any]:
    """What one process with this endpoint gives."""
    item = Published(
        replace(own_sample(), metrics_url=url), pid=77, state="running", attributed=True
    )
    return target_groups([replace(item, **changes)], asked_host, asked_from, NODE)


@pytest.mark.parametrize(
    ("url", "asked_from", "target"),
    [
        ("http://0.0.0.0:9000/metrics", REMOTE, "node5:9000"),
        ("http://[::]:9000/metrics", REMOTE, "node5:9000"),
        ("http://10.0.0.5:9000/metrics", REMOTE, "10.0.0.5:9000"),
        ("http://[fd00::5]:9000/metrics", REMOTE, "[fd00::5]:9000"),
        ("http://127.0.0.1:9000/metrics", "127.0.0.1", "127.0.0.1:9000"),
        ("http://127.0.0.1:9000/metrics", "10.0.0.5", "127.0.0.1:9000"),
        ("http://localhost:9000/metrics", "::1", "127.0.0.1:9000"),
        ("http://127.0.0.1:9000/metrics", REMOTE, None),
        ("http://10.9.9.9:80/metrics", REMOTE, None),
        ("http://169.254.169.254:80/latest", REMOTE, None),
        ("http://intranet:80/metrics", REMOTE, None),
        ("http://user@10.9.9.9:80/metrics", REMOTE, None),
        ("https://10.0.0.5:9000/metrics", REMOTE, None),
        ("http://10.0.0.5/metrics", REMOTE, None),
        ("http://10.0.0.5:0/metrics", REMOTE, None),
        ("http://10.0.0.5:99999/metrics", REMOTE, None),
        ("http://[::1/metrics", REMOTE, None),
        ("", REMOTE, None),
        (None, REMOTE, None),
    ],
)
def test_target_as_the_asker_reaches_it(
    url: str | None, asked_from: str, target: str | None
) -> None:
    """Only a port of this node is given out, under an address that leads the asker here; anything else is left out."""
    assert ([[target]] if target else []) == [
        group["targets"] for group in groups(url, asked_from=asked_from)
    ]


def test_labels_say_whose_endpoint_it_is() -> None:
    """Rank, run and pid come as labels for relabelling; all values are text, as Prometheus wants them."""
    (group,) = groups("http://0.0.0.0:9000/metrics")

    assert {
        "__meta_torchmem_rank": "0",
        "__meta_torchmem_local_rank": "0",
        "__meta_torchmem_run": "night",
        "__meta_torchmem_pid": "77",
    } == group["labels"]


@pytest.mark.parametrize("state", ["exited", "oom", "killed"])
def test_ended_process_is_no_target(state: str) -> None:
    """Who has ended is not scraped, although its final values are still shown."""
    assert [] == groups("http://0.0.0.0:9000/metrics", state=state)


@given(
    url=st.none() | st.text() | st.from_regex(r"http://[^/]{0,30}:\d{0,6}/.{0,5}"),
    host=st.text(),
    asked=st.text(),
)
def test_whatever_stands_in_a_sample_only_this_node_is_given_out(
    url: str | None, host: str, asked: str
) -> None:
    """For any endpoint, Host header and asker, targets are only this node, by its addresses or as it was called."""
    found = json.loads(json.dumps(groups(url, host, asked)))

    for group in found:
        name = group["targets"][0].rpartition(":")[0]
        assert name.strip("[]") in NODE | {host, host.rpartition(":")[0], os.uname().nodename}


@pytest.fixture
def url(open_exporter: Callable[..., Exporter]) -> Iterator[str]:
    """A served exporter."""
    with closing(serve(open_exporter())) as server:
        yield server.url


def test_nothing_to_discover_is_an_empty_list(url: str) -> None:
    """Without a run directory, and without endpoints in it, the list is there and empty."""
    answer = httpx.get(f"{url}/sd", trust_env=False)

    assert (200, "application/json", []) == (
        answer.status_code,
        answer.headers["content-type"],
        answer.json(),
    )


def test_unreadable_directory_is_an_error_not_a_shorter_list(url: str, run_dir: Path) -> None:
    """Prometheus keeps the targets it has when the list cannot be made."""
    run_dir.write_text("a file in its place")

    assert 500 == httpx.get(f"{url}/sd", trust_env=False).status_code


PROMETHEUS = """
scrape_configs:
  - job_name: ranks
    scrape_interval: 1s
    http_sd_configs: [{{url: '{url}/sd', refresh_interval: 1s}}]
    relabel_configs:
      - {{source_labels: [__meta_torchmem_rank], target_label: trainer_rank}}
"""


@pytest.mark.stack
@pytest.mark.skipif(
    not shutil.which("prometheus"), reason="prometheus is not on PATH: apt-get install prometheus"
)
def test_prometheus_discovers_a_rank(url: str, run_dir: Path, tmp_path: Path) -> None:
    """The real Prometheus finds a rank's own endpoint over http_sd_configs, scrapes it, and forgets it when it ends."""
    sample = own_sample(process=own_process(rank=3))
    endpoint = Endpoint.open(Settings(port=0), 0, lambda: sample)
    file = publish(run_dir, replace(sample, metrics_url=endpoint.url))
    configuration, address = tmp_path / "prometheus.yml", f"127.0.0.1:{free_port()}"
    configuration.write_text(PROMETHEUS.format(url=url))
    command = ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path / 'data'}",
               f"--web.listen-address={address}", "--log.level=warn"]  # fmt: skip
    with running(command, tmp_path / "prometheus.log"):
        until(lambda: answers(f"http://{address}/-/ready"))
        prometheus = Prometheus(f"http://{address}")
        until(lambda: prometheus.value('up{job="ranks", trainer_rank="3"} == 1'))
        reserved = prometheus.query('torchmem_reserved_bytes{job="ranks", trainer_rank="3"}')
        publish(run_dir, replace(sample, metrics_url=endpoint.url, ended="exited"), file.name)
        endpoint.close()

        assert reserved
        assert until(lambda: not prometheus.query('up{job="ranks"}'))
