"""The state of a node over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from support import reports
from support.publishing import own_process, own_sample, publish
from support.samples import UUID
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.explain.oom_report import encode as encode_report
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.live.api import LiveApi
from torchmem.exporter.live.states import MIN_SECONDS, RankIndex, States
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.web.fair_queue import FairQueue
from torchmem.node.state import decode
from torchmem.sample.run_directory import report_name

GIB = 1 << 30


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def server(run_dir: Path) -> Iterator[ExporterServer]:
    """An exporter with one GPU, whose run directory is empty."""
    gpu = FakeGpu(GpuIdentity(0, UUID), MemoryInfo(80 * GIB, 70 * GIB, 9 * GIB, GIB))
    exporter = Exporter(FakeNvml.of(gpu), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter)) as running:
        yield running


@pytest.fixture
def client(server: ExporterServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        yield client


def with_ranks(client: httpx.Client) -> httpx.Response | None:
    """Return the state once it has ranks."""
    answer = client.get("/api/v1/state")
    return answer if answer.json()["gpus"][0]["ranks"] else None


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_state_follows_the_ranks(client: httpx.Client, run_dir: Path, coding: str) -> None:
    """The state has what ranks publish meanwhile, compressed or not."""
    client.headers["Accept-Encoding"] = coding
    before = client.get("/api/v1/state")
    publish(run_dir, own_sample())
    after = until(lambda: with_ranks(client))

    assert after.headers.get("content-encoding", "identity") == coding
    assert decode(before.content).gpus[0].ranks == ()
    state = decode(after.content)
    assert state.gpus[0].ranks[0].run == "night"
    assert (state.time or 0.0) > (decode(before.content).time or 0.0) > 0


def test_state_has_only_what_is_known(client: httpx.Client, run_dir: Path) -> None:
    """Unknown values are absent from the JSON, not null; parts add up to the GPU."""
    publish(run_dir, own_sample(process=own_process(script=None)))
    answer = until(lambda: with_ranks(client))
    (gpu,) = answer.json()["gpus"]

    assert "null" not in answer.text
    assert "temperature_celsius" not in gpu
    assert "script" not in gpu["ranks"][0]
    assert sum(part["bytes"] for part in gpu["parts"]) == gpu["total_bytes"] == 80 * GIB


def test_clients_share_collections(run_dir: Path) -> None:
    """However many requests come, there is at most one collection per second for them."""
    readings: list[object] = []

    def note(call: object, _: object) -> None:
        readings.extend([call] if call == "count" else [])

    gpu = FakeGpu(GpuIdentity(0, UUID), MemoryInfo(80, 70, 9, 1))
    exporter = Exporter(FakeNvml(lambda: [gpu], on_call=note), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter)) as running:
        url = running.url
        httpx.get(f"{url}/metrics", trust_env=False, timeout=60)
        first, begun = len(readings), time.monotonic()
        state = f"{url}/api/v1/state"
        codes = [httpx.get(state, trust_env=False, timeout=60).status_code for _ in range(10)]
        seconds = time.monotonic() - begun

    assert codes == [200] * 10
    assert len(readings) <= first + 1 + seconds / MIN_SECONDS


def test_words_about_a_rank_are_made_once_for_each_collection(run_dir: Path) -> None:
    """However often clients ask, the run directory is searched for its report once."""
    sample = publish(run_dir, own_sample())
    report = sample.with_name(report_name(sample.name, 1))
    report.write_bytes(encode_report(reports.STRANDED))
    exporter = Exporter(FakeNvml.of(), RunDirectory(run_dir))
    exporter.collect()
    found = replace(exporter.found(), time=time.time() + 1)

    async def collect() -> None:
        """Leave what was found as it is."""

    queue = FairQueue("test", 1)
    api = LiveApi(States(collect, lambda: found), RankIndex(lambda: found), run_dir, queue)
    app = Starlette(routes=[Route("/api/v1/rank", api.rank)])
    asked = {"id": found.published[0].id, "gpu": UUID}

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = await client.get("/api/v1/rank", params=asked)
            report.unlink()
            return [first, await client.get("/api/v1/rank", params=asked)]

    first, second = asyncio.run(ask())
    exporter.close()

    assert "oom" in first.json()
    assert first.json() == second.json()


def test_hostile_names_stay_text(client: httpx.Client, run_dir: Path) -> None:
    """Names with markup and control characters arrive as JSON strings, bounded in length."""
    name = "</script><img src=x onerror=alert(1)>" + "x" * 10_000 + "\x00\u2028"
    publish(run_dir, own_sample(process=own_process(run=name)))
    answer = until(lambda: with_ranks(client))

    run = answer.json()["gpus"][0]["ranks"][0]["run"]
    assert run.startswith("</script><img")
    assert len(run) <= 200
