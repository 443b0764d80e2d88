"""A fleet in one store: two vmagents that share the nodes, VictoriaMetrics, vmalert, their costs.

The interval is as long as the machine needs. Windows of the rules are longer by the same factor.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster.serve import INTERVAL
from benchmarks.cluster.watching import RULES, write_rules, write_targets
from support.stack import answers, free_port, running
from support.waiting import until

SHARDS = 2
STORE, AGENTS, RULER = "victoria-metrics", "vmagent", "vmalert"
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
# vmalert starts each group at a random time within its interval, so short runs need short ones.
_GROUP_INTERVAL = re.compile(r"\n +interval: .*")


@dataclass(slots=True)
class StoredFleet:
    """The programs of a fleet of `nodes`, which `server` (HOST:PORT) simulates.

    `interval` (s) is between two scrapes and two evaluations of each rule.
    """

    folder: Path
    server: str
    nodes: int
    interval: int
    stack: ExitStack
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    pids: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _ends: dict[str, ExitStack] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the store answers."""
        return f"http://{self.address}"

    def start_store(self) -> None:
        """Start VictoriaMetrics and wait until it answers."""
        self._start(
            STORE,
            f"-storageDataPath={self.folder / 'store'}",
            f"-httpListenAddr={self.address}",
            "-search.latencyOffset=1s",
            "-search.maxUniqueTimeseries=2000000",
            "-search.maxQueryDuration=120s",
            "-search.maxQueueDuration=120s",
            "-memory.allowedPercent=15",
        )
        until(lambda: answers(f"{self.url}/health"), 60)

    def start_agents(self) -> None:
        """Start the vmagents; each scrapes its part of the nodes."""
        write_targets(self.folder, self.server, self.nodes)
        (self.folder / "scrape.yml").write_text(
            f"global: {{scrape_interval: {self.interval}s, scrape_timeout: {self.interval}s}}\n"
            "scrape_configs:\n- job_name: torchmem\n"
            f"  file_sd_configs: [{{files: [{self.folder / 'targets.json'}]}}]\n"
        )
        for shard in range(SHARDS):
            self._start(
                AGENTS,
                f"-promscrape.config={self.folder / 'scrape.yml'}",
                f"-promscrape.cluster.membersCount={SHARDS}",
                f"-promscrape.cluster.memberNum={shard}",
                f"-remoteWrite.url={self.url}/api/v1/write",
                f"-remoteWrite.tmpDataPath={self.folder / f'agent{shard}'}",
                f"-httpListenAddr=127.0.0.1:{free_port()}",
                "-memory.allowedPercent=5",
            )

    def start_rules(self) -> None:
        """Start vmalert with all rules, all of them evaluated at each interval."""
        write_rules(self.folder, RULES, INTERVAL / self.interval)
        for path in (self.folder / "rules").iterdir():
            path.write_text(_GROUP_INTERVAL.sub("", path.read_text()))
        self._start(
            RULER,
            f"-rule={self.folder / 'rules' / '*.yml'}",
            f"-datasource.url={self.url}",
            f"-remoteWrite.url={self.url}",
            f"-evaluationInterval={self.interval}s",
            "-notifier.url=http://127.0.0.1:9",
            "-remoteWrite.maxQueueSize=10000000",
            f"-httpListenAddr=127.0.0.1:{free_port()}",
        )

    def stop(self, name: str) -> None:
        """End the processes of one program; what they hold back is written to the store."""
        self._ends.pop(name).close()
        del self.pids[name]

    def cpu(self) -> dict[str, float]:
        """Return CPU seconds by program since its start."""
        return {name: sum(map(_cpu_seconds, found)) for name, found in self.pids.items()}

    def memory(self) -> dict[str, int]:
        """Return resident bytes by program."""
        return {name: sum(map(_resident, found)) for name, found in self.pids.items()}

    def _start(self, name: str, *flags: str) -> None:
        log = self.folder / f"{name}{len(self.pids[name])}.log"
        if name not in self._ends:
            self._ends[name] = self.stack.enter_context(ExitStack())
        process = self._ends[name].enter_context(running([name, *flags], log))
        self.pids[name].append(process.pid)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
