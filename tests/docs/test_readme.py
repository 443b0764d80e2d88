"""The README cannot rot: its tables, links and commands are those of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from support import promql

from torchmem.cli.main import COMMANDS
from torchmem.sdk._settings import PREFIX, Settings


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    """The text of README.md."""
    return (root / "README.md").read_text()


def test_every_setting_is_documented_with_its_variable(readme: str) -> None:
    """The settings table names each field of `Settings`, its environment variable, and numeric defaults as they are."""
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", readme, re.MULTILINE))

    assert {
        field.name: PREFIX + field.name.upper() for field in dataclasses.fields(Settings)
    } == rows
    for field in dataclasses.fields(Settings):
        if isinstance(field.default, float):
            assert f"| `{field.name}` | `{rows[field.name]}` | {field.default:g} |" in readme


def test_every_alert_is_listed(root: Path) -> None:
    """The table in docs/alerts.md names each alert of the rules once."""
    listed = re.findall(
        r"^\| \[(\w+)\]\(runbooks/", (root / "docs" / "alerts.md").read_text(), re.MULTILINE
    )

    assert sorted({rule["alert"] for rule in promql.rules("alert")}) == sorted(listed)


def test_every_command_is_shown(readme: str) -> None:
    """No subcommand is a secret."""
    assert [
        name
        for name in COMMANDS
        if f"torchmem {name}" not in readme and f"make {name}" not in readme
    ] == []


def test_the_page_of_an_oom_is_what_the_command_prints(readme: str, root: Path) -> None:
    """Every line of the example comes from the command's own output, in its order."""
    example = readme.split("$ torchmem oom\n")[1].split("```", maxsplit=1)[0].splitlines()
    printed = iter((root / "tests" / "oom" / "golden" / "stranded.txt").read_text().splitlines())

    assert [line for line in example if line != "…" and line not in printed] == []


def test_every_link_leads_somewhere(readme: str, root: Path) -> None:
    """Relative links and pictures exist."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", readme)

    assert targets
    assert [target for target in targets if not (root / target).exists()] == []


def test_every_make_target_named_exists(readme: str, root: Path) -> None:
    """`make …` in the README and CONTRIBUTING are targets of the Makefile."""
    makefile = (root / "Makefile").read_text()
    text = readme + (root / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"\bmake ([a-z][a-z-]+)", text))

    assert {target for target in targets if f"\n{target}:" not in makefile} <= {"pull"}
