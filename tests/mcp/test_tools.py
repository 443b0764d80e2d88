"""Each tool of `torchmem mcp`, called by the SDK's own client over stdio."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.assistant import Assistant, assistant
from support.publishing import own_process, own_sample, publish, user_directory
from support.recordings import varying_lengths, write
from support.reports import BY_NAME, LEAK_WITH_LINES

from torchmem.cli.main import main
from torchmem.explain.oom_report import encode
from torchmem.explain.texts.formats import BY_NAME as BY_FORMAT
from torchmem.mcp.recordings import MAX_FILE_BYTES
from torchmem.sample.run_directory import REPORT_SUFFIX, report_name, sample_name

AGO = re.compile(r"[\d,.]+ (ms|s|min|h)( [\d.]+ (s|min))? ago")
TOOLS = {
    "list_ranks",
    "rank_report",
    "what_holds_memory",
    "oom_reports",
    "explain_oom",
    "read_snapshot",
    "what_if",
    "explain_text",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with two ranks and an OOM report of each kind, and a snapshot beside it."""
    folder = tmp_path_factory.mktemp("mcp")
    process = own_process(run="nightly", rank=3)
    publish(folder / "run", own_sample(process=process))
    publish(folder / "run", own_sample(process=own_process(run="eval", rank=0)), "2.sample.json")
    name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
    for number, (kind, report) in enumerate(BY_NAME.items(), 1):
        path = publish(folder / "run", encode(report), f"4242-1-{number}-1{REPORT_SUFFIX}")
        os.utime(path, (number, number))
        (folder / kind).symlink_to(path)
    publish(folder / "run", encode(LEAK_WITH_LINES), report_name(name, 1))
    snapshot = varying_lengths(steps=30).snapshot()
    write(snapshot, folder / "snapshot.pickle")
    write(snapshot, user_directory(folder / "run") / f"{name.partition('.')[0]}.snapshot.pickle")
    return folder


@pytest.fixture(scope="module")
def on_node(folder: Path) -> Iterator[Assistant]:
    """An assistant that asks about the run directory."""
    with assistant("--run-dir", folder / "run") as connected:
        yield connected


def printed(capsys: pytest.CaptureFixture[str], *command: str | Path) -> str:
    """Return what a command prints."""
    assert main([*map(str, command)]) in {0, 1}
    return capsys.readouterr().out


def without_ages(text: str) -> str:
    """Return the text with what changes between two answers masked: ages, and the host's memory."""
    words = re.sub(r"\s+", " ", AGO.sub("… ago", re.sub(r"\n\s+", " ", text)))
    return re.sub(r"host memory .*? left", "host memory …", words).strip()


def test_an_unknown_argument_is_an_error(on_node: Assistant) -> None:
    """A tool that lacks an argument says so and what is meant; the schema says it too."""
    tools = on_node.portal.call(on_node.client.list_tools).tools

    assert {tool.input_schema["additionalProperties"] for tool in tools} == {False}
    assert (
        on_node.error("list_ranks", rnu="nightly")
        == "unknown argument 'rnu' of list_ranks: did you mean 'run'?"
    )
    assert (
        on_node.error("rank_report", rank=3, host="node1")
        == "unknown argument 'host' of rank_report: it takes rank, run, launch, pid."
    )


def test_the_tools_say_that_they_only_read(on_node: Assistant) -> None:
    """Every tool is annotated as read-only, not destructive, and closed to the world."""
    tools = on_node.portal.call(on_node.client.list_tools).tools
    hints = [tool.annotations for tool in tools]

    assert {tool.name for tool in tools} == TOOLS
    assert all(hint and hint.read_only_hint for hint in hints)
    assert not any(hint and (hint.destructive_hint or hint.open_world_hint) for hint in hints)
    assert all(tool.description for tool in tools)


def test_a_prompt_asks_for_the_last_oom(on_node: Assistant) -> None:
    """The prompt names a tool that exists and contains nothing that a job has written."""
    (prompt,) = on_node.portal.call(on_node.client.list_prompts).prompts
    (message,) = on_node.portal.call(on_node.client.get_prompt, prompt.name).messages

    assert message.role == "user"
    assert "explain_oom" in json.dumps(message.model_dump())


def test_ranks_are_listed_with_a_verdict(on_node: Assistant) -> None:
    """Each rank has a line and a row with its memory, and what threatens it."""
    text, data = on_node.answer("list_ranks")
    (row,) = [row for row in data["ranks"] if row["run"] == "nightly"]

    line = r"^nightly +(?:\d+-[0-9a-f]{8}|-) +3 +\d+ +- +running +40\.00 GiB +60\.00 GiB"
    assert re.search(line, text, re.MULTILINE)
    assert f"rank 3 of run nightly, GPU -: {row['verdict'][0]}\n" in text
    assert (row["rank"], row["state"], row["headroom_bytes"]) == (3, "running", 9 << 30)
    assert [row["run"] for row in on_node.data("list_ranks", run="eval")["ranks"]] == ["eval"]


def test_a_rank_is_reported_as_by_the_command(
    folder: Path, on_node: Assistant, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rank_report` has the text and the threats of `torchmem why`."""
    selected = ("--run", "eval", "--run-dir", folder / "run")
    shown, as_json = printed(capsys, "why", *selected), printed(capsys, "why", *selected, "--json")
    text, data = on_node.answer("rank_report", run="eval")

    assert without_ages(shown) == without_ages(text)
    threats = [threat["text"] for threat in data["devices"][0]["why"]["threats"]]
    assert threats == [each["text"] for each in json.loads(as_json)["devices"][0]["why"]["threats"]]


def test_what_holds_the_memory_of_a_rank(on_node: Assistant) -> None:
    """The parts add up to the GPU, and lines and recordings are named where they are known."""
    text, data = on_node.answer("what_holds_memory", run="nightly")
    (device,) = data["devices"]
    (recording,) = device["recordings"]

    assert sum(part["bytes"] for part in device["gpu_parts"]) == device["total_bytes"]
    assert "optimizer state" in text
    assert "/home/ann/gpt/train.py:66  log\n" in text
    assert on_node.text("read_snapshot", file=recording["file"])


def test_reports_are_listed_as_by_the_command(
    folder: Path, on_node: Assistant, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oom_reports` lists what `torchmem why --list` does, with ranks that left no report."""
    listed = printed(capsys, "why", "--list", "--run-dir", folder / "run")
    text, data = on_node.answer("oom_reports")

    assert text == listed
    files = {line.strip() for line in listed.splitlines() if line.endswith(REPORT_SUFFIX)}
    assert {row["file"] for row in data["reports"] if "file" in row} == files
    assert len([row for row in data["reports"] if "file" not in row]) == 2
    assert on_node.text("oom_reports", run="none").endswith("has no OOM report of run none.\n")


@pytest.mark.parametrize("kind", BY_NAME)
def test_an_oom_is_explained_as_by_the_command(
    kind: str, folder: Path, on_node: Assistant, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every kind of OOM, `explain_oom` has the text of the command, and its verdict."""
    path = (folder / kind).resolve()
    text, data = on_node.answer("explain_oom", file=str(path))

    assert text == printed(capsys, "why", path)
    verdict = json.loads(printed(capsys, "why", "--json", path))
    assert data["oom"]["summary"] == verdict["headline"]
    assert data["cause"] == verdict["cause"]


def test_the_newest_oom_of_a_rank(on_node: Assistant) -> None:
    """Without a file, the newest report that matches is explained."""
    newest = on_node.data("oom_reports")["reports"][0]

    assert on_node.data("explain_oom")["file"] == newest["file"]
    assert on_node.data("explain_oom", run=newest["run"])["file"] == newest["file"]


def test_a_snapshot_is_read_as_by_the_command(
    folder: Path, on_node: Assistant, capsys: pytest.CaptureFixture[str]
) -> None:
    """`read_snapshot` answers with the tables of `torchmem why`, at the moment asked for."""
    path = str(folder / "snapshot.pickle")
    text, data = on_node.answer("read_snapshot", file=path, at="peak", rows=2)

    assert text == printed(capsys, "why", path, "--at", "peak", "--top", "2")
    document = json.loads(printed(capsys, "why", path, "--at", "peak", "--json"))
    assert data["gpus"][0]["by_line"] == document["by_line"]
    leaks = printed(capsys, "why", path, "--leaks")
    assert on_node.text("read_snapshot", file=path, only_leaks=True) == leaks


def test_a_text_is_explained_as_by_the_command(
    tmp_path: Path, on_node: Assistant, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain_text` answers with the text of `torchmem why`, for a message and for a log."""
    log = tmp_path / "train.log"
    log.write_text(f"[rank3]: {BY_FORMAT['pytorch'].example}\n")
    shown = printed(capsys, "why", str(log))
    text, data = on_node.answer("explain_text", file=str(log))

    assert text == shown
    assert (data["messages"][0]["cause"], data["messages"][0]["rank"]) == ("fragmentation", 3)
    assert on_node.text("explain_text", text=log.read_text()) == shown
    assert "No message says" in on_node.text("explain_text", text="all is well")


def test_settings_are_compared_as_by_the_command(
    folder: Path, on_node: Assistant, capsys: pytest.CaptureFixture[str]
) -> None:
    """`what_if` answers with the table and the recommendation of `torchmem whatif`."""
    path = str(folder / "snapshot.pickle")
    asked = {"file": path, "gpu_model": "1GiB", "settings": ["expandable_segments:True"]}
    shown = printed(
        capsys, "whatif", path, "--gpu-model", "1GiB", "--setting", "expandable_segments:True"
    )
    text, data = on_node.answer("what_if", **asked)
    (answer,) = data["gpus"]

    assert text == shown
    assert answer["verdict"]["sentence"] in " ".join(shown.split())
    assert all("timeline" not in outcome for outcome in answer["outcomes"])


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("rank_report", {"rank": 77}, "matches; ranks: rank 0 of run eval (pid "),
        ("rank_report", {}, "several ranks match: rank 0 of run eval"),
        ("what_holds_memory", {"run": "nope"}, "matches; ranks: "),
        ("explain_oom", {"run": "nope"}, "has no OOM report of such a rank: call oom_reports."),
        ("explain_oom", {"file": "/nope"}, "/nope does not exist: "),
        ("explain_oom", {"file": "/etc/hosts"}, "/etc/hosts is not an OOM report"),
        ("read_snapshot", {"file": "/nope"}, "/nope does not exist: "),
        ("read_snapshot", {"file": "/etc/hosts"}, "/etc/hosts is not a memory snapshot"),
        ("read_snapshot", {"file": "/dev/zero"}, "/dev/zero is not a regular file"),
        ("read_snapshot", {"file": "a\0b"}, "`file` has a NUL character: leave it out."),
        ("explain_oom", {"file": "a\0b"}, "`file` has a NUL character: leave it out."),
        ("explain_oom", {"file": "a" * 4096}, "cannot be read (File name too long)"),
        ("what_if", {"file": "/", "settings": ["\0"]}, "`settings` has a NUL character"),
        ("read_snapshot", {"file": "{}/large"}, "is larger than 256 MiB: run `torchmem why"),
        ("read_snapshot", {"file": "{}/code"}, "refers to code (posix.system)"),
        ("what_if", {"file": "{}/code"}, "refers to code (posix.system)"),
        ("read_snapshot", {"file": "{}/snapshot.pickle", "gpu": 5}, "has nothing of cuda:5"),
        ("read_snapshot", {"file": "{}/snapshot.pickle", "at": "oom"}, "no OutOfMemoryError"),
        ("read_snapshot", {"file": "{}/snapshot.pickle", "rows": 0}, "greater than or equal to 1"),
        ("what_if", {"file": "{}/large"}, "is larger than 256 MiB: run `torchmem whatif"),
        ("what_if", {"file": "/etc/hosts"}, "/etc/hosts is not a memory snapshot"),
        ("what_if", {"file": "/nope", "gpu_model": "abacus"}, "--gpu-model: "),
        ("what_if", {"file": "/nope", "settings": ["max_split_size_mb:x"]}, "--setting: "),
        ("what_if", {"file": "/nope", "settings": ["a:1"] * 9}, "at most 8 items"),
        ("explain_text", {}, "pass `text` or `file`, one of them."),
        ("explain_text", {"text": "a", "file": "b"}, "pass `text` or `file`, one of them."),
        ("explain_text", {"file": "{}/snapshot.pickle"}, "is not a text: call explain_oom"),
        ("explain_text", {"text": "a" * 200_001}, "at most 200000 characters"),
        ("list_ranks", {"run": 5}, "Input should be a valid string"),
        ("release", {}, "Unknown tool"),
    ],
)
def test_an_error_is_one_sentence(
    tool: str, arguments: dict[str, object], sentence: str, folder: Path, on_node: Assistant
) -> None:
    """What cannot be answered is an error that says why, and the server goes on."""
    with (folder / "large").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    (folder / "code").write_bytes(pickle.dumps(os.system))
    named = {
        key: value.format(folder) if isinstance(value, str) else value
        for key, value in arguments.items()
    }

    assert sentence in on_node.error(tool, **named)


def test_two_calls_at_once(folder: Path, on_node: Assistant) -> None:
    """Calls that overlap get their own answers."""
    path = str(folder / "snapshot.pickle")
    asked = [("what_if", {"file": path}), ("list_ranks", {}), ("read_snapshot", {"file": path})]
    running = [
        on_node.portal.start_task_soon(on_node.client.call_tool, tool, arguments)
        for tool, arguments in asked
    ]
    keys = [set(each.result(300).structured_content) - {"note", "source"} for each in running]

    assert keys == [{"gpus"}, {"ranks"}, {"gpus"}]


def test_a_directory_without_reports(tmp_path: Path) -> None:
    """An empty or missing run directory is an answer or an error, as for the commands."""
    (tmp_path / "run").mkdir()
    with assistant("--run-dir", tmp_path / "run") as connected:
        assert "No ranks: start one" in connected.text("list_ranks")
        assert connected.text("oom_reports").endswith(" has no OOM report.\n")
        assert " has no OOM report of such a rank" in connected.error("explain_oom")
        (tmp_path / "run").rmdir()
        assert "does not exist: " in connected.error("list_ranks")


def test_a_rank_that_was_killed(tmp_path: Path) -> None:
    """The state of a rank that is gone, and left no ending, is `killed`."""
    gone = own_process(run="gone", pid=1 << 22, start_ticks=1)
    publish(tmp_path, own_sample(process=gone, oom_pending=False, timestamp=time.time() - 3600))
    with assistant("--run-dir", tmp_path) as connected:
        (row,) = connected.data("list_ranks")["ranks"]

    assert (row["state"], row["is_live"]) == ("killed", False)
    assert row["verdict"] == ["It was ended by a signal, without an exception."]
