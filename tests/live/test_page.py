"""The live page in a real Chromium."""

from __future__ import annotations

import gzip
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import httpx
import pytest
from docs.generate.pictures.training import Life, Trainer
from support import reports
from support.browser import PACKAGES, Page
from support.collectors import EmptyCollector
from support.publishing import own_process, own_sample, publish
from support.words import rank_text

from torchmem.allocator.sizes import format_index
from torchmem.demo.node import SimulatedNode, cuda_bytes, uuid
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.explain.oom_report import encode
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.live.page import files
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.subjects.dead_processes import MIN_SECONDS, DeadProcesses
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.node.published import Published
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.run_directory import report_name
from torchmem.sample.sample import Process
from torchmem.simulator.gpu import GpuUse, SimulatedGpu
from torchmem.simulator.scenarios import SCENARIOS

GIB = 1 << 30
MAX_PAGE_BYTES = 104_000
RANK = ".rank .row"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@contextmanager
def node_of(run_dir: Path, gpus: int = 2, port: int = 0) -> Iterator[ExporterServer]:
    """Serve a simulated node, on whose first GPU this process holds 61 GiB."""
    simulated = SimulatedNode(gpus)
    used = [{os.getpid(): 61 * GIB}]
    exporter = Exporter(FakeNvml(lambda: simulated.gpus(60.0, used)), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter, port=port)) as server:
        yield server


def dead_process(number: int, **changes: object) -> Process:
    """Return a process that no longer exists."""
    return own_process(pid=4_000_000 + number, start_ticks=1, **changes)


def test_a_rank_appears_changes_and_dies(page: Page, run_dir: Path) -> None:
    """The page follows a rank from its first sample to its OOM report, without a reload."""
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait("document.querySelectorAll('.gpu').length === 2")
        assert page.evaluate(f"document.querySelectorAll('{RANK}').length") == 0

        path = publish(run_dir, own_sample(uuid(0)))
        page.wait(f"document.querySelector('{RANK}')?.textContent.includes('running')")
        page.click(RANK)
        page.click("role=tab[name=Why]")
        page.wait("document.querySelector('.why')?.textContent.includes('a larger one fails')")

        path.with_name(report_name(path.name, 1)).write_bytes(encode(reports.STRANDED))
        publish(run_dir, own_sample(uuid(0), ended="oom", timestamp=time.time()))
        page.wait(f"document.querySelector('{RANK}').textContent.includes('out of memory')")
        page.wait("document.querySelector('.oom')?.textContent.includes('Fragmentation')")
        page.wait("document.querySelector('.oom')?.textContent.includes('MLP.forward')")
        assert "died of an OutOfMemoryError" in page.evaluate(
            f"document.querySelector('{RANK}').textContent"
        )


def test_who_holds_a_gpu_and_should_not(page: Page, run_dir: Path) -> None:
    """A process that is gone is told above the GPU's bar, with what to do."""
    simulated, moments = SimulatedNode(1), count(0.0, MIN_SECONDS)
    nvml = FakeNvml(lambda: simulated.gpus(60.0, [{4_000_000: 61 * GIB}]))
    dead = DeadProcesses(lambda _: True, lambda: next(moments))
    exporter = Exporter(nvml, RunDirectory(run_dir), dead=dead)
    with closing(exporter), closing(serve(exporter, port=0)) as server:
        page.goto(server.url)
        page.wait("document.querySelector('.gpu .why-line')?.textContent.includes('pid 4000000')")
        text = page.evaluate("document.querySelector('.gpu .why-line').textContent")

    told = "61.00 GiB is held by 1 process that is gone: pid 4000000."
    assert text == f"{told}{REMEDY_WORDS['dead_processes']}."


def test_the_bar_is_to_scale(page: Page, run_dir: Path) -> None:
    """Each part of a GPU is as wide as its share of the GPU, within what borders take."""
    publish(run_dir, own_sample(uuid(0)))
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait(f"document.querySelector('{RANK}')")
        state = httpx.get(f"{server.url}/api/v1/state", trust_env=False, timeout=60).json()
        widths = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.gpu-bar')][0].childNodes.values()"
            ".map((part) => [part.dataset.part, part.getBoundingClientRect().width]))"
        )

    gpu = state["gpus"][0]
    whole = sum(widths.values())
    for part in gpu["parts"]:
        share = part["bytes"] / gpu["total_bytes"]
        assert widths[part["name"]] / whole == pytest.approx(share, abs=0.005)


def test_the_whole_run_is_there_from_the_start(page: Page, run_dir: Path) -> None:
    """A page that was opened late shows the run from its first step, and what grows in it."""
    publish(run_dir, own_sample(uuid(0)))
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait(f"document.querySelector('{RANK}')")
        page.click(RANK)
        page.wait("document.querySelector('.whole-run .uplot')")
        label = page.evaluate("document.querySelector('.whole-run [role=img]').ariaLabel")
        page.click("role=tab[name=Why]")
        page.wait("document.querySelector('.threats')")
        threats = page.evaluate("document.querySelector('.threats').textContent")

    assert "allocated up to 39.0 GiB, peak so far up to 51.0 GiB" in label
    assert "Memory leak: tensors kept between steps grow by 1.00 GiB a step" in threats


def test_it_reconnects_after_a_restart(page: Page, run_dir: Path) -> None:
    """An exporter that stops is missed, and followed again once it is back."""
    publish(run_dir, own_sample(uuid(0)))
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait(f"document.querySelector('{RANK}')")
        port = int(server.url.rpartition(":")[2])
    page.wait("document.getElementById('connection').dataset.connected === 'false'")
    with node_of(run_dir, gpus=3, port=port):
        page.wait("document.getElementById('connection').dataset.connected === 'true'")
        page.wait("document.querySelectorAll('.gpu').length === 3")


def test_names_never_become_markup(page: Page, run_dir: Path) -> None:
    """Markup in the name of a run, a script or a part is text wherever the page shows it."""
    name = "<img src=x onerror=document.title='owned'>\"'><script>1</script>"
    sample = own_sample(uuid(0), own_process(run=name, script=name))
    components = dict(sample.devices[0].components)
    pending = components.pop("pending")
    named = {name: sum(components.values()), "pending": pending}
    device = replace(sample.devices[0], components=named)
    publish(run_dir, replace(sample, devices=(device,)))
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait(f"document.querySelector('{RANK}')")
        page.click(RANK)
        page.wait("document.querySelector('.parts')")
        assert name in page.evaluate("document.querySelector('.details').textContent")
        page.click("role=tab[name=Why]")
        page.wait("document.querySelector('.why h4')")
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert "owned" not in page.evaluate("document.title")


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1440])
def test_everybody_can_use_it(page: Page, run_dir: Path, colors: str, width: int) -> None:
    """axe-core finds no violation, and nothing is wider than the window, in either tab."""
    path = publish(run_dir, own_sample(uuid(0), ended="oom"))
    path.with_name(report_name(path.name, 1)).write_bytes(encode(reports.STRANDED))
    publish(run_dir, own_sample(uuid(1), dead_process(1, rank=1)))
    page.media(colors, motion="reduce")
    page.resize(width)
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait(f"document.querySelectorAll('{RANK}').length === 2")
        page.click(RANK)
        page.wait("document.querySelector('.parts td')")
        assert page.axe() == []
        page.click("role=tab[name=Why]")
        page.wait("document.querySelector('.oom')")
        assert page.axe() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_keyboard_is_enough(page: Page, run_dir: Path) -> None:
    """Enter opens a rank, arrows change its tab, and the address leads back to the same view."""
    publish(run_dir, own_sample(uuid(0)))
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait(f"document.querySelector('{RANK}')")
        page.evaluate(f"document.querySelector('{RANK}').focus()")
        page.press("Enter")
        page.wait("document.querySelector('[role=tab]')")
        page.evaluate("document.querySelector('[role=tab][aria-selected=true]').focus()")
        page.press("ArrowLeft")
        selected = "document.querySelector('[role=tab][aria-selected=true]').textContent"
        assert page.evaluate(selected) == "Why"
        assert page.evaluate("document.activeElement.textContent") == "Why"
        page.reload()
        page.wait(f"document.querySelector('[role=tab]') && {selected} === 'Why'")


class Known(EmptyCollector):
    """A collector that has found these GPUs and processes, whatever /proc says."""

    def __init__(self, run_dir: Path, gpus: list[FakeGpu], published: list[Published]) -> None:
        self.run_dir = run_dir
        exporter = Exporter(FakeNvml.of(*gpus), RunDirectory(run_dir))
        exporter.collect()
        exporter.close()
        self._found = replace(exporter.found(), published=published)

    def found(self) -> NodeReading:
        return replace(self._found, time=time.time())


def played(name: str, number: int) -> tuple[FakeGpu, Published]:
    """Play the last of four ranks of a scenario, on a GPU of its own."""
    scenario, pid = SCENARIOS[name], 4_000_000 + number
    total, capacity = scenario.gpu_bytes, cuda_bytes(scenario.gpu_bytes)
    use = GpuUse([0] * (1 + scenario.neighbors), 0)
    simulated = SimulatedGpu(capacity, use=use, uuid=uuid(number), name=name)
    trainer = Trainer(Life(name, f"demo-{name}", 3, 4, pid, 0.0, 1e9, steps=60), simulated, 0)
    trainer.play(300.0)
    item = trainer.published(300.0)
    assert item is not None
    used = use.total()
    memory = MemoryInfo(total, used, capacity - used, total - capacity)
    gpu = FakeGpu(GpuIdentity(number, uuid(number), name), memory)
    return gpu, replace(item, path=name)


def test_every_scenario_of_the_demo(page: Page, run_dir: Path) -> None:
    """Each scenario has a bar that adds up, its numbers, and words that explain it."""
    gpus, items = zip(*map(played, SCENARIOS, range(len(SCENARIOS))), strict=True)
    with closing(serve(Known(run_dir, list(gpus), list(items)))) as server:
        page.goto(server.url)
        page.wait(f"document.querySelectorAll('{RANK}').length === {len(SCENARIOS)}")
        state = httpx.get(f"{server.url}/api/v1/state", trust_env=False, timeout=60).json()
        for name, gpu in zip(SCENARIOS, state["gpus"], strict=True):
            assert sum(part["bytes"] for part in gpu["parts"]) == gpu["total_bytes"]
            row = f'.row:has-text("demo-{name}")'
            page.click(row)
            page.click("role=tab[name=Why]")
            page.wait("document.querySelector('.why h4')")
            page.click("role=tab[name=Now]")
            page.wait("document.querySelectorAll('.parts td').length > 3")
            page.click(row)

    dead = {gpu["name"] for gpu in state["gpus"] if gpu["ranks"][0]["state"] == "oom"}
    assert {"fragmentation", "leak"} <= dead


def test_every_screen_has_the_same_fragmentation(page: Page, run_dir: Path) -> None:
    """The index is never rounded up to 1: on the rank's row, in Now and Why, and in the report."""
    sample = own_sample(uuid(0))
    (device,) = sample.devices
    assert device.layout is not None
    layout = replace(device.layout, largest_free_block_bytes=50 << 20)
    sample = replace(sample, devices=(replace(device, layout=layout),))
    publish(run_dir, sample)
    assert layout.fragmentation_ratio is not None
    assert layout.fragmentation_ratio > 0.997
    shown = {"report": rank_text(sample, time.time())}
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait(f"document.querySelector('{RANK}')")
        shown["row"] = page.evaluate("document.querySelector('.values').textContent")
        page.click(RANK)
        for tab in ("Now", "Why"):
            page.click(f"role=tab[name={tab}]")
            page.wait("document.querySelector('.panel .facts-list')")
            shown[tab] = page.evaluate("document.querySelector('.panel .facts-list').textContent")
        indices = [number / 997 for number in range(998)]
        page_js = page.evaluate("document.querySelector('script[type=module]').src")
        format_js = page_js.replace("page.js", "format.js")
        script = f"import('{format_js}').then(({{ ratio }}) => {indices}.map(ratio))"
        assert page.evaluate(script) == [format_index(index) for index in indices]

    found = {
        name: re.findall(r"fragmentation(?: index)?\s*(\d[.\d]*)", shown[name]) for name in shown
    }
    assert found == {name: ["0.99"] for name in shown}


def test_sixteen_gpus_with_64_ranks_each(page: Page, run_dir: Path) -> None:
    """A full node is drawn with a bounded number of elements, and every rank can be reached."""
    ranks = [
        Published(
            own_sample(uuid(n % 16), own_process(rank=n)), 7000 + n, "running", True, path=str(n)
        )
        for n in range(1024)
    ]
    with closing(serve(Known(run_dir, SimulatedNode(16).gpus(60.0), ranks))) as server:
        page.goto(server.url)
        page.wait("document.getElementById('summary').textContent.includes('1,024 ranks')")
        assert page.evaluate(f"document.querySelectorAll('{RANK}').length") == 16 * 8
        assert page.evaluate("document.querySelectorAll('*').length") < 6000
        page.click("text=Show all 64 ranks")
        page.wait(f"document.querySelectorAll('{RANK}').length === 15 * 8 + 64")


def test_devices_that_do_not_exist(page: Page, run_dir: Path) -> None:
    """A user who makes up GPUs hides none of the others and cannot fill the page."""
    device = own_sample(uuid(0)).devices[0]
    for number in range(20):
        invented = tuple(replace(device, uuid=f"A{number}-{index}") for index in range(16))
        sample = replace(own_sample(process=dead_process(number)), devices=invented)
        publish(run_dir, sample, name=f"rank{number}.sample.json")
    with node_of(run_dir) as server:
        page.goto(server.url)
        page.wait("document.getElementById('hidden').hidden === false")
        titles = page.evaluate(
            "[...document.querySelectorAll('#gpus h2')].map((h) => h.textContent)"
        )

    assert len(titles) == 64
    assert [title[:5] for title in titles[:2]] == ["GPU 0", "GPU 1"]


def test_the_page_asks_for_a_password(page: Page, run_dir: Path, tmp_path: Path) -> None:
    """Page, files and state are all behind the passwords of --web.config.file."""
    import bcrypt

    from torchmem.exporter.web.config import LiveConfig

    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    config = tmp_path / "web.yml"
    config.write_text(f"basic_auth_users:\n  ann: {hashed}\n")
    exporter = Exporter(FakeNvml.of(), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter, web=LiveConfig(config))) as server:
        for path in ("/", f"/static/{files().digest}/page.js", "/api/v1/state"):
            assert httpx.get(server.url + path, trust_env=False, timeout=60).status_code == 401
        page.authenticate("ann", "secret")
        page.goto(server.url)
        page.wait("document.getElementById('summary').textContent.includes('No GPU')")
        assert page.problems() == []


def test_the_page_is_small() -> None:
    """All files of the page together have less than 104 KB, compressed."""
    sizes = {name: len(gzip.compress(file.plain)) for name, file in files().by_name.items()}

    assert sum(sizes.values()) < MAX_PAGE_BYTES


def test_files_are_kept_until_they_change(run_dir: Path) -> None:
    """The page is checked at each visit, its files never; a file of another version is 404."""
    with (
        node_of(run_dir) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        first = client.get("/")
        again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
        script = client.get(f"/static/{files().digest}/page.js")
        other = client.get("/static/0123456789abcdef/page.js")

    assert (
        first.status_code,
        again.status_code,
        script.status_code,
        other.status_code,
    ) == (200, 304, 200, 404)
    assert "immutable" in script.headers["cache-control"]
    assert script.headers["content-type"].startswith("text/javascript")
    policy = first.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert f"static/{files().digest}/page.js" in first.text
    assert all(word not in first.text for word in ("<style", "style=", "onclick", "://"))


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("uplot.js", "dist/uPlot.iife.min.js"),
        ("uplot.css", "dist/uPlot.min.css"),
        ("uplot-license.txt", "LICENSE"),
    ],
)
def test_the_chart_library_is_the_published_one(name: str, original: str) -> None:
    """The files of uPlot are those of the npm package, unchanged."""
    published = PACKAGES / "node_modules" / "uplot" / original
    if not published.exists():
        pytest.skip("uPlot is not installed: npm ci --prefix tests/grafana")

    assert files().by_name[name].plain == published.read_bytes()
