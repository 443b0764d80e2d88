"""`/sd` lists ranks with their own endpoint, and no sample can add another host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.needs import needs
from support.publishing import own_process, own_sample, publish
from support.stack import Prometheus, answers, free_port, running
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.discovery import target_groups
from torchmem.exporter.server import serve
from torchmem.node.published import Published
from torchmem.sdk.publish.endpoint import Endpoint
from torchmem.sdk.publish.outputs import registry
from torchmem.sdk.publish.page import Page
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.settings import Settings

NODE = {"127.0.0.1", "10.0.0.5", "::1", "fd00::5"}
REMOTE = "10.0.0.9"


def groups(
    url: str | None, host: str = "node5:9847", client: str = REMOTE, **changes: Any
) -> list[Any]:
    """Return the target groups of one process with this endpoint."""
    item = Published(
        replace(own_sample(), metrics_url=url), pid=77, state="running", attributed=True
    )
    return target_groups([replace(item, **changes)], host, client, NODE)


@pytest.mark.parametrize(
    ("url", "client", "target"),
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
def test_target_as_the_client_reaches_it(url: str | None, client: str, target: str | None) -> None:
    """The target is a port of this node, at an address that the client can reach, or absent."""
    assert ([[target]] if target else []) == [
        group["targets"] for group in groups(url, client=client)
    ]


def test_labels_identify_the_process() -> None:
    """Ranks, run, launch and pid are labels for relabeling, and all values are strings."""
    (group,) = groups("http://0.0.0.0:9000/metrics")

    assert group["labels"] == {
        "__meta_torchmem_rank": "0",
        "__meta_torchmem_local_rank": "0",
        "__meta_torchmem_run": "night",
        "__meta_torchmem_launch": "1000-3f9a2c71",
        "__meta_torchmem_pid": "77",
    }


@pytest.mark.parametrize("state", ["exited", "oom", "killed"])
def test_ended_process_is_no_target(state: str) -> None:
    """A process that ended is not scraped, although its final values are still exported."""
    assert groups("http://0.0.0.0:9000/metrics", state=state) == []


@given(
    url=st.none() | st.text() | st.from_regex(r"http://[^/]{0,30}:\d{0,6}/.{0,5}"),
    host=st.text(),
    client=st.text(),
)
def test_targets_are_only_this_node(url: str | None, host: str, client: str) -> None:
    """For any endpoint, Host header and client, the targets are only addresses of this node."""
    answer = json.loads(json.dumps(groups(url, host, client)))

    for group in answer:
        name = group["targets"][0].rpartition(":")[0]
        assert name.strip("[]") in NODE | {host, host.rpartition(":")[0], os.uname().nodename}


@pytest.fixture
def url(open_exporter: Callable[..., Exporter]) -> Iterator[str]:
    """Serve an exporter and yield its URL."""
    with closing(serve(open_exporter())) as server:
        yield server.url


def test_no_endpoint_is_an_empty_list(url: str) -> None:
    """Without a run directory the answer is an empty list."""
    answer = httpx.get(f"{url}/sd", trust_env=False, timeout=60)

    assert (
        answer.status_code,
        answer.headers["content-type"],
        answer.json(),
    ) == (200, "application/json", [])


def test_unreadable_directory_is_an_error(url: str, run_dir: Path) -> None:
    """The answer is an error, so that Prometheus keeps its targets."""
    run_dir.write_text("a file in its place")

    assert httpx.get(f"{url}/sd", trust_env=False, timeout=60).status_code == 500


PROMETHEUS = """
scrape_configs:
  - job_name: ranks
    scrape_interval: 1s
    http_sd_configs: [{{url: '{url}/sd', refresh_interval: 1s}}]
    relabel_configs:
      - {{source_labels: [__meta_torchmem_rank], target_label: trainer_rank}}
"""


@pytest.mark.stack
@needs("prometheus")
def test_prometheus_discovers_a_rank(url: str, run_dir: Path, tmp_path: Path) -> None:
    """Prometheus finds a rank's endpoint, scrapes it, and drops it when the rank ends."""
    sample = own_sample(process=own_process(rank=3))
    endpoint = Endpoint.open(Settings(port=0), 0, Page(registry(lambda: sample)), Errors())
    file = publish(run_dir, replace(sample, metrics_url=endpoint.url))
    configuration, address = tmp_path / "prometheus.yml", f"127.0.0.1:{free_port()}"
    configuration.write_text(PROMETHEUS.format(url=url))
    command = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with running(command, tmp_path / "prometheus.log"):
        until(lambda: answers(f"http://{address}/-/ready"))
        prometheus = Prometheus(f"http://{address}")
        until(lambda: prometheus.value('up{job="ranks", trainer_rank="3"} == 1'))
        reserved = prometheus.query('torchmem_reserved_bytes{job="ranks", trainer_rank="3"}')
        publish(run_dir, replace(sample, metrics_url=endpoint.url, ended="exited"), file.name)
        endpoint.close()

        assert reserved
        assert until(lambda: not prometheus.query('up{job="ranks"}'))
