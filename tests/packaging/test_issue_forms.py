"""The forms for issues: they are valid, and ask for what can be given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from torchmem.cli.main import command_line

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_the_form_is_valid(path: Path) -> None:
    """The form has what GitHub requires: name, description, and fields with an id and a label."""
    form = yaml.safe_load(path.read_text())
    fields = form["body"]

    assert form.keys() <= {"name", "description", "labels", "body"}
    assert form["name"]
    assert form["description"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations") == {"required": True} for field in fields)
    for field in fields:
        assert field["type"] == "textarea"
        assert field["attributes"].keys() <= {"label", "description", "render"}
        assert field["attributes"]["label"]


def test_the_commands_that_a_reporter_runs_exist() -> None:
    """Each command line of torchmem in the forms and in SECURITY.md can be parsed."""
    texts = [path.read_text() for path in (*FORMS, ROOT / "SECURITY.md")]
    commands = {words for text in texts for words in re.findall(r"`torchmem ([^`]+)`", text)}

    assert {"doctor", "why --json", "--version"} <= commands
    for words in commands - {"--version"}:
        assert callable(command_line().parse_args(words.split()).run)
