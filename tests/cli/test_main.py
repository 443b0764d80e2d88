"""The `torchmem` command, whichever subcommand it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.reports import STRANDED
from support.waiting import until

from torchmem.cli.main import main
from torchmem.explain.oom_report import encode


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """Ctrl-C ends a subcommand with one line on stderr and the exit code that shells expect."""
    thresholds = tmp_path / "thresholds.yml"
    os.mkfifo(thresholds)
    arguments = ["--thresholds", str(thresholds), "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "torchmem.cli", "manifests", "rules", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        writer = until(lambda: _opened(thresholds))
        until(lambda: _is_asleep(command.pid))  # a signal just before the read would not end it
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=120)
    os.close(writer)

    assert (command.returncode, errors) == (130, "torchmem: interrupted.\n")


def _opened(fifo: Path) -> int | None:
    """Return a descriptor to write to the FIFO once a process reads from it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def _is_asleep(pid: int) -> bool:
    """Return whether a process waits in a system call."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize(
    ("words", "usage", "sentence"),
    [
        (
            ["why", "--hmtl", "x"],
            "torchmem why [-h]",
            "unknown flag --hmtl: did you mean '--html'?",
        ),
        (["why", "--rnak=3"], "torchmem why", "unknown flag --rnak: did you mean '--rank'?"),
        (["why", "--quux"], "torchmem why", "unknown flag --quux: see `torchmem why --help`."),
        (["demo", "a"], "torchmem demo", "unexpected argument 'a': see `torchmem demo --help`."),
        (
            ["doctor", "http://node17:9847"],
            "torchmem doctor",
            "unexpected argument 'http://node17:9847': give an exporter with --exporter URL.",
        ),
        (["--verson"], "torchmem [-h]", "unknown flag --verson: did you mean '--version'?"),
        (
            ["why", "file", "--top", "many"],
            "torchmem why",
            "argument --top: invalid int value: 'many'; see `torchmem why --help`.",
        ),
    ],
)
def test_a_wrong_flag_shows_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str, sentence: str
) -> None:
    """The last line says which flag is meant, and the exit code is 2."""
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"usage: {usage}")
    assert lines[-1] == f"torchmem: {sentence}"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("prefligt", "did you mean 'preflight'?"),
        ("zebra", "`torchmem --help` lists the commands."),
        ("phantom", "run `python -m torchmem.phantom`."),
        ("help", "run `torchmem --help`."),
        ("rules", "run `torchmem manifests rules`."),
    ],
)
def test_an_unknown_command_names_the_nearest(
    capsys: pytest.CaptureFixture[str], word: str, sentence: str
) -> None:
    """The error is one line, and the exit code is 2."""
    assert main([word, "--flag"]) == 2
    assert capsys.readouterr().err == f"torchmem: there is no command {word!r}: {sentence}\n"


def test_a_file_without_a_command_names_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchmem FILE` says what the file is."""
    path = tmp_path / "1-2-3-1.oom.json"
    path.write_bytes(encode(STRANDED))

    assert main([str(path)]) == 2
    assert f"is an OOM report, not a command: run `torchmem why {path}`." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "top", "demo"])
def test_a_file_of_another_command_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A command that takes no file says which one reads it."""
    path = tmp_path / "1-2-3-1.oom.json"
    path.write_bytes(encode(STRANDED))

    assert main([command, str(path)]) == 2
    assert f"run `torchmem why {path}`." in capsys.readouterr().err


def test_a_file_that_is_not_executable_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchmem run` exits as a shell does, with what to do."""
    path = tmp_path / "train"
    path.write_text("#!/bin/sh\n")

    assert main(["run", "--", str(path)]) == 126
    assert f"make it executable (chmod +x {path})" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["manifests", "rules", "--out", "."], ["exporter", "--once"]])
def test_a_file_that_is_not_yaml_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Settings are not read from a file of another kind, although JSON is YAML."""
    path = tmp_path / "report"
    path.write_bytes(encode(STRANDED))

    assert main([*command, "--thresholds", str(path)]) == 2
    assert "is an OOM report, not a YAML file: run `torchmem why" in capsys.readouterr().err


def test_too_little_host_memory_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that runs out of memory ends with a sentence, without a traceback."""

    def run(_: object) -> int:
        raise MemoryError

    monkeypatch.setattr("torchmem.manifests.completion.run", run)
    assert main(["manifests", "completion", "bash"]) == 1
    assert "too little free memory" in capsys.readouterr().err
