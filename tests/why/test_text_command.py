"""`torchmem why` on texts: files, logs of several ranks, stdin, and what is no text."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path

import pytest
from support.recordings import varying_lengths

from torchmem.cli.main import main
from torchmem.explain.texts.formats import BY_NAME, FORMATS, TextFormat
from torchmem.explain.texts.scan import (
    AHEAD_BYTES,
    BEHIND_BYTES,
    CHUNK_BYTES,
    MAX_EXAMINED,
    Findings,
    scan,
)
from torchmem.why.text import TextAnswer, rank_in_path

MESSAGE = BY_NAME["pytorch"].example
LOST = BY_NAME["lost_peer"].example


def why(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run the command; return its exit code, and what it wrote to stdout and stderr."""
    code = main(["why", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Make this the content of stdin."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_message_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cause, numbers, what is unknown, what to do and the next command; the exit code is 0."""
    path = tmp_path / "error.txt"
    path.write_text(MESSAGE)
    code, out, err = why(capsys, path)

    assert (code, err) == (0, "")
    assert "Fragmentation: 15.20 GiB (19% of the GPU) was free but stranded." in out
    assert "reserved, without a tensor   15.20 GiB" in out
    assert "expandable_segments:True" in out
    assert "The text does not say what holds the memory" in out
    assert "TORCHMEM_CAPTURE_ON_OOM=trace torchmem run -- python train.py" in out


def test_logs_of_ranks_are_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank is that of the path; the first in time is the first, and others are told apart."""
    times = {0: "05:06:09", 3: "05:06:07"}
    for rank in range(4):
        folder = tmp_path / str(rank)
        folder.mkdir()
        text = f"2026-03-04 {times[rank]} {MESSAGE}\n" if rank in times else f"{LOST}\n"
        (folder / "stderr.log").write_text(f"step {10 + rank}\n{text}")
    logs = sorted(tmp_path.glob("*/stderr.log"))
    code, out, _ = why(capsys, *logs)
    document = json.loads(why(capsys, *logs, "--json")[1])

    assert code == 0
    assert "2 ranks ran out of memory" in out
    assert "1 consequence" not in out
    assert "2 messages on ranks 1, 2" in " ".join(out.split())
    (oom,) = [each for each in document["messages"] if each["role"] == "oom"]
    assert (oom["rank"], oom["ranks"], oom["count"]) == (0, [0, 3], 2)
    assert oom["step"] == 10
    assert len(document["texts"]) == 4


def test_the_first_in_time_is_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the kinds differ, the times of the lines decide, not the order of the files."""
    library = BY_NAME["math_library"].example
    (tmp_path / "rank0.log").write_text(f"2026-03-04 05:06:09 {library}\n")
    (tmp_path / "rank1.log").write_text(f"2026-03-04 05:06:07 {MESSAGE}\n")
    _, out, _ = why(capsys, *sorted(tmp_path.iterdir()))

    assert "the first was rank 1" in out
    assert out.index("1. Fragmentation") < out.index("2. A library")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], encoding: str
) -> None:
    """A text is read from a pipe, also as Windows PowerShell writes it."""
    pipe(monkeypatch, f"élan\n[rank2]: {MESSAGE}\n".encode(encoding))
    code, out, _ = why(capsys, "-")

    assert code == 0
    assert "rank 2, cuda:0, line 2" in out


def test_another_kind_on_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no text is explained as the file would be."""
    pipe(monkeypatch, pickle.dumps(varying_lengths(steps=3).snapshot()))
    code, out, _ = why(capsys, "-")

    assert code == 0
    assert "By line" in out


@pytest.mark.parametrize(
    ("content", "code", "sentence"),
    [
        (b"all is well\n", 1, "No message says that memory ran out in 12 bytes of text."),
        (LOST.encode(), 1, "These ranks fell as a consequence of another one"),
        (BY_NAME["jax"].example.encode(), 1, "Passed over, 1 message from JAX or TensorFlow"),
        (BY_NAME["warning"].example.encode(), 0, "Without an error after it, memory sufficed."),
    ],
)
def test_nothing_to_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, code: int, sentence: str
) -> None:
    """It says so, and the exit code is 1; a warning is explained."""
    path = tmp_path / "log"
    path.write_bytes(content)
    found, out, err = why(capsys, path)

    assert (found, err) == (code, "")
    assert sentence in " ".join(out.split())


def test_what_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Binary data is one sentence; the texts beside it are explained, and the exit code is 2."""
    binary, text = tmp_path / "core", tmp_path / "log"
    binary.write_bytes(b"\x7fELF\0\0")
    text.write_text(MESSAGE)
    code, out, err = why(capsys, binary, text)

    assert code == 2
    assert "is a binary file of an unknown kind: name an OOM report, a memory snapshot" in err
    assert "Fragmentation" in out
    assert why(capsys, tmp_path / "none")[0] == 2


def test_an_empty_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was piped: one sentence."""
    pipe(monkeypatch, b"")
    code, out, err = why(capsys, "-")

    assert (code, out) == (2, "")
    assert err.startswith("torchmem: stdin is empty: pipe ")


@pytest.mark.parametrize("flags", [("--leaks",), ("--gpu", "0"), ("--html", "page.html")])
def test_flags_for_other_kinds(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    """What has no meaning for a text is refused."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "log"
    path.write_text(MESSAGE)
    code, out, err = why(capsys, path, *flags)

    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_hostile_line_is_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither escapes of a terminal nor names of files reach it."""
    path = tmp_path / "log"
    hostile = "\x1b]0;owned\x07\x9b31m\u202e"
    path.write_text(f"{hostile}[rank1]: {MESSAGE[:40]}{hostile}{MESSAGE[40:]}\n{hostile}")
    for flags in ((), ("--json",)):
        _, out, _ = why(capsys, path, *flags)
        assert out.replace("\n", "").isprintable()


@pytest.mark.parametrize("before", [0, CHUNK_BYTES - 80, CHUNK_BYTES + BEHIND_BYTES, 3 * 1 << 20])
def test_a_message_anywhere_in_a_log_is_found_once(before: int) -> None:
    """Also where it crosses the pieces in which a text is read, with its line and its step."""
    line = b"iteration 7/ 90 | loss 2.31\n"
    lines = before // len(line) + 1
    text = line * lines + MESSAGE.encode() + b"\n" + line * (AHEAD_BYTES // len(line))
    findings = Findings()
    scan(io.BytesIO(text).read, findings)
    (found,) = findings.kinds.values()

    assert (found.count, found.line, found.step) == (1, lines + 1, 7)
    assert findings.bytes_read == len(text)


def test_a_line_without_an_end() -> None:
    """A message in the middle of ten megabytes on one line is found, in bounded memory."""
    text = b"x" * (5 << 20) + b" " + MESSAGE.encode() + b" " + b"x" * (5 << 20)
    findings = Findings()
    scan(io.BytesIO(text).read, findings)
    (found,) = findings.kinds.values()

    assert found.judged.cause == "fragmentation"


def test_a_log_that_repeats_itself_is_bounded() -> None:
    """Only so many lines are looked at, and the answer says so."""
    findings = Findings(examined=MAX_EXAMINED - 5)
    scan(io.BytesIO(f"{LOST}\n".encode() * 10 + MESSAGE.encode()).read, findings)
    answer = TextAnswer(["log"], findings)

    assert findings.examined == MAX_EXAMINED
    assert sum(each.count for each in findings.kinds.values()) == 5
    assert f"Only the first {MAX_EXAMINED:,} lines that may say so" in " ".join(
        answer.words().split()
    )


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("logs/rank3.log", 3),
        ("out-rank_12.txt", 12),
        ("logs/none_1/attempt_0/5/stderr.log", 5),
        ("slurm-4711.out", None),
        ("frank2.log", 2),
    ],
)
def test_the_rank_in_a_path(path: str, rank: int | None) -> None:
    """Torchrun's folders and names with the word rank say whose log it is."""
    assert rank_in_path(path) == rank


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_an_example_is_of_its_format(known: TextFormat) -> None:
    """The example that the documentation shows is read as a message of that format."""
    findings = Findings()
    scan(io.BytesIO(known.example.encode()).read, findings)

    assert [each.known for each in findings.kinds.values()] == [known]
