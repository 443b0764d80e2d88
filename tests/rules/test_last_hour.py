"""OOMs of the last hour in a real Prometheus, whose targets have ranks that come and go."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.scrape_target import serving
from support.stack import prometheus
from support.waiting import until

RANKS = 8
SERVED = 3


def page(died: float, ranks: int) -> str:
    """Return the page of an exporter that serves some ranks, all of which died of an OOM."""
    lines = []
    for rank in range(ranks):
        process = f'rank="{rank}",pid="{100 + rank}",run="gpt"'
        device = f'gpu="{rank}",uuid="GPU-{rank}",{process}'
        lines += [
            f'torchmem_ooms_total{{{device},cause="capacity"}} 1',
            f'torchmem_ooms_total{{{device},cause="limit"}} 0',
            f"torchmem_last_oom_timestamp_seconds{{{device}}} {died}",
            f'torchmem_process_state{{{process},state="oom"}} 1',
        ]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.stack
def test_ranks_that_the_exporter_has_dropped_count(tmp_path: Path) -> None:
    """Eight ranks died of an OOM before their first scrape: all count, also those that are gone.

    The alert is critical for those that the exporter still serves, and no page for the others.
    """
    died, ranks = time.time(), RANKS
    ended = "count(rank:torchmem_process_state:ended)"
    with (
        serving(lambda: page(died, ranks)) as target,
        prometheus(tmp_path, target) as server,
    ):
        until(lambda: server.value(ended) == RANKS)
        ranks = SERVED
        then = server.when(lambda then: then.value(ended) == SERVED)

        assert then.value("sum(rank:torchmem_ooms:increase1h)") == RANKS
        critical = 'count(ALERTS{alertname="TorchmemOutOfMemory",severity="critical"})'
        until(lambda: server.value(critical) == SERVED)
        assert server.value('sum(run:torchmem_ooms:increase1h{cause="capacity"})') == RANKS
