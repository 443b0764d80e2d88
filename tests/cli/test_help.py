"""Help texts: bare `torchmem` explains itself, and every example works."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.examples import prepare

from torchmem.cli.main import COMMANDS, command_line, main
from torchmem.commands.manifests import MADE

COLUMNS = 80
NAMES = (*COMMANDS, *(f"manifests {kind}" for kind in MADE))
_EXAMPLE = re.compile(r"^  (torchmem .+)$", re.MULTILINE)
# They serve until Ctrl-C, or need another process, CUDA, NVML or a server.
NOT_RUN = re.compile(
    r"torchmem (demo( --scenario .*)?|top( .*)?|exporter --listen .*|run .* torchrun .*|capture .*"
    r"|preflight .*|release .*|doctor --prometheus .*|manifests dashboards --grafana .*|fleet .*)"
)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let argparse format for a terminal of the usual width."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def help_text(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return the help text of a command, or of `torchmem` itself."""
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command, "--help"])
    return capsys.readouterr().out


def examples(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the examples of all help texts."""
    texts = [help_text(capsys), *(help_text(capsys, *name.split()) for name in NAMES)]
    return [example for text in texts for example in _EXAMPLE.findall(text)]


def test_bare_torchmem_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command, the help text is on stdout and the exit code is 0."""
    assert main([]) == 0
    assert capsys.readouterr().out == help_text(capsys)


@pytest.mark.parametrize("name", NAMES)
def test_a_help_text_has_examples_and_fits_a_terminal(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command has two examples of its own, and no line is longer than 80 columns."""
    text = help_text(capsys, *name.split())

    assert (
        sum(f"{example} ".startswith(f"torchmem {name} ") for example in _EXAMPLE.findall(text))
        >= 2
    )
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_every_example_is_a_valid_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The parser accepts the flags and values of every example."""
    for example in examples(capsys):
        words = shlex.split(example.partition(" > ")[0])
        assert callable(command_line().parse_args(words[1:]).run), example


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the files that they name, the examples succeed, in the order of the help texts."""
    environment = prepare(tmp_path)
    ran = [example for example in examples(capsys) if not NOT_RUN.fullmatch(example)]
    assert len(ran) > len(COMMANDS)
    for example in ran:
        done = subprocess.run(
            ["sh", "-c", example],
            stdin=subprocess.DEVNULL,  # at whose end mcp ends
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        # doctor finds no exporter.
        expected = 1 if example == "torchmem doctor" else 0
        assert done.returncode == expected, f"{example}: {done.stderr}"
