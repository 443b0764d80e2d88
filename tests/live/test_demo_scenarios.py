"""The first sentence about a rank of the demo in a real browser, every five seconds of its run."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import Page
from support.demo_in_time import SECONDS, Look, looks
from support.publishing import own_process, publish

from torchmem.demo.node import SimulatedNode
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.sample.sample import LIVE_STATES, Sample

EVERY_SECONDS = 5.0
ROW = "document.querySelector('.rank .row')?.textContent"
SUBJECTS = {"fragmentation": "Fragmentation: ", "leak": "ensors kept between steps grow by "}


def _as_now(look: Look) -> Sample:
    """Return the sample of a look as one of this process that was published now."""
    now, sample = time.time(), look.sample
    process = own_process(run="demo", rank=sample.process.rank)
    steps = replace(sample.steps, last_timestamp=now)
    return replace(sample, timestamp=now, process=process, steps=steps)


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_the_page_names_the_subject(page: Page, tmp_path: Path, name: str) -> None:
    """The row says what the state of the page says, and goes on to name the scenario's subject."""
    living = [look for look in looks(name, 0, SECONDS, EVERY_SECONDS) if look.state in LIVE_STATES]
    shown: list[bool] = []
    nvml = FakeNvml(lambda: SimulatedNode(2).gpus(60.0, [{os.getpid(): 1 << 30}]))
    exporter = Exporter(nvml, RunDirectory(tmp_path))
    with closing(exporter), closing(serve(exporter, port=0)) as server:
        page.goto(server.url)
        for look in living:
            publish(tmp_path, _as_now(look))
            why = look.page.gpus[0].ranks[0].why
            page.wait(f"{ROW}?.includes({json.dumps(why[0].text if why else 'running')})")
            shown.append(SUBJECTS[name] in page.evaluate(ROW))
    assert shown == sorted(shown)
    assert sum(shown) > len(shown) / 2
