"""A run directory and the exporter that reads it give one answer, to commands and assistants."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any, get_args

import pytest
from support.publishing import own_process, own_sample, publish
from support.reports import BY_NAME
from support.samples import UUID

from torchmem.cli.main import main
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.explain.oom_report import OomReport, encode
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.host.procfs import start_ticks
from torchmem.mcp.worker import Reply, reply
from torchmem.sample.run_directory import SAMPLE_SUFFIX, report_name, sample_name
from torchmem.sample.sample import Ending, Process, Sample, State

AGO = re.compile(r"(?<![\w.])[\d,.]+ (ms|s|min|h)( [\d.]+ (s|min))? ago")
HOST_MEMORY = re.compile(r"(host memory  +).*")
"""What is left of the host's memory changes between two answers."""
FILES = {"file", "recordings", "leaks"}
"""Only a run directory has files. What only NVML tells is absent here: no GPU of it is listed."""
PLACES = ("", ".reports.*", ".devices.*")
GIB = 1 << 30
Question = tuple[str, dict[str, object]]


def about(tool: str, rank: int | None, run: str | None) -> Question:
    """Return a question about one rank."""
    arguments: dict[str, object] = {"rank": rank, "run": run, "launch": None, "pid": None}
    return tool, arguments | ({"file": None} if tool == "explain_oom" else {})


ANSWERED: list[Question] = [
    ("list_ranks", {"run": None}),
    ("list_ranks", {"run": "nightly"}),
    ("oom_reports", {"run": None}),
    ("oom_reports", {"run": "nightly"}),
    *(
        about(tool, rank, run)
        for tool in ("rank_report", "what_holds_memory")
        for rank, run in [(0, "nightly"), (1, "nightly"), (2, "nightly"), (0, "killed")]
    ),
    *(about("explain_oom", rank, None) for rank in (None, 1, 2)),
]
UNANSWERED: list[Question] = [
    *(
        about(tool, rank, run)
        for tool in ("rank_report", "what_holds_memory")
        for rank, run in [(None, None), (9, None), (0, "waits")]
    ),
    *(about("explain_oom", rank, None) for rank in (0, 9)),
]


class Node:
    """A run directory, and an exporter that reads it."""

    def __init__(self, run_dir: Path, url: str) -> None:
        self.run_dir, self.url = str(run_dir), url

    def replies(self, tool: str, arguments: dict[str, Any]) -> tuple[Reply, Reply]:
        """Return the answers from the run directory and from the exporter."""
        return (
            reply(tool, dict(arguments), self.run_dir),
            reply(tool, dict(arguments), self.run_dir, self.url),
        )


def idle_process(stack: ExitStack, **changes: Any) -> Process:
    """Return a process that runs until the end of the tests and does nothing."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    stack.enter_context(child)
    return own_process(pid=child.pid, start_ticks=start_ticks(child.pid), **changes)


def without_oom(sample: Sample) -> Sample:
    """Return the sample of a process that has not run out of memory."""
    devices = tuple(replace(device, last_oom=None) for device in sample.devices)
    return replace(sample, devices=devices, oom_pending=False)


def run_out_of_memory(run_dir: Path, process: Process, kind: str) -> None:
    """Publish a process with an OOM report of this kind."""
    report: OomReport = replace(BY_NAME[kind], process=process)
    sample = own_sample(process=process)
    devices = tuple(replace(device, last_oom=report.oom) for device in sample.devices)
    publish(run_dir, replace(sample, devices=devices, ended="oom"))
    name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
    publish(run_dir, encode(report), report_name(name, 1))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Ranks that run, ran out of memory, were killed, have no GPU yet, on a node without NVML."""
    run_dir = tmp_path_factory.mktemp("run")
    kinds = list(BY_NAME)
    with ExitStack() as stack:
        for rank in (0, 3):
            healthy = idle_process(stack, run="nightly", rank=rank)
            publish(run_dir, without_oom(own_sample(process=healthy)))
        for rank in (1, 2):
            failed = idle_process(stack, run="nightly", rank=rank)
            run_out_of_memory(run_dir, failed, kinds[rank])
        gone = own_process(run="killed", rank=0, pid=(1 << 22) - 1, start_ticks=1)
        publish(run_dir, without_oom(own_sample(process=gone)))
        waits = idle_process(stack, run="waits", rank=0)
        publish(run_dir, replace(own_sample(process=waits), devices=()))
        yield stack.enter_context(serving(run_dir))


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Node]:
    """A node without ranks."""
    with serving(tmp_path) as found:
        yield found


class serving:  # noqa: N801 - a context manager
    """An exporter on loopback, whose NVML has these GPUs."""

    def __init__(self, run_dir: Path, *gpus: FakeGpu) -> None:
        self._run_dir, self._gpus, self._stack = run_dir, gpus, ExitStack()

    def __enter__(self) -> Node:
        exporter = Exporter(FakeNvml.of(*self._gpus), RunDirectory(self._run_dir))
        self._stack.enter_context(closing(exporter))
        server = self._stack.enter_context(closing(serve(exporter, "127.0.0.1", 0)))
        return Node(self._run_dir, server.url)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def comparable(answer: Reply, node: Node) -> tuple[str, Any]:
    """Return an answer without what must differ: ages, the source's name, and files."""
    return words(answer.text, node), facts(answer.data, node)


def words(text: str, node: Node) -> str:
    """Return text without the names of the sources, the paths of files, and ages."""
    for name in (f"the run directory {node.run_dir}", node.url):
        text = text.replace(name, "SOURCE")
    text = re.sub(rf"\n +{re.escape(node.run_dir)}\S+", "", text)
    text = re.sub(rf"\n\nReport: {re.escape(node.run_dir)}\S+", "", text)
    text = re.sub(r"name another [^.\n]*\.", "name another one.", text)
    return HOST_MEMORY.sub(r"\1…", AGO.sub("… ago", text))


def facts(value: Any, node: Node) -> Any:
    """Return data without files, and its text as `words`."""
    if isinstance(value, dict):
        if value.get("subject") == "host memory":
            return {"subject": "host memory"}
        return {key: facts(item, node) for key, item in value.items() if key not in FILES}
    if isinstance(value, list):
        return [facts(item, node) for item in value]
    return words(value, node) if isinstance(value, str) else value


@pytest.mark.parametrize(("tool", "arguments"), ANSWERED, ids=str)
def test_both_sources_give_one_answer(tool: str, arguments: dict[str, Any], node: Node) -> None:
    """Keys, units and sentences are the same."""
    local, remote = node.replies(tool, arguments)

    assert not local.is_error
    assert local.data
    assert comparable(local, node) == comparable(remote, node)


@pytest.mark.parametrize(("tool", "arguments"), UNANSWERED, ids=str)
def test_both_sources_give_one_error(tool: str, arguments: dict[str, Any], node: Node) -> None:
    """What cannot be answered has the same sentence."""
    local, remote = node.replies(tool, arguments)

    assert local.is_error
    assert comparable(local, node) == comparable(remote, node)


@pytest.mark.parametrize(("tool", "arguments"), [*ANSWERED, *UNANSWERED], ids=str)
def test_a_node_without_ranks(tool: str, arguments: dict[str, Any], empty: Node) -> None:
    """Without a rank, both sources say so in one sentence."""
    local, remote = empty.replies(tool, arguments)

    assert local.is_error == remote.is_error
    assert comparable(local, empty) == comparable(remote, empty)


@pytest.mark.parametrize(("tool", "arguments"), ANSWERED, ids=str)
def test_nvml_only_adds_to_an_answer(tool: str, arguments: dict[str, Any], node: Node) -> None:
    """An exporter with NVML has every field of the run directory, but for files."""
    gpu = FakeGpu(GpuIdentity(6, UUID), MemoryInfo(80 * GIB, 70 * GIB, 9 * GIB, GIB))
    with serving(Path(node.run_dir), gpu) as with_nvml:
        local, remote = with_nvml.replies(tool, arguments)

    missing = fields_of(local.data) - fields_of(remote.data)
    assert not missing - {f"{place}.{name}" for name in FILES for place in PLACES}


def fields_of(value: Any, path: str = "") -> set[str]:
    """Return the paths of all fields, with * for every item of a list."""
    if isinstance(value, dict):
        inner = (fields_of(item, f"{path}.{key}") for key, item in value.items())
        return {f"{path}.{key}" for key in value}.union(*inner)
    if isinstance(value, list):
        return set[str]().union(*(fields_of(item, f"{path}.*") for item in value))
    return set()


def test_the_command_asks_an_exporter(
    node: Node, empty: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchmem why --exporter` has the same text and data as an assistant, from anywhere."""

    def why(url: str, *flags: str) -> tuple[int, str]:
        return main(["why", "--exporter", url, *flags]), "".join(capsys.readouterr())

    for tool, rank in (("rank_report", 0), ("explain_oom", 1)):  # rank 1 has died
        answered = node.replies(*about(tool, rank, "nightly"))[1]
        code, shown = why(node.url, "--rank", str(rank), "--run", "nightly")
        assert code == 0
        assert words(shown, node) in words(answered.text, node)
    listed = node.replies("oom_reports", {"run": None})[1]
    assert words(why(node.url, "--list")[1], node) in words(listed.text, node)
    newest = node.replies(*about("explain_oom", None, None))[1]
    assert words(why(node.url)[1], node) in words(newest.text, node)
    assert json.loads(why(node.url, "--json")[1])["run"] == "nightly"
    assert why(empty.url)[0] == why(empty.url, "--html", "-")[0] == 2
    assert why(empty.url)[1] == (
        f"torchmem: {empty.url} has no OOM report and no rank: start a process with `torchmem run "
        "-- COMMAND`, or name another exporter with --exporter.\n"
    )


def changed(**changes: Any) -> Sample:
    """Return a sample with changes of its device."""
    sample = own_sample()
    return replace(sample, devices=(replace(sample.devices[0], **changes),))


SAMPLES = {
    "full": own_sample(),
    "without a threat": changed(growth=None, last_oom=None),
    "bare": changed(allocator=None, layout=None, components={}),
    "asleep": changed(driver_free_bytes=70 * GIB),
    "library": changed(driver_free_bytes=GIB // 4),
}
ENDINGS: tuple[Ending, ...] = get_args(Ending)
STATES: list[State] = ["running", "killed", *ENDINGS]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Each sample as that of a living rank, of one that was killed, and of each other ending."""
    run_dir = tmp_path_factory.mktemp("ranks")
    kinds = cycle(BY_NAME.values())
    for rank, (sample, state) in enumerate(product(SAMPLES.values(), STATES)):
        ids = {} if state == "running" else {"pid": (1 << 22) - 1 - rank, "start_ticks": 1}
        process = own_process(rank=rank, run=state, **ids)
        ended = next((each for each in ENDINGS if each == state), None)
        shown = replace(sample, process=process, ended=ended, oom_pending=False)
        name = f"1-{process.pid}-{rank + 1}{SAMPLE_SUFFIX}"
        if ended == "oom" and rank % 2:  # the others have left no report
            report = replace(next(kinds), process=process)
            device = replace(sample.devices[0], last_oom=report.oom)
            shown = replace(shown, devices=(device,))
            publish(run_dir, encode(report), report_name(name, 1))
        publish(run_dir, shown, name)
    with serving(run_dir) as found:
        yield found


@pytest.mark.parametrize(
    "flags",
    [
        *((), ("--list",)),
        *(
            ("--run", state, "--rank", str(rank))
            for rank, (_, state) in enumerate(product(SAMPLES, STATES))
        ),
        *(("--run", state) for state in STATES),
        ("--rank", "999"),
    ],
    ids=" ".join,
)
def test_the_command_has_one_answer(
    flags: tuple[str, ...], ranks: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, JSON and errors of `torchmem why` are the same from both; only FILES may differ."""
    answers = []
    for where in (("--run-dir", ranks.run_dir), ("--exporter", ranks.url)):
        codes = main(["why", *where, *flags]), main(["why", *where, *flags, "--json"])
        text, _, data = capsys.readouterr().out.rpartition("\n{")
        shown = facts(json.loads(f"{{{data}"), ranks) if data else None
        answers.append((codes, words(text, ranks), shown))

    assert answers[0] == answers[1]


def test_the_command_finds_the_rank_that_is_worst_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an OutOfMemoryError, an exporter's rank with the least room left is shown."""
    with ExitStack() as stack:
        for rank, left in ((0, 8 * GIB), (1, GIB), (2, 8 * GIB)):
            sample = without_oom(own_sample(process=idle_process(stack, run="nightly", rank=rank)))
            (device,) = sample.devices
            assert device.layout is not None
            layout = replace(device.layout, headroom_bytes=0, headroom_flush_bytes=left)
            publish(tmp_path, replace(sample, devices=(replace(device, layout=layout),)))
        served = stack.enter_context(serving(tmp_path))
        assert main(["why", "--exporter", served.url]) == 0

    assert "run nightly (train.py), rank 1 of 8: running" in capsys.readouterr().out
