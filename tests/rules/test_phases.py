"""The parts of a GPU's memory add up at whatever times Prometheus scrapes and evaluates the rules.

Prometheus spreads targets and rule groups over their interval, by hashes of the address and of the
file's path. A rule that compares a series of now with one that another group recorded earlier finds
memory that is not there, on some servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import pytest
from support.scrape_target import serving
from support.stack import Prometheus, prometheus

GIB = 2**30
TOTAL, DRIVER, NEIGHBOR, CONTEXT = 80 * GIB, 1 * GIB, 5 * GIB, 2 * GIB
RESERVED = (8 * GIB, 60 * GIB, 24 * GIB, 0, 44 * GIB)
"""What the rank has reserved at each scrape in turn; at 0, one rank has ended, and none runs."""
EVALUATIONS = 10
KINDS = [(True, 0), (True, NEIGHBOR), (False, 0), (False, NEIGHBOR)]
"""Whether NVML is there, and what another process uses."""
NODES = 2 * len(KINDS)
PARTS = "gpu:torchmem_memory_bytes:sum"
TOTAL_RECORDED = "gpu:torchmem_memory_total_bytes:max"


@dataclass
class Node:
    """A GPU whose rank has other memory at each scrape, and perhaps another process."""

    has_nvml: bool
    neighbor: int
    scrapes: Iterator[int] = field(default_factory=count)

    def page(self) -> str:
        """Return all values of one moment."""
        number = next(self.scrapes)
        reserved = RESERVED[number % len(RESERVED)]
        process = f'rank="0",pid="{number // len(RESERVED)}",run="gpt"'
        used = self.neighbor + (reserved + CONTEXT if reserved else 0)
        lines = [*_rank(process, reserved, TOTAL - DRIVER - used)]
        if self.has_nvml:
            lines += _gpu(used)
        return "".join(f"{line}\n" for line in lines)


def _rank(process: str, reserved: int, driver_free: int) -> Iterator[str]:
    """Yield what the exporter serves of a rank; of one that has ended, its last values."""
    labels = f'gpu="0",uuid="GPU-a",{process}'
    state = "running" if reserved else "exited"
    held = reserved or RESERVED[-1]
    yield f'torchmem_process_state{{{process},state="{state}"}} 1'
    yield f"torchmem_device_total_bytes{{{labels}}} {TOTAL}"
    yield f"torchmem_driver_free_bytes{{{labels}}} {driver_free}"
    yield f"torchmem_outside_allocator_bytes{{{labels}}} {CONTEXT}"
    yield f'torchmem_reserved_bytes{{{labels},pool="large"}} {held}'
    yield f'torchmem_active_bytes{{{labels},pool="large"}} {held // 2}'
    yield f'torchmem_free_bytes{{{labels},state="stranded"}} {held // 8}'
    yield f'torchmem_free_bytes{{{labels},state="releasable"}} {held // 8}'
    yield f'torchmem_private_pool_bytes{{{labels},state="free"}} {held // 4}'


def _gpu(used: int) -> Iterator[str]:
    values = {"total": TOTAL, "reserved": DRIVER, "used": used, "free": TOTAL - DRIVER - used}
    for name, value in values.items():
        yield f'nvml_memory_{name}_bytes{{gpu="0",uuid="GPU-a"}} {value}'


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Prometheus]]:
    """Run servers with the rules in folders of their own, until they have evaluated them often."""
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(name) for name in ("a", "second", "the_third")]
        started = [stack.enter_context(prometheus(folder, _addresses(stack))) for folder in folders]
        evaluated = f'count(count_over_time({PARTS}{{part="in_use"}}[5m]) > {EVALUATIONS})'
        yield [server.when(lambda past: past.value(evaluated) == NODES) for server in started]


def _addresses(stack: ExitStack) -> list[str]:
    """Serve two nodes of each kind; return their addresses."""
    return [stack.enter_context(serving(Node(*kind).page)) for kind in 2 * KINDS]


def _values(server: Prometheus, expression: str) -> list[float]:
    return [float(result["value"][1]) for result in server.query(expression)]


def test_no_memory_appears_that_is_not_there(servers: list[Prometheus]) -> None:
    """What other processes use is at each evaluation what they use, whatever the ranks do."""
    each_twice = [0, 0, NEIGHBOR, NEIGHBOR]
    for server in servers:
        for extreme in ("min_over_time", "max_over_time"):
            others = f'{extreme}({PARTS}{{part="other_processes"}}[5m])'
            assert sorted(_values(server, others)) == each_twice
            not_pytorch = f'{extreme}({PARTS}{{part="not_pytorch"}}[5m]) - {DRIVER}'
            assert sorted(_values(server, not_pytorch)) == each_twice


def test_the_parts_add_up_at_each_evaluation(servers: list[Prometheus]) -> None:
    """The sum of the parts is the size of the GPU at each evaluation, however often it changes.

    Prometheus may store the scrape in which a rank ends while it evaluates the rules, which takes
    long on a busy machine. A rule that reads what another group recorded is wrong at each change.
    """
    difference = f"sum without (part) ({PARTS}) - {TOTAL_RECORDED}"
    largest = f"max_over_time(abs({difference})[{EVALUATIONS}s:200ms])"
    for server in servers:
        server.when(lambda past: _values(past, largest) == NODES * [0])
